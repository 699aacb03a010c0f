"""A step whose rewards trained nothing is explained."""

from __future__ import annotations

from pathlib import Path

import pytest
from exchange_drivers import make_spec

from services.coordinator.reporting.no_signal import no_signal

NOTHING = {"zero_advantage_fraction": 1.0}


@pytest.mark.parametrize(("metrics", "words"), [
    (NOTHING | {"unscored_fraction": 1.0}, "every reward function returned None for every completion"),
    (NOTHING | {"unscored_fraction": 0.0, "reward": 1.0}, "equal rewards, 1 in the mean"),
    (NOTHING | {"reward": float("nan")}, "equal rewards, so the rewards trained nothing"),
])  # fmt: skip
def test_the_reason_is_in_the_metrics(metrics: dict[str, float], words: str, tmp_path: Path) -> None:
    assert words in no_signal(make_spec(tmp_path), metrics)


def test_completions_that_were_all_cut_off(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, grpo={"overlong_filtering": True})
    assert "cut off at its token limit" in no_signal(spec, NOTHING | {"truncated_fraction": 1.0})


@pytest.mark.parametrize("metrics", [{}, {"zero_advantage_fraction": 0.99, "reward": 0.0}])
def test_a_step_with_a_signal_or_without_advantages_is_not_warned_of(
    metrics: dict[str, float], tmp_path: Path
) -> None:
    assert no_signal(make_spec(tmp_path), metrics) == ""
