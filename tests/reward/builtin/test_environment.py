"""The environment's own reward."""

from __future__ import annotations

import pytest

from paceline.reward.builtin.formats import environment
from paceline.reward.builtin.inputs import MissingColumn


def test_the_reward_is_what_the_environment_gave() -> None:
    assert environment([""] * 2, [[], []], [[1], [2]], environment_reward=[0.5, None]) == [0.5, None]


def test_a_run_without_an_environment_is_told() -> None:
    with pytest.raises(MissingColumn, match="has no environment"):
        environment([""], ["a"], [[1]], answer=[1])
