"""The figures of `benchmarks/evaluation_delay.py`: steps from the first evaluation on, waits by their seconds, evaluations by theirs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_only_steps_from_the_first_evaluation_to_the_last_measured_one_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # as for a script, which imports its parts from its folder
    benchmark = importlib.import_module("evaluation_delay")
    period = benchmark.PERIOD

    def trained(step: int, wait_s: float) -> dict[str, Any]:
        return {
            "kind": "train",
            "step": step,
            "time": 2.0 * step,
            "learner_wait_s": wait_s,
            "trained_tokens": 10,
        }

    records = [trained(step, 1.0 if step == period else 0.0) for step in range(period + 10)]
    records += [
        {"kind": "eval", "step": period + 1, "requested_step": period, "time": 2.0 * (period - 1) + 3.0},
        {"kind": "eval", "step": period + 8, "requested_step": period + 8, "time": 99.0},
    ]
    assert benchmark.figures(records, period + 4) == {
        "steps": 5,
        "seconds": 10.0,
        "step_s": 2.0,
        "wait_share": 0.1,
        "trained_tokens": 50,
        "evaluation_s": [3.0],
    }
