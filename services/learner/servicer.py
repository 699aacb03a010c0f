"""`LearnerService`: status, and orders that all ranks carry out together after the current step."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any, TypeVar

import grpc

from paceline.errors import Conflict, InvalidInput, Unavailable
from paceline.learner.checkpoints.export import check_has_adapter
from paceline.learner.checkpoints.export_folder import NAME
from paceline.services.common.serving.grpc_server import with_status
from paceline.services.learner.context import RankContext
from paceline.services.learner.orders import ExportOrder
from paceline.v1 import learner_pb2, learner_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
ResultT = TypeVar("ResultT")
ORDER_TIMEOUT_S = 600.0


async def _carried_out(order: Future[ResultT]) -> ResultT:
    """Return the result of an order. Raises Unavailable, and withdraws the order, when no step ends in time."""
    try:
        async with asyncio.timeout(ORDER_TIMEOUT_S):
            return await asyncio.wrap_future(order)
    except TimeoutError:
        raise Unavailable(
            f"nothing came of the order within {ORDER_TIMEOUT_S:g} s; it waits for the step under way, see the learner's log"
        ) from None


class LearnerServicer(learner_pb2_grpc.LearnerServiceServicer):
    """Service of the whole learner, on rank 0."""

    def __init__(self, rank: RankContext):
        self._rank = rank

    @with_status
    async def Status(
        self, request: learner_pb2.LearnerServiceStatusRequest, context: Context
    ) -> learner_pb2.LearnerServiceStatusResponse:
        response = learner_pb2.LearnerServiceStatusResponse(world_size=self._rank.world_size, phase="idle")
        run = self._rank.current_run
        if run is not None:
            response.run_id, response.phase = run.run_id, run.phase
            response.version.session, response.version.step = run.session, run.step
        return response

    @with_status
    async def Checkpoint(
        self, request: learner_pb2.CheckpointRequest, context: Context
    ) -> learner_pb2.CheckpointResponse:
        self._check_running()
        path, step = await _carried_out(self._rank.orders.ask_checkpoint())
        return learner_pb2.CheckpointResponse(path=path, step=step)

    @with_status
    async def Export(
        self, request: learner_pb2.ExportRequest, context: Context
    ) -> learner_pb2.ExportResponse:
        run = self._check_running()
        name = request.name
        if name and not NAME.fullmatch(name):
            raise InvalidInput(
                f"name {name[:80]!r} has to be 1 to 64 of the characters A-Z a-z 0-9 . _ -, the first a letter or a digit"
            )
        if request.adapter_only:
            check_has_adapter(run.spec.policy)
        order = self._rank.orders.ask_export(ExportOrder(name, request.adapter_only))
        path = await _carried_out(order)
        response = learner_pb2.ExportResponse(path=path)
        response.version.session, response.version.step = run.session, run.step
        return response

    def _check_running(self) -> Any:
        run = self._rank.current_run
        if run is None:
            raise Conflict("the learner has no run now; ask when one trains")
        return run
