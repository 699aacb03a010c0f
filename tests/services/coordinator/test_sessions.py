"""A session that cannot load its checkpoint: the next begins from an older one, and the run goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from control_plane import Plane, Worker, learner

from paceline.services.coordinator.sessions import kept_paths, mark_surplus_removed
from paceline.v1 import run_pb2, worker_pb2

STEPS = 3


async def running(plane: Plane, *, keep_samples: bool = True) -> str:
    """A run with three trained steps, of one group each, and a checkpoint after every step."""
    logger = {"tensorboard": False, "keep_samples": keep_samples}
    run_id = (await plane.submit(logger=logger)).run_id
    plane.run_loops()
    await plane.watch_until(run_id, "state", state="running")
    async with plane.coordinator.context.lock:
        with plane.ledger.transaction():
            for step in range(STEPS):
                trained(plane, run_id, step)
            plane.ledger.update_run(run_id, session=1, next_step=STEPS, next_batch=STEPS)
    return run_id


def trained(plane: Plane, run_id: str, step: int) -> None:
    db = plane.ledger.db
    db.execute(
        "INSERT INTO batches (run_id, step, digest, chain, trained) VALUES (?, ?, '', ?, 1)",
        (run_id, step, f"c{step}"),
    )
    db.execute(
        "INSERT INTO groups (run_id, group_id, class, state, slot, step, rank_order)"
        " VALUES (?, ?, 'train', 'trained', ?, ?, 0)",
        (run_id, step, step, step),
    )
    db.execute(
        "INSERT INTO payloads (run_id, group_id, kind, header, arrays) VALUES (?, ?, 'result', '', '')",
        (run_id, step),
    )
    path = plane.directory / run_id / "checkpoints" / f"1-{step + 1}"
    report = worker_pb2.CheckpointReport(
        run_id=run_id, session=1, step=step + 1, path=str(path), sha256="0" * 64, chain=f"c{step}"
    )
    plane.ledger.checkpoints.add(report)


def cannot_load(worker: Worker, assignment: worker_pb2.RunAssignment, reason: str = "it is damaged") -> None:
    report = worker_pb2.RunReport(
        run_id=assignment.run_id,
        session=assignment.session,
        error=reason,
        fault=worker_pb2.FAULT_CHECKPOINT,
        checkpoint_path=assignment.checkpoint_path,
    )
    worker.say(run_report=report)


def start(assignment: worker_pb2.RunAssignment) -> tuple[int, int, str]:
    return assignment.session, assignment.start_step, assignment.checkpoint_path.rpartition("/")[2]


def events(plane: Plane, run_id: str, kind: str) -> list[dict[str, Any]]:
    rows = plane.ledger.events(run_id, 0)
    return [json.loads(row["json"]) for row in rows if row["kind"] == kind]


async def test_the_next_older_one_is_taken_and_in_the_end_step_0(plane: Plane) -> None:
    run_id = await running(plane)
    worker = learner(plane)
    seen = []
    for _ in range(STEPS):
        assignment = await worker.hear("run")
        seen.append(start(assignment))
        cannot_load(worker, assignment)
    last = await worker.hear("run")
    assert [*seen, start(last)] == [(2, 3, "1-3"), (3, 2, "1-2"), (4, 1, "1-1"), (5, 0, "")]
    assert last.chain == ""
    warnings = [event["message"] for event in events(plane, run_id, "warning")]
    assert len(warnings) == STEPS
    assert warnings[0] == "session 2 could not begin: it is damaged; the next session begins from an older checkpoint"
    assert events(plane, run_id, "session")[-1] == {
        "session": 5,
        "step": 0,
        "member_id": "learner-1",
        "publish_from_step": 0,
    }
    assert plane.ledger.run(run_id)["state"] == "running"


async def test_a_dead_learner_that_is_still_a_member_does_not_leave_the_new_one_idle(plane: Plane) -> None:
    run_id = await running(plane)
    dead = learner(plane, "learner-dead")
    await dead.hear("run")
    dead.hang_up()
    await dead.hear_the_end()
    member = plane.coordinator.members.get("learner-dead")
    assert member is not None
    member.session = 0  # as if the session had ended before it died; otherwise it keeps it for the time-out
    worker = learner(plane, "learner-new")
    assignment = await worker.hear("run")
    assert start(assignment) == (3, 3, "1-3")
    cannot_load(worker, assignment, "no such folder")
    assert start(await worker.hear("run")) == (4, 2, "1-2")
    assert plane.coordinator.members.get("learner-dead") is not None
    assert plane.ledger.run(run_id)["state"] == "running"


async def test_what_another_rank_or_an_earlier_session_says_marks_nothing(plane: Plane) -> None:
    run_id = await running(plane)
    worker, other = learner(plane, world_size=2), learner(plane, "learner-rank1", rank=1)
    assignment = await worker.hear("run")
    await other.hear("welcome")
    cannot_load(other, assignment)
    late = worker_pb2.RunAssignment.FromString(assignment.SerializeToString())
    late.session = 1
    cannot_load(worker, late)
    worker.say(run_report=worker_pb2.RunReport(run_id=run_id, session=assignment.session, warning="heard"))
    other.say(leave=worker_pb2.Leave())
    await plane.watch_until(run_id, "warning", message="heard")
    await other.hear_the_end()
    assert [known.damaged for known in plane.ledger.checkpoints.kept(run_id)] == [""] * STEPS


async def test_a_run_whose_samples_are_gone_is_paused_and_goes_on_when_the_checkpoint_is_back(
    plane: Plane,
) -> None:
    run_id = await running(plane, keep_samples=False)
    async with plane.coordinator.context.lock:
        with plane.ledger.transaction():
            plane.ledger.remove_payloads(run_id, 0)
            plane.ledger.remove_payloads(run_id, 1)
    worker = learner(plane)
    for expected in ((2, 3, "1-3"), (3, 2, "1-2")):
        assignment = await worker.hear("run")
        assert start(assignment) == expected
        cannot_load(worker, assignment, "not mounted")
    await plane.watch_until(run_id, "state", state="paused")
    row = plane.ledger.run(run_id)
    assert "1-3: not mounted" in row["message"]
    assert "the samples of step 1 were not kept" in row["message"]
    assert f"`paceline resume {run_id}`" in row["message"]

    newcomer = learner(plane, "learner-2")  # a new process is assigned nothing, and the pause is reported once
    await newcomer.hear("welcome")
    await plane.watch_until(run_id, "member", member_id="learner-2", what="joined")
    await plane.runs.Resume(run_pb2.ResumeRequest(run_id=run_id))
    assert start(await newcomer.hear("run")) == (4, 3, "1-3")
    assert [event["state"] for event in events(plane, run_id, "state")] == [
        "queued",
        "running",
        "paused",
        "running",
    ]


async def test_a_checkpoint_that_nobody_knows_pauses_the_run(plane: Plane) -> None:
    run_id = await running(plane)
    worker = learner(plane)
    assignment = await worker.hear("run")
    assignment.checkpoint_path = "/elsewhere/1-3"
    cannot_load(worker, assignment, "no such folder")
    await plane.watch_until(run_id, "state", state="paused", message="learner: no such folder")


@pytest.mark.parametrize(
    ("damaged", "kept"),
    [
        ("1-3", ["1-2", "1-3", "2-3"]),  # newer than the oldest that is kept: a person may put it back
        ("1-1", ["1-2", "2-3"]),  # of no use any more
    ],
)
async def test_one_that_is_damaged_displaces_none_that_is_sound(plane: Plane, damaged: str, kept: list[str]) -> None:
    run_id = await running(plane)
    run = plane.coordinator.exchange.active
    assert run is not None
    settings = run.spec.checkpointing.model_copy(update={"keep_top_k": 2})
    path = str(plane.directory / run_id / "checkpoints" / "2-3")
    report = worker_pb2.CheckpointReport(run_id=run_id, session=2, step=3, path=path, sha256="0" * 64, chain="c2")
    async with plane.coordinator.context.lock:
        with plane.ledger.transaction():
            plane.ledger.db.execute("UPDATE checkpoints SET damaged = 'x' WHERE path LIKE ?", (f"%/{damaged}",))
            if damaged != "1-3":
                plane.ledger.db.execute("UPDATE checkpoints SET removed = 1 WHERE path LIKE '%/1-3'")
            plane.ledger.checkpoints.add(report)
            mark_surplus_removed(plane.ledger, run_id, settings)
    assert [path.rpartition("/")[2] for path in kept_paths(plane.ledger, run_id)] == kept


@pytest.mark.parametrize(
    "lie",
    [
        {"path": "http://elsewhere/1-3"},
        {"path": "/tmp/1-3"},
        {"path": "{folder}/../1-3"},
        {"path": "{folder}/1-2"},
        {"sha256": "f" * 63},
        {"sha256": "../" + "f" * 61},
        {"step": 99},
    ],
)
async def test_a_checkpoint_that_is_not_where_it_has_to_be_is_not_registered(plane: Plane, lie: dict[str, Any]) -> None:
    run_id = (await plane.submit()).run_id
    plane.run_loops()
    worker = learner(plane)
    await worker.hear("run")
    folder = plane.directory / run_id / "checkpoints"
    truth = {"run_id": run_id, "session": 1, "step": 3, "sha256": "0" * 64}
    said = truth | {name: str(value).format(folder=folder) if name == "path" else value for name, value in lie.items()}
    said.setdefault("path", str(folder / f"1-{said['step']}"))
    worker.say(checkpoint=worker_pb2.CheckpointReport(**said))
    worker.say(checkpoint=worker_pb2.CheckpointReport(**truth, path=str(folder / "1-3")))
    await plane.watch_until(run_id, "checkpoint", step=3)
    (warning,) = [e["message"] for e in events(plane, run_id, "warning") if "not registered" in e["message"]]
    assert warning.startswith("a checkpoint of session 1 is not registered: ")
    (known,) = plane.ledger.checkpoints.kept(run_id)
    assert (known.path, known.sha256) == (str(folder / "1-3"), "0" * 64)
