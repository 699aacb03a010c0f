"""No session gets a number that a checkpoint, a worker or the ledger knows already."""

from __future__ import annotations

from pathlib import Path

import pytest
from control_plane import Plane, learner, rollout

from paceline.services.coordinator.ledger.backup import back_up
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.pool.assignments import MAX_LATER_SESSIONS
from paceline.services.coordinator.sessions import (
    MOST_LOST,
    OnDisk,
    SessionNumbers,
    scan_checkpoints,
    session_of,
)
from paceline.v1 import common_pb2, worker_pb2


def test_the_next_number_is_above_all_that_was_heard_of() -> None:
    numbers = SessionNumbers()
    assert numbers.next("a-1", 2) == 3
    assert numbers.note_session("a-1", 2, 7)
    assert numbers.note_session("a-1", 2, 5)
    assert numbers.next("a-1", 2) == 8
    assert numbers.next("a-1", 9) == 10
    assert numbers.next("b-1", 2) == 3


@pytest.mark.parametrize("session", [-1, 3 + MOST_LOST, 2**63])
def test_a_number_that_cannot_be_is_not_believed(session: int) -> None:
    numbers = SessionNumbers()
    assert not numbers.note_session("a-1", 2, session)
    assert numbers.next("a-1", 2) == 3


@pytest.mark.parametrize(
    ("name", "session"), [("12-3", 12), ("12", None), ("set-aside-1", None), ("9" * 19 + "-1", None)]
)
def test_names_of_checkpoints(name: str, session: int | None) -> None:
    assert session_of(name) == session


def complete(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "manifest.json").write_text("{}")


def test_complete_checkpoints_ahead_of_the_ledger_are_set_aside(tmp_path: Path) -> None:
    assert scan_checkpoints(tmp_path / "nowhere", (1, 4), (), move=True) == OnDisk()
    complete(tmp_path, "1-2", "1-4", "1-6", "2-3", "2-8")
    (tmp_path / "3-1").mkdir()  # torn: of no use to anybody, but its number is taken
    (tmp_path / "notes").mkdir()
    known = {str(tmp_path / "1-6")}
    assert scan_checkpoints(tmp_path, (1, 4), known, move=False) == OnDisk(3)
    found = scan_checkpoints(tmp_path, (1, 4), known, move=True)
    assert found == OnDisk(3, ("2-3", "2-8"), str(tmp_path / "set-aside-1"))
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "1-2",
        "1-4",
        "1-6",
        "3-1",
        "notes",
        "set-aside-1",
    ]
    complete(tmp_path, "2-3")
    assert scan_checkpoints(tmp_path, (1, 4), known, move=True).place == str(tmp_path / "set-aside-2")
    assert (tmp_path / "set-aside-1" / "2-3" / "manifest.json").is_file()


async def running(plane: Plane) -> str:
    run_id = (await plane.submit()).run_id
    plane.run_loops()
    await plane.watch_until(run_id, "state", state="running")
    return run_id


def hello_version(session: int, step: int) -> common_pb2.PolicyVersion:
    return common_pb2.PolicyVersion(session=session, step=step)


async def test_a_session_is_above_those_on_disk(plane: Plane) -> None:
    run_id = await running(plane)
    complete(plane.directory / run_id / "checkpoints", "4-2")
    worker = learner(plane)
    assert (await worker.hear("run")).session == 5
    await plane.watch_until(run_id, "warning")
    assert (plane.directory / run_id / "checkpoints" / "set-aside-1" / "4-2").is_dir()


@pytest.mark.parametrize("was_restored", [True, False])
async def test_checkpoints_elsewhere_are_set_aside_by_a_ledger_that_was_restored(
    tmp_path: Path, was_restored: bool
) -> None:
    ledger = Ledger(tmp_path / "own.sqlite")
    if was_restored:
        back_up(ledger, tmp_path / "ledger.sqlite")
    ledger.close()
    plane = await Plane.started(tmp_path)
    try:
        elsewhere = tmp_path / "elsewhere"
        run_id = (await plane.submit(checkpointing={"checkpoint_dir": str(elsewhere)})).run_id
        plane.run_loops()
        await plane.watch_until(run_id, "state", state="running")
        complete(elsewhere / run_id, "4-2")
        assert (await learner(plane).hear("run")).session == 5
        assert (elsewhere / run_id / "set-aside-1" / "4-2").is_dir() == was_restored
        assert (elsewhere / run_id / "4-2").is_dir() != was_restored
    finally:
        await plane.stop()


async def test_a_session_is_above_those_of_living_workers(plane: Plane) -> None:
    run_id = await running(plane)
    worker = rollout(plane, run_id=run_id, version=hello_version(6, 12))
    await worker.hear("run")
    assert plane.coordinator.exchange.workers.versions == {}, "nobody knows those weights"
    assert (await learner(plane, run_id=run_id, session=3).hear("run")).session == 7


async def test_a_worker_that_comes_after_the_learner_is_outnumbered_too(plane: Plane) -> None:
    run_id = await running(plane)
    trainer = learner(plane)
    assert (await trainer.hear("run")).session == 1
    known = rollout(plane, "rollout-known", run_id=run_id, version=hello_version(1, 0))
    await known.hear("run")
    late = rollout(plane, "rollout-late", run_id=run_id, version=hello_version(1, 12))
    await late.hear("run")
    assert (await trainer.hear("run")).session == 2
    assert plane.coordinator.exchange.workers.versions == {"rollout-known": (1, 0)}


async def test_a_worker_that_says_so_again_and_again_ends_no_further_session(plane: Plane) -> None:
    run_id = await running(plane)
    trainer = learner(plane)
    assert (await trainer.hear("run")).session == 1
    for number in range(1, MAX_LATER_SESSIONS + 4):
        newest = plane.ledger.run(run_id)["session"]
        liar = rollout(plane, f"liar-{number}", run_id=run_id, version=hello_version(newest, 10**6))
        await liar.hear("run")
        liar.hang_up()
        await liar.hear_the_end()
    assert plane.ledger.run(run_id)["session"] == 1 + MAX_LATER_SESSIONS
    member = plane.coordinator.members.get("learner-1")
    assert member is not None
    assert member.session == 1 + MAX_LATER_SESSIONS, "it trains on"


async def test_a_learner_whose_receipts_the_ledger_has_not_begins_anew(plane: Plane) -> None:
    run_id = await running(plane)
    first = learner(plane)
    welcome = await first.hear("welcome")
    assert (await first.hear("run")).session == 1
    first.hang_up()
    await first.hear_the_end()
    again = learner(plane, run_id=run_id, session=1, version=hello_version(1, 3), secret=welcome.secret)
    assert (await again.hear("run")).session == 2


async def test_a_learner_whose_receipts_are_here_goes_on(plane: Plane) -> None:
    run_id = await running(plane)
    first = learner(plane)
    welcome = await first.hear("welcome")
    await first.hear("run")
    async with plane.coordinator.context.lock:
        with plane.ledger.transaction():
            plane.ledger.db.execute(
                "INSERT INTO receipts (run_id, session, step, rank, world_size, group_ids, digests, tokens)"
                " VALUES (?, 1, 2, 0, 1, '[]', '[]', 0)",
                (run_id,),
            )
    first.hang_up()
    await first.hear_the_end()
    again = learner(plane, run_id=run_id, session=1, version=hello_version(1, 3), secret=welcome.secret)
    await again.hear("epoch")
    assert plane.ledger.run(run_id)["session"] == 1


async def test_a_learner_that_finds_the_number_taken_gets_one_above(plane: Plane) -> None:
    run_id = await running(plane)
    worker = learner(plane)
    assignment = await worker.hear("run")
    path = str(plane.directory / run_id / "checkpoints" / "9-4")  # on the learner's own disk
    report = worker_pb2.RunReport(
        run_id=run_id,
        session=assignment.session,
        error="it is there already",
        fault=worker_pb2.FAULT_CHECKPOINT,
        checkpoint_path=path,
    )
    worker.say(run_report=report)
    assert (await worker.hear("run")).session == 10
    assert plane.ledger.run(run_id)["state"] == "running"


async def test_the_folder_of_a_run_that_the_ledger_does_not_know_is_set_aside(plane: Plane) -> None:
    complete(plane.directory / "test-1" / "checkpoints", "1-2")
    run = await plane.submit()
    assert run.run_id == "test-1"
    assert not (plane.directory / "test-1" / "checkpoints").exists()
    assert (plane.directory / "test-1.set-aside-1" / "checkpoints" / "1-2").is_dir()
