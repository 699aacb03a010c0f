"""State changes that the coordinator decides: which run they concern, and which groups they keep."""

from __future__ import annotations

import pytest
from control_plane import Plane, Worker, ack, learner, offer, rollout

from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.exchange.admission import admit
from paceline.services.coordinator.lifecycle import runs
from paceline.v1 import run_pb2, worker_pb2


async def test_a_failed_run_keeps_its_groups_until_it_is_cancelled(running: tuple[Plane, str]) -> None:
    plane, run_id = running
    owner, ledger = plane.coordinator, plane.ledger
    async with owner.context.lock:
        with ledger.transaction():
            assert owner.exchange.active is not None
            admit(owner.exchange, owner.exchange.active, 4)
            ledger.db.execute(
                "UPDATE groups SET state = 'leased', member_id = 'rollout-1' WHERE group_id = 0 AND run_id = ?",
                (run_id,),
            )
    await owner.runs.states.fail(run_id, "no such function")
    assert ledger.groups_by_state(run_id)["admitted"] == 4, "nobody holds them any more"
    assert verify(ledger, run_id).problems == []
    await plane.runs.Resume(run_pb2.ResumeRequest(run_id=run_id))
    await plane.watch_until(run_id, "state", state="running")
    await owner.runs.states.fail(run_id, "no such function")
    await plane.runs.Cancel(run_pb2.CancelRequest(run_id=run_id))
    groups = ledger.groups_by_state(run_id)
    assert (groups["admitted"], groups["dropped:run_ended"]) == (0, 4)
    assert verify(ledger, run_id).problems == []


async def trained(plane: Plane, run_id: str) -> tuple[Worker, Worker]:
    """Return learner and rollout worker of a run that is trained and exported; the worker has an older version."""
    trainer, worker = learner(plane), rollout(plane)
    await trainer.hear("run")
    await worker.hear("run")
    worker.say(run_report=worker_pb2.RunReport(run_id=run_id))
    await trainer.hear_epoch("rollout-1")
    ledger = plane.ledger
    last = int(ledger.run(run_id)["max_num_steps"])
    with ledger.transaction():
        ledger.update_run(run_id, next_step=last, next_batch=last)
    trainer.say(weight_offer=offer(run_id, 1, last - 1))
    await worker.hear("weight_offer")
    worker.say(weight_ack=ack(run_id, 1, last - 1))
    await trainer.hear("weight_acks")
    trainer.say(run_report=worker_pb2.RunReport(run_id=run_id, session=1, finished=True))
    return trainer, worker


async def test_a_run_ends_when_its_workers_have_the_last_version(running: tuple[Plane, str]) -> None:
    plane, run_id = running
    trainer, worker = await trained(plane, run_id)
    last = int(plane.ledger.run(run_id)["max_num_steps"])
    trainer.say(weight_offer=offer(run_id, 1, last))
    await worker.hear("weight_offer")
    assert plane.ledger.run(run_id)["state"] == "running", "callers would be answered by an older version"
    worker.say(weight_ack=ack(run_id, 1, last))
    await plane.watch_until(run_id, "state", state="succeeded")


async def test_the_wait_for_the_last_version_is_bounded(
    running: tuple[Plane, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "LAST_VERSION_S", 0.0)
    await trained(*running)
    await running[0].watch_until(running[1], "state", state="succeeded")
