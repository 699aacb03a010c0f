"""The rpcs on pools: `StatusService` for people, `externalscaler.ExternalScaler` for KEDA and `paceline up --scale`.

They read what the coordinator's loop has decided. A scaler's call sets the bounds of its pool and changes nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from paceline.errors import InvalidInput, Unavailable
from protos.externalscaler import externalscaler_pb2 as keda
from protos.externalscaler import externalscaler_pb2_grpc
from protos.paceline.v1 import status_pb2, status_pb2_grpc
from services.common.grpc_server import with_status, with_stream_status
from services.coordinator.lifecycle.coordinator import Coordinator
from services.coordinator.scaling.pools import PoolConfig, read_pool
from services.coordinator.scaling.scaler import Scaler, Sized

METRIC = "workers"
"""The metric of every pool: the workers that it should have, with a target of 1 for each."""

RETRY_S = 1.0
"""Seconds between two looks of a stream at a pool that nothing is known of yet."""

Context = grpc.aio.ServicerContext[Any, Any]


class ExternalScalerServicer(externalscaler_pb2_grpc.ExternalScalerServicer):
    """KEDA's questions. The sizes are those of the policy, so KEDA and its autoscaler add no hysteresis of theirs."""

    def __init__(self, coordinator: Coordinator):
        self._coordinator = coordinator

    @property
    def _scaler(self) -> Scaler:
        return self._coordinator.scaler

    @with_status
    async def IsActive(self, request: keda.ScaledObjectRef, context: Context) -> keda.IsActiveResponse:
        return keda.IsActiveResponse(result=self._desired(request) > 0)

    @with_stream_status
    async def StreamIsActive(
        self, request: keda.ScaledObjectRef, context: Context
    ) -> AsyncIterator[keda.IsActiveResponse]:
        config = read_pool(request.scalerMetadata)
        sent: bool | None = None
        while not self._coordinator.stopping:
            async with (
                self._scaler.changed
            ):  # held from the look to the wait: no decision is missed in between
                is_active = self._is_active(config)
                if is_active is None or is_active == sent:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(RETRY_S if is_active is None else None):
                            await self._scaler.changed.wait()
                    continue
            sent = is_active
            yield keda.IsActiveResponse(result=is_active)
        raise Unavailable("the coordinator stops; ask again when it is back")

    @with_status
    async def GetMetricSpec(
        self, request: keda.ScaledObjectRef, context: Context
    ) -> keda.GetMetricSpecResponse:
        read_pool(request.scalerMetadata)
        spec = keda.MetricSpec(metricName=METRIC, targetSize=1, targetSizeFloat=1.0)
        return keda.GetMetricSpecResponse(metricSpecs=[spec])

    @with_status
    async def GetMetrics(self, request: keda.GetMetricsRequest, context: Context) -> keda.GetMetricsResponse:
        if request.metricName not in ("", METRIC):
            raise InvalidInput(
                f"there is no metric {request.metricName[:64]!r}; the one of a pool is {METRIC!r}"
            )
        desired = self._desired(request.scaledObjectRef)
        value = keda.MetricValue(metricName=METRIC, metricValue=desired, metricValueFloat=float(desired))
        return keda.GetMetricsResponse(metricValues=[value])

    def _is_active(self, config: PoolConfig) -> bool | None:
        """Return whether a pool should have any worker; None while nothing is known of it."""
        try:
            return self._scaler.desired(config) > 0
        except Unavailable:
            return None

    def _desired(self, request: keda.ScaledObjectRef) -> int:
        return self._scaler.desired(read_pool(request.scalerMetadata))


class StatusServicer(status_pb2_grpc.StatusServiceServicer):
    """What limits the run that trains."""

    def __init__(self, coordinator: Coordinator):
        self._coordinator = coordinator

    @with_status
    async def Status(self, request: status_pb2.StatusRequest, context: Context) -> status_pb2.StatusResponse:
        ledger, report = self._coordinator.committed, self._coordinator.scaler.report()
        response = status_pb2.StatusResponse(
            advice=report.text,
            insecurity=self._coordinator.insecurity,
            learner_wait_fraction=report.wait_fraction,
            queued_runs=len(ledger.queue()),
            pools=[_pool_status(name, sized) for name, sized in report.pools.items() if _is_shown(sized)],
        )
        row = ledger.active_run()
        if row is not None:
            response.run_id, response.state, response.step = row["run_id"], row["state"], row["next_step"]
            response.max_num_steps = row["max_num_steps"]
        return response


def _is_shown(sized: Sized) -> bool:
    """Return whether a run needs the pool, a scaler asks for it, or it has workers."""
    measured = sized.measured
    return sized.asked_s is not None or (
        measured is not None and (measured.has_run or measured.ready + measured.starting > 0)
    )


def _pool_status(name: str, sized: Sized) -> status_pb2.PoolStatus:
    status = status_pb2.PoolStatus(
        name=name, is_scaled=sized.asked_s is not None, cost_per_hour=sized.config.cost
    )
    if sized.state is not None:
        status.desired, status.rate, status.demand = sized.state.desired, sized.state.rate, sized.state.demand
        status.need = sized.state.need if sized.state.is_known else 0.0
    if sized.measured is not None:
        status.ready, status.starting = sized.measured.ready, sized.measured.starting
        status.occupied = min(1.0, sized.measured.occupied)
    return status
