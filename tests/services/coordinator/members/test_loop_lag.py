"""The coordinator's own pauses do not count as silence of members, and a learner's session outlives a broken stream."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from control_plane import Plane, learner, rollout

from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.members.registry import BEAT_S, LoopLag
from paceline.v1 import worker_pb2


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_lag_is_how_late_beats_are_and_counts_once() -> None:
    clock = Clock()
    lag = LoopLag(clock)
    for _ in range(20):
        clock.now_s += BEAT_S + 0.01
        lag.beat()
    assert lag.take() == 0.0, "a beat that is a little late is no pause"
    clock.now_s += BEAT_S + 8.0
    assert lag.take() == pytest.approx(8.0), "also before the beat itself has come"
    lag.beat()
    assert lag.take() == 0.0
    clock.now_s += BEAT_S / 2
    lag.beat()  # an early beat changes nothing
    clock.now_s += BEAT_S / 2 + 3.0
    lag.beat()
    assert lag.take() == pytest.approx(3.0)


async def test_a_coordinator_that_stood_still_takes_nobody_for_gone(plane: Plane) -> None:
    await plane.run_one()
    trainer, worker = learner(plane), rollout(plane)
    await trainer.hear("run")
    await worker.hear("run")
    pool, members = plane.coordinator.pool, plane.coordinator.members.all()
    await pool.expire_silent()
    heard_s = time.monotonic()
    for member in members:  # from here to the pause nothing else runs, so that the time-out may be short
        member.last_report_s = heard_s
    plane.coordinator.members.timeout_s = 1.0
    time.sleep(1.1)  # noqa: ASYNC251 (the loop stands still, as for a disk or a stopped process)
    await pool.expire_silent()
    assert plane.coordinator.members.all() == members
    assert not any(member.suspected for member in members)
    assert all(member.last_report_s > heard_s for member in members)
    plane.coordinator.members.timeout_s = 60.0


async def test_a_start_that_takes_long_takes_nobody_for_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.db.execute(
        "INSERT INTO groups (run_id, group_id, class, state, slot, member_id)"
        " VALUES ('a-1', 0, 'train', 'leased', 0, 'rollout-1')"
    )
    ledger.close()
    plane = Plane(tmp_path, timeout_s=0.5)

    async def open_data() -> None:
        time.sleep(0.6)  # noqa: ASYNC251

    monkeypatch.setattr(plane.coordinator.runs.starter, "start_next", open_data)
    await plane.start()
    try:
        assert plane.coordinator.members.silent(time.monotonic()) == []
        assert [member.member_id for member in plane.coordinator.members.all()] == ["rollout-1"]
    finally:
        await plane.stop()


async def test_who_came_while_the_port_opened_is_not_expected_any_more(plane: Plane) -> None:
    await plane.coordinator.pool.join(worker_pb2.Hello(role=1, member_id="rollout-1"))
    member = plane.coordinator.members.get("rollout-1")
    ledger = plane.ledger
    ledger.db.execute(
        "INSERT INTO groups (run_id, group_id, class, state, slot, member_id)"
        " VALUES ('a-1', 0, 'train', 'leased', 0, 'rollout-1')"
    )
    plane.coordinator.pool.expect_holders()
    assert plane.coordinator.members.get("rollout-1") is member


async def test_a_second_learner_waits_out_the_firsts_silence(tmp_path: Path) -> None:
    plane = await Plane.started(tmp_path, timeout_s=60.0)
    try:
        run = await plane.run_one()
        first = learner(plane)
        assert (await first.hear("run")).session == 1
        spare = learner(plane, "learner-2")
        await spare.hear("welcome")
        first.hang_up()
        await first.hear_the_end()
        coordinator = plane.coordinator
        member = coordinator.members.get("learner-1")
        assert member is not None
        member.last_report_s -= 45.0  # longer than a worker would have after a broken stream
        await coordinator.pool.expire_silent()
        assert plane.ledger.run(run.run_id)["session"] == 1
        again = learner(plane, session=1, run_id=run.run_id, secret=first.secret)
        await again.hear("epoch")
        again.hang_up()
        await again.hear_the_end()
        member = coordinator.members.get("learner-1")
        assert member is not None
        member.last_report_s -= 61.0
        await coordinator.pool.expire_silent()
        assert (await spare.hear("run")).session == 2
    finally:
        await plane.stop()


async def test_after_a_restart_the_learner_that_had_the_session_keeps_it(tmp_path: Path) -> None:
    plane = await Plane.started(tmp_path)
    run = await plane.run_one()
    first = learner(plane)
    await first.hear("run")
    await plane.stop()
    again = await Plane.started(tmp_path)
    try:
        spare = learner(again, "learner-2")  # it comes back first
        await spare.hear("welcome")
        liar = learner(again, "learner-3", session=1, run_id=run.run_id)
        await liar.hear("welcome")
        back = learner(again, session=1, run_id=run.run_id, secret=first.secret)
        await back.hear("epoch")
        assert again.ledger.run(run.run_id)["session"] == 1
        holder = again.coordinator.pool.assignments.learner()
        assert holder is not None
        assert holder.member_id == "learner-1"
    finally:
        await again.stop()


async def test_a_learner_that_left_before_the_restart_is_not_waited_for(tmp_path: Path) -> None:
    plane = await Plane.started(tmp_path)
    run = await plane.run_one()
    await learner(plane).hear("run")
    member = plane.coordinator.members.get("learner-1")
    assert member is not None
    await plane.coordinator.pool.leave(member, "in good order")
    await plane.stop()
    again = await Plane.started(tmp_path)
    try:
        assert again.coordinator.members.get("learner-1") is None
        assert (await learner(again, "learner-2").hear("run")).session == 2
        assert again.ledger.run(run.run_id)["session"] == 2
    finally:
        await again.stop()


async def test_a_learner_that_never_comes_back_after_a_restart_is_replaced(tmp_path: Path) -> None:
    plane = await Plane.started(tmp_path)
    await plane.run_one()
    await learner(plane).hear("run")
    await plane.stop()
    again = await Plane.started(tmp_path)
    try:
        spare = learner(again, "learner-2")
        await spare.hear("welcome")
        expected = again.coordinator.members.get("learner-1")
        assert expected is not None
        expected.last_report_s -= 61.0
        await again.coordinator.pool.expire_silent()
        assert (await spare.hear("run")).session == 2
    finally:
        await again.stop()


async def test_member_events_wait_for_no_disk(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await plane.run_one()
    with monkeypatch.context() as patch:

        def refuse() -> None:
            raise AssertionError("a sync on the event loop")

        patch.setattr(plane.ledger, "sync", refuse)
        member = await plane.coordinator.pool.join(worker_pb2.Hello(role=1, member_id="rollout-1"))
        await plane.coordinator.pool.joined(member)
        await plane.coordinator.pool.disconnected(member)
        await plane.coordinator.pool.leave(member, "gone")
    await plane.watch_until(run.run_id, "member", what="left: gone")
