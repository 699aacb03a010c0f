"""`max_hours`: the time that counts, the last step, and what the learner is told."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from control_plane import Plane, learner

from paceline.services.coordinator.lifecycle.coordinator import Coordinator
from paceline.services.coordinator.lifecycle.preemption import TRAINED_TIME, Hours
from paceline.v1 import run_pb2, worker_pb2

HOUR_S = 3600.0


async def limited(plane: Plane, **sections: object) -> tuple[str, Hours]:
    """Return a run of half an hour and a clock of its own, which has begun to count."""
    run = await plane.run_one(max_hours=0.5, **sections)
    hours = Hours(plane.coordinator.context)
    await hours.check(0.0)
    return run.run_id, hours


async def test_the_run_ends_after_the_newest_fixed_batch(plane: Plane) -> None:
    run_id, hours = await limited(plane)
    with plane.ledger.transaction():
        plane.ledger.update_run(run_id, next_step=2, next_batch=3)
    exchange = plane.coordinator.exchange
    await hours.check(0.4 * HOUR_S)
    assert exchange.active.state.end_step == 0
    await hours.check(0.5 * HOUR_S)
    assert exchange.active.state.end_step == plane.ledger.end_step(run_id) == 3
    last = plane.ledger.run(run_id)["max_num_steps"]
    assert plane.ledger.run(run_id)["message"] == f"the max_hours of 0.5 are over: the run ends after step 3 of {last}"
    assert exchange.active is not None
    assert exchange.takes_no_work(exchange.active), "no group is leased that no step needs"
    assert exchange.active.num_steps == 3


async def test_pauses_and_lives_before_do_and_do_not_count(plane: Plane) -> None:
    run_id, hours = await limited(plane)
    await hours.check(0.3 * HOUR_S)
    await plane.runs.Pause(run_pb2.PauseRequest(run_id=run_id))
    await hours.check(5 * HOUR_S)
    await plane.runs.Resume(run_pb2.ResumeRequest(run_id=run_id))
    await hours.check(6 * HOUR_S)
    await hours.check(6.1 * HOUR_S)
    assert plane.ledger.counters(run_id)[TRAINED_TIME] == pytest.approx(0.4 * HOUR_S * 1000)
    assert plane.ledger.end_step(run_id) == 0
    after_restart = Hours(plane.coordinator.context)
    await after_restart.check(0.0)
    await after_restart.check(0.1 * HOUR_S)
    assert plane.ledger.end_step(run_id) == 1, "a run trains one step at least"


async def test_a_new_coordinator_keeps_the_end(tmp_path: Path) -> None:
    plane = await Plane.started(tmp_path)
    run_id, hours = await limited(plane)
    with plane.ledger.transaction():
        plane.ledger.update_run(run_id, next_step=2, next_batch=2)
    await hours.check(HOUR_S)
    await plane.stop()
    again = await Plane.started(tmp_path)
    try:
        owner: Coordinator = again.coordinator
        assert (owner.exchange.active and owner.exchange.active.run_id, owner.exchange.active.state.end_step) == (
            run_id,
            2,
        )
        trainer = learner(again)
        assignment = await trainer.hear("run")
        with again.ledger.transaction():
            again.ledger.update_run(run_id, session=assignment.session)
        trainer.say(run_report=worker_pb2.RunReport(run_id=run_id, session=assignment.session, finished=True))
        again.run_loops()
        await again.watch_until(run_id, "state", state="succeeded")
        assert again.ledger.run(run_id)["message"].startswith(
            "the max_hours of 0.5 are over: the run ends after step 2 of"
        )
    finally:
        await again.stop()


async def test_hours_that_end_with_the_last_step_change_nothing(plane: Plane) -> None:
    run_id, hours = await limited(plane)
    last = plane.ledger.run(run_id)["max_num_steps"]
    with plane.ledger.transaction():
        plane.ledger.update_run(run_id, next_step=last - 1, next_batch=last)
    await hours.check(HOUR_S)
    assert plane.ledger.end_step(run_id) == 0
    assert plane.ledger.run(run_id)["message"] == ""


async def test_a_run_without_a_limit_writes_nothing(running: tuple[Plane, str]) -> None:
    plane, run_id = running
    hours = Hours(plane.coordinator.context)
    await hours.check(time.monotonic())
    await hours.check(time.monotonic() + 100 * HOUR_S)
    assert TRAINED_TIME not in plane.ledger.counters(run_id)
