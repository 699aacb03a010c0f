"""The rpc `StatusService`: what limits the run that trains, and the sizes of its pools, for people and `paceline up --scale`.

It reads what the coordinator's loop has decided.
"""

from __future__ import annotations

from typing import Any

import grpc

from paceline.services.common.serving.grpc_server import with_status
from paceline.services.coordinator.lifecycle.coordinator import Coordinator
from paceline.services.coordinator.scaling.scaler import Sized
from paceline.v1 import status_pb2, status_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class StatusServicer(status_pb2_grpc.StatusServiceServicer):
    """What limits the run that trains."""

    def __init__(self, coordinator: Coordinator):
        self._coordinator = coordinator

    @with_status
    async def Status(self, request: status_pb2.StatusRequest, context: Context) -> status_pb2.StatusResponse:
        ledger, report = self._coordinator.committed, self._coordinator.scaler.report()
        pools = [_pool_status(name, sized) for name, sized in report.pools.items()]
        response = status_pb2.StatusResponse(
            advice=report.text,
            insecurity=self._coordinator.insecurity,
            learner_wait_fraction=report.wait_fraction,
            queued_runs=len(ledger.queue()),
            pools=[pool for pool in pools if pool is not None],
        )
        row = ledger.active_run()
        if row is not None:
            response.run_id, response.state, response.step = row["run_id"], row["state"], row["next_step"]
            response.max_num_steps = row["max_num_steps"]
        return response


def _pool_status(name: str, sized: Sized) -> status_pb2.PoolStatus | None:
    """Return None for a pool without a decision yet, and for one without run, scaler and workers."""
    measured, state, is_scaled = sized.measured, sized.state, sized.asked_s is not None
    if measured is None or state is None:
        return None
    if not (is_scaled or measured.has_run or measured.ready + measured.starting):
        return None
    return status_pb2.PoolStatus(
        name=name,
        is_scaled=is_scaled,
        cost_per_hour=sized.config.cost,
        desired=state.desired,
        rate=state.rate,
        demand=state.demand,
        need=state.need if state.is_known else 0.0,
        ready=measured.ready,
        starting=measured.starting,
        occupied=min(1.0, measured.occupied),
    )
