"""`LearnerService`: status, and orders that all ranks carry out together after the current step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import grpc

from learner.checkpoints.export import check_has_adapter
from learner.checkpoints.export_folder import NAME
from paceline.errors import Busy, Conflict, InvalidInput, Unavailable
from protos.paceline.v1 import learner_pb2, learner_pb2_grpc
from services.common.grpc_server import with_status

if TYPE_CHECKING:
    from services.learner.rank import LearnerRank

Context = grpc.aio.ServicerContext[Any, Any]
ResultT = TypeVar("ResultT")
ORDER_TIMEOUT_S = 600.0
MAX_ORDERS = 16


class ExportOrder(NamedTuple):
    """What to export after the current step."""

    name: str
    """Folder under `exports/` in the run's directory; empty: by the step."""
    adapter_only: bool


@dataclass
class Orders:
    """What rank 0 was asked to do after the current step. Filled from the loop, taken by the main thread."""

    checkpoint: list[Future[tuple[str, int]]] = field(default_factory=list)
    export: list[tuple[ExportOrder, Future[str]]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask_checkpoint(self) -> Future[tuple[str, int]]:
        """Path and step of a checkpoint made after the current step. Raises Busy."""
        future: Future[tuple[str, int]] = Future()
        with self._lock:
            _check_room(self.checkpoint)
            self.checkpoint.append(future)
        return future

    def ask_export(self, order: ExportOrder) -> Future[str]:
        """Path of an export made after the current step. Raises Busy."""
        future: Future[str] = Future()
        with self._lock:
            _check_room(self.export)
            self.export.append((order, future))
        return future

    def take_checkpoints(self) -> list[Future[tuple[str, int]]]:
        """The checkpoint orders that somebody waits for, once."""
        with self._lock:
            taken, self.checkpoint = self.checkpoint, []
        return [future for future in taken if future.set_running_or_notify_cancel()]

    def take_exports(self) -> list[tuple[ExportOrder, Future[str]]]:
        """The first export order that somebody waits for, and those that want the same, once."""
        with self._lock:
            waiting = [(order, future) for order, future in self.export if not future.cancelled()]
            taken = [(order, future) for order, future in waiting if order == waiting[0][0]]
            self.export = [(order, future) for order, future in waiting if order != waiting[0][0]]
        return [(order, future) for order, future in taken if future.set_running_or_notify_cancel()]

    def refuse_all(self, reason: str) -> None:
        """The run is over."""
        for future in self.take_checkpoints():
            future.set_exception(Conflict(reason))
        while self.export:
            for _, export in self.take_exports():
                export.set_exception(Conflict(reason))


def _check_room(orders: Sequence[object]) -> None:
    if len(orders) >= MAX_ORDERS:
        raise Busy(f"{len(orders)} such orders wait for the current step to end; one is enough")


async def _carried_out(order: Future[ResultT]) -> ResultT:
    """What an order came to. Raises Unavailable, and withdraws the order, when no step ends in time."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(order), ORDER_TIMEOUT_S)
    except TimeoutError:
        raise Unavailable(
            f"nothing came of the order within {ORDER_TIMEOUT_S:g} s; it waits for the step under way, see the learner's log"
        ) from None


class LearnerServicer(learner_pb2_grpc.LearnerServiceServicer):
    """Answers for the whole learner; lives on rank 0."""

    def __init__(self, rank: LearnerRank):
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
