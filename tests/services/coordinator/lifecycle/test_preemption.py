"""Preemption: a queued run of a higher priority gets the workers once the active run has written its checkpoint."""

from __future__ import annotations

import asyncio
import time

from control_plane import DEADLINE_S, Plane, Worker, learner, refusal, rollout

from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.exchange.admission import admit
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.lifecycle.preemption import CHECKPOINT_WAIT_S
from paceline.services.coordinator.lifecycle.run_start import recover
from paceline.v1 import run_pb2, worker_pb2


async def training(plane: Plane, run_id: str) -> Worker:
    """Return the learner of a run, which is set up."""
    worker = learner(plane)
    assignment = await worker.hear("run")
    assert assignment.run_id == run_id
    worker.say(run_report=worker_pb2.RunReport(run_id=run_id, session=assignment.session, vocab_size=64))
    return worker


async def becomes(plane: Plane, run_id: str, state: str) -> None:
    """Wait until a run is in this state."""
    async with asyncio.timeout(DEADLINE_S):
        while plane.ledger.run(run_id)["state"] != state:  # noqa: ASYNC110 - it may have been in it before
            await asyncio.sleep(0.01)


def states(ledger: Ledger) -> dict[str, str]:
    return {row["run_id"]: row["state"] for row in ledger.runs()}


def checkpoint_of(plane: Plane, run_id: str, step: int) -> worker_pb2.CheckpointReport:
    path = plane.directory / run_id / "checkpoints" / f"1-{step}"
    path.mkdir(parents=True, exist_ok=True)
    return worker_pb2.CheckpointReport(run_id=run_id, session=1, step=step, path=str(path), sha256="a" * 64)


async def test_the_queue_goes_by_priority_then_by_age(plane: Plane) -> None:
    first, second, urgent, last = [(await plane.submit(priority=p)).run_id for p in (0, 0, 5, -3)]
    listed = {run.run_id: run for run in (await plane.runs.List(run_pb2.ListRequest())).runs}
    assert [listed[run_id].queue_place for run_id in (urgent, first, second, last)] == [1, 2, 3, 4]
    assert (listed[urgent].priority, listed[last].priority) == (5, -3)
    plane.run_loops()
    await becomes(plane, urgent, "running")
    assert (await plane.runs.Get(run_pb2.GetRequest(run_id=urgent))).run.queue_place == 0
    await plane.runs.Cancel(run_pb2.CancelRequest(run_id=urgent))
    await becomes(plane, first, "running")


async def test_a_run_without_a_learner_yields_at_once_and_goes_on_later(running: tuple[Plane, str]) -> None:
    plane, run_id = running
    owner = plane.coordinator
    async with owner.context.lock:
        with plane.ledger.transaction():
            assert owner.exchange.active is not None
            admit(owner.exchange, owner.exchange.active, 4)
    urgent = (await plane.submit(priority=1)).run_id
    await becomes(plane, urgent, "running")
    row = plane.ledger.run(run_id)
    assert (row["state"], row["message"]) == ("queued", f"run {urgent} of priority 1 goes first")
    assert plane.ledger.groups_by_state(run_id)["admitted"] == 4
    await plane.runs.Cancel(run_pb2.CancelRequest(run_id=urgent))
    await becomes(plane, run_id, "running")
    assert plane.ledger.run(run_id)["message"] == ""
    assert owner.exchange.active.state.yields_to == ""
    assert verify(plane.ledger, run_id).problems == []


async def test_the_learner_writes_a_checkpoint_before_its_run_yields(running: tuple[Plane, str]) -> None:
    plane, run_id = running
    trainer = await training(plane, run_id)
    urgent = (await plane.submit(priority=7)).run_id
    assert (await trainer.hear("checkpoint")).run_id == run_id
    assert states(plane.ledger) == {run_id: "running", urgent: "queued"}
    assert plane.coordinator.exchange.active is not None
    assert plane.coordinator.exchange.takes_no_work(plane.coordinator.exchange.active)
    trainer.say(checkpoint=checkpoint_of(plane, run_id, 0))
    assert (await trainer.hear("idle")).reason == f"run {urgent} of priority 7 goes first"
    assert (await trainer.hear("run")).run_id == urgent
    assert states(plane.ledger) == {run_id: "queued", urgent: "running"}


async def test_a_batch_that_is_fixed_is_trained_before_the_checkpoint(running: tuple[Plane, str]) -> None:
    plane, run_id = running
    trainer = await training(plane, run_id)
    with plane.ledger.transaction():
        plane.ledger.update_run(run_id, next_batch=1)
    urgent = (await plane.submit(priority=1)).run_id
    await plane.watch_until(run_id, "warning")
    await plane.coordinator.runs.preemption.check()
    trainer.say(checkpoint=checkpoint_of(plane, run_id, 0))
    await plane.watch_until(run_id, "checkpoint")
    await plane.coordinator.runs.preemption.check()
    assert states(plane.ledger)[urgent] == "queued", "the checkpoint is older than the batch in training"
    with plane.ledger.transaction():
        plane.ledger.update_run(run_id, next_step=1)
    assert (await trainer.hear("checkpoint")).run_id == run_id
    trainer.say(checkpoint=checkpoint_of(plane, run_id, 1))
    assert (await trainer.hear("run")).run_id == urgent


async def test_the_wait_for_the_checkpoint_is_bounded(running: tuple[Plane, str]) -> None:
    plane, run_id = running
    trainer = await training(plane, run_id)
    urgent = (await plane.submit(priority=1)).run_id
    await trainer.hear("checkpoint")
    await plane.coordinator.runs.preemption.check(time.monotonic() + CHECKPOINT_WAIT_S)
    assert (await trainer.hear("run")).run_id == urgent
    assert states(plane.ledger)[run_id] == "queued"


async def test_a_run_goes_on_when_the_urgent_one_is_cancelled(running: tuple[Plane, str]) -> None:
    plane, run_id = running
    trainer, exchange = await training(plane, run_id), plane.coordinator.exchange
    urgent = (await plane.submit(priority=1)).run_id
    await trainer.hear("checkpoint")
    await plane.runs.Cancel(run_pb2.CancelRequest(run_id=urgent))
    await plane.coordinator.runs.preemption.check()
    assert exchange.active.state.yields_to == ""
    assert exchange.active is not None
    assert not exchange.takes_no_work(exchange.active)
    assert states(plane.ledger)[run_id] == "running"


async def test_the_run_that_goes_first_is_named_when_it_changes(running: tuple[Plane, str]) -> None:
    plane, run_id = running
    trainer, exchange = await training(plane, run_id), plane.coordinator.exchange
    urgent, other = (await plane.submit(priority=2)).run_id, (await plane.submit(priority=1)).run_id
    await trainer.hear("checkpoint")
    assert exchange.active.state.yields_to == urgent
    await plane.runs.Cancel(run_pb2.CancelRequest(run_id=urgent))
    await plane.coordinator.runs.preemption.check()
    assert exchange.active.state.yields_to == other
    newest = plane.ledger.events(run_id, 0)[-1]
    assert f"run {other} of priority 1 goes first" in newest["json"]


async def test_an_equal_priority_waits(running: tuple[Plane, str]) -> None:
    plane, run_id = running
    other = (await plane.submit(priority=0)).run_id
    await plane.coordinator.runs.preemption.check()
    assert plane.coordinator.exchange.active.state.yields_to == ""
    assert states(plane.ledger) == {run_id: "running", other: "queued"}


async def test_a_paused_run_makes_room_and_stays_paused(running: tuple[Plane, str]) -> None:
    plane, run_id = running
    await plane.runs.Pause(run_pb2.PauseRequest(run_id=run_id))
    urgent = (await plane.submit(priority=1)).run_id
    await becomes(plane, urgent, "running")
    assert states(plane.ledger)[run_id] == "paused"
    await plane.runs.Resume(run_pb2.ResumeRequest(run_id=run_id))
    assert states(plane.ledger)[run_id] == "queued"
    await plane.runs.Cancel(run_pb2.CancelRequest(run_id=urgent))
    await becomes(plane, run_id, "running")


async def test_a_paused_run_makes_room_for_an_equal_priority_also_with_a_batch_in_training(
    running: tuple[Plane, str],
) -> None:
    plane, run_id = running
    trainer = await training(plane, run_id)
    with plane.ledger.transaction():
        plane.ledger.update_run(run_id, next_batch=1)
    await plane.coordinator.runs.states.pause_on_fault(run_id, "the loss is not finite")
    other = (await plane.submit(priority=-1)).run_id
    assert (await trainer.hear("checkpoint")).run_id == run_id
    trainer.say(checkpoint=checkpoint_of(plane, run_id, 0))
    assert (await trainer.hear("idle")).reason == f"run {other} goes first, because run {run_id} is paused"
    assert (await trainer.hear("run")).run_id == other
    assert states(plane.ledger) == {run_id: "paused", other: "running"}
    named = run_pb2.DropGroupsRequest(run_id=run_id, group_ids=[1])
    assert "groups [1] are not in the batch of step 0" in (await refusal(plane.runs.DropGroups(named)))[1]
    (warning,) = plane.ledger.rows("SELECT json FROM events WHERE run_id = ? AND kind = 'warning'", (run_id,))
    assert "`paceline resume` queues this run again" in warning["json"]


async def test_a_restarted_coordinator_starts_the_queue_before_a_paused_run(running: tuple[Plane, str]) -> None:
    plane, run_id = running
    await plane.runs.Pause(run_pb2.PauseRequest(run_id=run_id))
    context = plane.coordinator.context
    await recover(context)
    assert context.delays.passed_over == set(), "nothing waits for its room"
    await plane.submit(priority=-1)
    await recover(context)
    assert context.delays.passed_over == {run_id}


async def test_a_resumed_run_whose_room_was_given_is_queued_and_goes_on_later(running: tuple[Plane, str]) -> None:
    plane, run_id = running
    await plane.runs.Pause(run_pb2.PauseRequest(run_id=run_id))
    other = (await plane.submit(priority=0)).run_id
    await becomes(plane, other, "running")
    await recover(plane.coordinator.context)
    assert plane.coordinator.context.delays.passed_over == {run_id}
    await plane.runs.Cancel(run_pb2.CancelRequest(run_id=other))
    async with asyncio.timeout(DEADLINE_S):
        while (active := plane.coordinator.exchange.active) is None or active.run_id != run_id:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert states(plane.ledger)[run_id] == "paused"
    await plane.runs.Resume(run_pb2.ResumeRequest(run_id=run_id))
    assert states(plane.ledger)[run_id] == "running", "it has the workers"
    urgent = (await plane.submit(priority=5)).run_id
    await becomes(plane, urgent, "running")
    assert states(plane.ledger)[run_id] == "queued"


async def test_a_run_whose_workers_another_run_has_is_queued_by_resume(running: tuple[Plane, str]) -> None:
    plane, run_id = running
    await plane.runs.Pause(run_pb2.PauseRequest(run_id=run_id))
    other = (await plane.submit(priority=0)).run_id
    await becomes(plane, other, "running")
    plane.coordinator.context.delays.passed_over.clear()
    await plane.runs.Resume(run_pb2.ResumeRequest(run_id=run_id))
    assert states(plane.ledger) == {run_id: "queued", other: "running"}


async def test_a_run_that_is_retried_by_itself_keeps_its_place(running: tuple[Plane, str]) -> None:
    plane, run_id = running
    await plane.coordinator.runs.states.pause_on_fault(run_id, "no room", retried=True)
    other = (await plane.submit(priority=0)).run_id
    await plane.coordinator.runs.preemption.check()
    assert plane.coordinator.exchange.active.state.yields_to == ""
    assert states(plane.ledger) == {run_id: "paused", other: "queued"}


async def test_workers_of_a_preempted_run_get_the_other(running: tuple[Plane, str]) -> None:
    plane, run_id = running
    worker = rollout(plane)
    assert (await worker.hear("run")).run_id == run_id
    urgent = (await plane.submit(priority=1)).run_id
    assert (await worker.hear("idle")).reason.startswith(f"run {urgent}")
    assert (await worker.hear("run")).run_id == urgent
