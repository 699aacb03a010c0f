"""Choice of groups to compare: the first of each worker, then at least its share, only of the step's own version."""

from __future__ import annotations

import sqlite3
from typing import Any, cast

from paceline.services.coordinator.exchange.spot_check import FIRST_CHECKS, Observation, SpotCheck


def batch(step: int, workers: list[str], attempt: int = 1, age: int = 0) -> list[sqlite3.Row]:
    rows: list[dict[str, Any]] = [
        {"group_id": 100 * step + i, "attempt": attempt, "holders": worker, "oldest_step": step - age}
        for i, worker in enumerate(workers)
    ]
    return cast("list[sqlite3.Row]", rows)


def chosen_in(check: SpotCheck, step: int, rows: list[sqlite3.Row]) -> list[str]:
    return sorted(check.choose(f"chain-{step}", step, rows, 0.002).values())


def test_the_first_groups_are_compared_and_then_at_least_two_in_a_thousand() -> None:
    check = SpotCheck(seed=1)
    workers = [worker for worker in ("a", "b") for _ in range(5)]
    compared = [chosen_in(check, step, batch(step, workers)) for step in range(1000)]
    assert compared[:FIRST_CHECKS] == [["a", "b"]] * FIRST_CHECKS
    for first in range(FIRST_CHECKS, 800):  # any thousand groups of a worker
        for worker in ("a", "b"):
            number = sum(worker in names for names in compared[first : first + 200])
            assert 2 <= number <= 4


def test_a_suspected_worker_is_compared_again_at_once() -> None:
    check = SpotCheck(seed=1)
    for step in range(FIRST_CHECKS):
        assert chosen_in(check, step, batch(step, ["a", "b"])) == ["a", "b"]
        for worker in ("a", "b"):
            check.observe(worker, Observation(0.0, 0.001, 1000))
    assert chosen_in(check, 10, batch(10, ["a", "b"])) == []
    assert check.observe("a", Observation(0.012, 0.003, 1000)) is None
    assert chosen_in(check, 11, batch(11, ["a", "b"])) == ["a"]
    check.observe("a", Observation(-0.02, 0.003, 1000))
    check.observe("a", Observation(0.0, 0.003, 1000))
    assert chosen_in(check, 12, batch(12, ["a", "b"])) == ["a"], "it was due before it was cleared"
    assert chosen_in(check, 13, batch(13, ["a", "b"])) == []


def test_the_same_batch_has_the_same_choice() -> None:
    check = SpotCheck(seed=1)
    rows = batch(0, ["a", "a", "a", "b"])
    assert check.choose("x", 0, rows, 0.002) is check.choose("x", 0, rows, 0.002)
    assert check.chosen("y") == {}


def test_older_versions_and_groups_of_several_workers_are_left_out() -> None:
    check = SpotCheck(seed=1)
    assert chosen_in(check, 0, batch(0, ["a"], attempt=2)) == []
    assert chosen_in(check, 1, batch(1, ["a"], age=1)) == []
    assert chosen_in(check, 2, batch(2, ["a"])) == ["a"]
