"""Results of evaluations, with numbers worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange_drivers import make_spec

from paceline.services.coordinator.exchange.evaluation import evaluation_result

NAN = math.nan


def a_row(rewards: list[list[float]] | None, tokens: int = 4) -> dict[str, Any]:
    """A scored group, or a dropped one."""
    if rewards is None:
        return {"state": "dropped", "rewards": None, "tokens": 0}
    return {"state": "scored", "rewards": np.array(rewards, "<f4").tobytes(), "tokens": tokens}


def result_of(tmp_path: Path, k: int, *rows: dict[str, Any]) -> dict[str, Any]:
    functions = [{"function": "exact_match"}, {"function": "format_reward", "weight": 0.5}]
    spec = make_spec(tmp_path, rewards=functions, grpo={"val_samples_per_prompt": k})
    return evaluation_result(spec, rows, 3)


def test_functions_apart_with_their_standard_errors(tmp_path: Path) -> None:
    result = result_of(tmp_path, 2, a_row([[1, 0.5], [0, NAN]]), a_row([[1, 1], [1, 0]], tokens=8), a_row(None))
    assert result["reward"] == pytest.approx(((1.25 + 0) / 2 + (1.5 + 1) / 2) / 2)
    assert result["reward/exact_match"] == 0.75
    assert result["reward_stderr/exact_match"] == pytest.approx(0.25)
    assert result["reward/format_reward"] == 0.5
    assert result["pass@2/exact_match"] == 1.0
    assert "pass@2/format_reward" not in result  # 0.5 is neither 0 nor 1
    assert (result["prompts"], result["samples"], result["failed"]) == (2, 4, 1)
    assert result["completion_length"] == 3.0


def test_without_any_number_there_is_no_reward(tmp_path: Path) -> None:
    result = result_of(tmp_path, 1, a_row([[NAN, NAN]]))
    assert result["reward"] is None
    assert not [name for name in result if "/" in name or "stderr" in name]
    assert result_of(tmp_path, 1, a_row(None))["failed"] == 1


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([[1, 0], [0, 0]], 0.5),
        ([[1, NAN], [0, 0]], 0.0),
        ([[NAN, NAN], [1, 0]], 1.0),
        ([[NAN, NAN], [NAN, 1]], None),
        ([[0.5, NAN], [1, 0]], None),
        ([[NAN, NAN], [NAN, NAN]], None),
    ],
)
def test_a_completion_without_a_number_takes_no_metric_away(
    tmp_path: Path, groups: list[list[float]], expected: float | None
) -> None:
    rows = [a_row([[value, 0.0] for value in each]) for each in groups]
    result = result_of(tmp_path, 2, *rows)
    assert result.get("pass@2/exact_match") == expected
    assert result["pass@2/format_reward"] == 0.0
    known = [np.nanmean(each) for each in groups if not np.isnan(each).all()]
    assert result.get("reward/exact_match") == (pytest.approx(np.mean(known)) if known else None)
