"""Rewards from a model's reply, which is checked."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import InvalidInput
from paceline.reward.models.settings import ModelSettings, ProcessModelSettings, extra_of, reduced, rewards_of


def test_scale_and_offset() -> None:
    settings = ModelSettings(path="p", scale=2.0, offset=1.0)
    assert rewards_of({"scores": [[3.0], None]}, settings, 2) == [4.0, None]


def test_steps_become_one_number() -> None:
    values = [0.5, 0.25, 1.0]
    assert [reduced(values, how) for how in ("min", "product", "mean", "last")] == [
        0.25,
        0.125,
        1.75 / 3,
        1.0,
    ]
    settings = ProcessModelSettings(path="p", reduce="product")
    assert rewards_of({"scores": [values]}, settings, 1) == [0.125]


@pytest.mark.parametrize(
    "reply", [{}, {"scores": None}, {"scores": [[1.0]]}, {"scores": [[1.0], [float("nan")]]}, {"scores": [[1.0], []]},
              {"scores": [[1.0], ["1"]]}, {"scores": [[1.0], [True]]}, {"scores": [[1.0], 1.0]}]
)  # fmt: skip
def test_a_reply_that_is_none_is_refused(reply: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="the reward model"):
        rewards_of(reply, ModelSettings(path="p"), 2)


def test_columns_beside_the_rewards() -> None:
    reply = {"scores": [[0.5, 0.25], None], "version": "step-3-abc"}
    assert extra_of(reply, ModelSettings(path="p"), "rm", 2) == {}
    assert extra_of(reply, ModelSettings(path="p", refresh_s=1.0), "rm", 2) == {"rm_model": ["step-3-abc"] * 2}
    assert extra_of(reply, ProcessModelSettings(path="p"), "prm", 2) == {"prm_steps": ["0.5 0.25", None]}
