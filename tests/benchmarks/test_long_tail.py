"""The stand-in for the learner's arithmetic in `benchmarks/long_tail.py` has the metrics of a step."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_policy import CPU, make_batch, make_spec, save_tiny_policy

from benchmarks.long_tail.trainer import VARIABLE, TimedTrainer
from paceline.learner.step.trainer import Trainer


def test_the_timed_step_has_the_metrics_of_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1000000")
    spec = make_spec(save_tiny_policy(tmp_path))
    timed = TimedTrainer(spec, CPU).train_step(make_batch(), 0)
    real = Trainer(spec, CPU).train_step(make_batch(), 0)
    assert timed["loss"] == 0.0
    for name in ("tokens", "sequences", "micro_batches", "teraflop"):
        assert timed[name] == real[name]
    assert timed["step_s"] >= timed["tokens"] / 1_000_000
