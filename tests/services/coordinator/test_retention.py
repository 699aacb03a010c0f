"""The choice of checkpoints to keep, by age and by metric."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.sessions import (
    Candidate,
    choose,
    kept_paths,
    mark_surplus_removed,
)
from paceline.spec import CheckpointingSection
from paceline.v1.worker_pb2 import CheckpointReport


def settings(**values: object) -> CheckpointingSection:
    return CheckpointingSection.model_validate(values)


def test_without_a_metric_the_newest_stay() -> None:
    candidates = [Candidate(str(step), None) for step in range(4)]
    assert choose(candidates, settings(keep_top_k=2)) == ["2", "3"]
    assert choose(candidates[:1], settings(keep_top_k=2)) == ["0"]


def test_with_a_metric_the_best_the_newest_and_those_without_a_verdict_stay() -> None:
    values = [0.2, 0.9, 0.5, 0.9, None, None, 0.1]
    candidates = [Candidate(str(i), value, pending=i == 5) for i, value in enumerate(values)]
    best = settings(keep_top_k=2, metric_name="val:reward")
    assert choose(candidates, best) == ["1", "3", "5", "6"]
    lowest = settings(keep_top_k=1, metric_name="train:loss", higher_is_better=False)
    assert choose(candidates[:3], lowest) == ["0", "2"]


def test_of_equal_ones_the_newer_is_better() -> None:
    candidates = [Candidate(str(i), 1.0) for i in range(3)]
    assert choose(candidates, settings(keep_top_k=1, metric_name="val:reward")) == ["2"]


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """Six trained steps, losses 6 down to 1, evaluations after 2 (0.9), 4 (0.1) and 6 (still to come)."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.add_run("a-1", "{}", "dir")
    for step in range(6):
        ledger.db.execute(
            "INSERT INTO batches (run_id, step, digest, chain) VALUES ('a-1', ?, '', ?)", (step, f"c{step}")
        )
        ledger.add_event("a-1", "step", {"step": step, "loss": 6.0 - step})
    for step, reward in ((2, 0.9), (4, 0.1), (6, None)):
        ledger.db.execute(
            "INSERT INTO evaluations (run_id, step, done, result_json) VALUES ('a-1', ?, ?, ?)",
            (step, reward is not None, json.dumps({"step": step + 1, "reward": reward})),
        )
    ledger.update_run("a-1", next_step=6)
    yield ledger
    ledger.close()


def register(ledger: Ledger, steps: list[int], checkpointing: CheckpointingSection) -> list[str]:
    for step in steps:
        report = CheckpointReport(run_id="a-1", session=1, step=step, path=f"1-{step}", chain=f"c{step - 1}")
        ledger.checkpoints.add(report)
        with ledger.transaction():
            mark_surplus_removed(ledger, "a-1", checkpointing)
    return [Path(path).name for path in kept_paths(ledger, "a-1")]


def test_the_ledger_forgets_by_age(ledger: Ledger) -> None:
    assert register(ledger, [1, 2, 3, 4], settings(keep_top_k=2)) == ["1-3", "1-4"]


def test_the_ledger_forgets_by_the_evaluation_after_that_step(ledger: Ledger) -> None:
    by_reward = settings(keep_top_k=1, metric_name="val:reward")
    assert register(ledger, [2, 4], by_reward) == ["1-2", "1-4"]
    assert register(ledger, [6], by_reward) == ["1-2", "1-6"]


def test_the_ledger_forgets_by_a_metric_of_the_step_before(ledger: Ledger) -> None:
    by_loss = settings(keep_top_k=1, metric_name="train:loss")  # the highest, to tell it from the newest
    assert register(ledger, [3, 4, 5], by_loss) == ["1-3", "1-5"]


def test_one_that_a_restart_cannot_use_yet_displaces_none_that_it_can(ledger: Ledger) -> None:
    ledger.update_run("a-1", next_step=4)
    assert register(ledger, [4, 5], settings(keep_top_k=1)) == ["1-4", "1-5"]  # step 4 has no receipts yet
    ledger.update_run("a-1", next_step=6)
    assert register(ledger, [6], settings(keep_top_k=1)) == ["1-6"]
