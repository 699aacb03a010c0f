"""State changes that the coordinator decides: which run they concern, and which groups they keep."""

from __future__ import annotations

from control_plane import Plane

from protos.paceline.v1 import run_pb2
from services.coordinator.audit.verify import verify
from services.coordinator.exchange import leases


async def test_a_failed_run_keeps_its_groups_until_it_is_cancelled(running: tuple[Plane, str]) -> None:
    plane, run_id = running
    coordinator, ledger = plane.coordinator, plane.ledger
    async with coordinator.lock:
        with ledger.transaction():
            assert coordinator.exchange.active is not None
            leases.admit(coordinator.exchange, coordinator.exchange.active, 4)
            ledger.db.execute(
                "UPDATE groups SET state = 'leased', member_id = 'rollout-1' WHERE group_id = 0 AND run_id = ?",
                (run_id,),
            )
    await coordinator.states.fail(run_id, "no such function")
    assert ledger.groups_by_state(run_id)["admitted"] == 4, "nobody holds them any more"
    assert verify(ledger, run_id).problems == []
    await plane.runs.Resume(run_pb2.ResumeRequest(run_id=run_id))
    await plane.watch_until(run_id, "state", state="running")
    await coordinator.states.fail(run_id, "no such function")
    await plane.runs.Cancel(run_pb2.CancelRequest(run_id=run_id))
    groups = ledger.groups_by_state(run_id)
    assert (groups["admitted"], groups["dropped:run_ended"]) == (0, 4)
    assert verify(ledger, run_id).problems == []
