"""One rank of the learner: waits for a run, works on it, and waits for the next. Rank 0 is the member that runs are
assigned to; it broadcasts an assignment to the other ranks as plain bytes. Every rank has a connection to the
exchange, for its parts of batches and its receipts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click
import grpc
import torch
import torch.distributed as dist

from paceline.calls.connection import checked_address
from paceline.errors import Busy, Conflict, InvalidInput, PacelineError, Unavailable
from paceline.host.onednn import bound_caches
from paceline.host.process import end_process
from paceline.host.resources import return_large_tensors
from paceline.learner.checkpoints.export import check_has_adapter
from paceline.learner.checkpoints.export_folder import NAME
from paceline.learner.collectives import broadcast_bytes
from paceline.services.common.access.token_guard import worker_guard
from paceline.services.common.options import device_option, worker_options
from paceline.services.common.processes.starting import announce, die_with_starter, raise_file_limit
from paceline.services.common.relay import RelayConnection, fabric_option, zone_option
from paceline.services.common.serving.endpoints import advertised_host
from paceline.services.common.serving.grpc_server import GrpcServer, with_status
from paceline.services.common.worker.assigned_run import failed_set_up
from paceline.services.common.worker.member_metrics import member_metrics
from paceline.services.common.worker.membership import LEAVE_WAIT_S, Membership
from paceline.services.learner.context import AssignedRun, BackgroundLoop, ExportOrder, Orders, Place, RankContext
from paceline.services.learner.rank_group import set_up_device
from paceline.services.learner.training.run import LearnerRun
from paceline.tracing import set_up_tracing, shut_down_tracing
from paceline.v1 import common_pb2, learner_pb2, learner_pb2_grpc, worker_pb2
from paceline.wire import PROTOCOL

ASSIGNMENT_POLL_S = 2.0
OUTBOX_SIZE = 8
"""Largest number of reports in the stream's outbox, where a newer report can no longer replace them."""
log = logging.getLogger(__name__)


@dataclass
class Listeners:
    """Ports of rank 0, open until the process ends."""

    server: GrpcServer | None = None
    kept: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)


class LearnerRank:
    """Connection, process group and the loop over runs."""

    def __init__(
        self,
        coordinator: str,
        name: str,
        device: torch.device,
        host: str,
        reachable: str,
        grace_s: float,
        fabric: str = "",
        make_run: Callable[[worker_pb2.RunAssignment, LearnerRank], LearnerRun] = LearnerRun,
        end: Callable[[int], object] = end_process,
    ):
        self._make_run, self._end = make_run, end
        self.place = Place(
            rank=dist.get_rank() if dist.is_initialized() else 0,
            world_size=dist.get_world_size() if dist.is_initialized() else 1,
            device=device,
            reachable=reachable,
            weights_bind=fabric or host,
            weights_host=fabric or reachable,
        )
        self.introduction = worker_pb2.Hello(
            role=common_pb2.ROLE_LEARNER,
            member_id=f"{name}-{uuid.uuid4().hex[:8]}-rank{self.place.rank}",
            protocol=PROTOCOL,
            world_size=self.place.world_size,
            rank=self.place.rank,
            learner_id=broadcast_bytes(uuid.uuid4().bytes).hex() if self.place.world_size > 1 else "",
        )
        """Facts of this rank for each Hello; rank 0 adds its address."""
        self.grace_s = grace_s
        """Seconds from SIGTERM in which the coordinator may still answer."""
        self._stop_s = 0.0
        self.orders = Orders()
        self.background = BackgroundLoop()
        self.assigned = AssignedRun()
        self.current_run: LearnerRun | None = None
        self.listeners = Listeners()
        self.stopping = threading.Event()
        self.membership = Membership(
            coordinator,
            self._hello,
            self.on_directive,
            self._gauges,
            outbox_size=OUTBOX_SIZE,
            on_refused=self.orders.ask_checkpoint,
        )
        self.relay = RelayConnection(coordinator, self.place.weights_bind, self.place.weights_host)
        """Connection to the relay that brings this host's weights to others."""
        self._outgoing = ReportQueue(self.background.call, self.membership.report)

    def join(self) -> None:
        """Become a member, after the address is set: the first message contains the address."""
        self.background.start(self.membership.run())
        self.background.start(self._outgoing.run())

    def serve_forever(self) -> None:
        """Work on one assignment after the other, until `stop`."""
        while not self.stopping.is_set():
            data = broadcast_bytes(self.assigned.take(ASSIGNMENT_POLL_S) if self.place.rank == 0 else b"")
            if not data:
                self.background.check()
                continue
            assignment = worker_pb2.RunAssignment.FromString(data)
            self._set_ready(True)
            self._work_on(assignment)
            newest = self.assigned.newest
            if newest is not None and newest.session == assignment.session:
                self.assigned.newest = None  # a session that is over must not be resumed after a broken stream

    def _work_on(self, assignment: worker_pb2.RunAssignment) -> None:
        """Run one session. Raises PacelineError if the ranks may be at different points afterwards."""
        try:
            run = self._make_run(assignment, self)
        except Unavailable as error:  # raised on all ranks, because they have one version
            self.report(failed_set_up(assignment.run_id, error, assignment.session))
            self._set_ready(False)
            return
        self.current_run = run
        try:
            run.train()
        finally:
            self.current_run = None
            run.close()
        self._set_ready(run.ready)
        if run.diverged:
            raise PacelineError("the ranks may be at different points of the run now, so all of them end")

    def _set_ready(self, ready: bool) -> None:
        if self.listeners.server is not None:
            self.background.post(self.listeners.server.set_serving("paceline.v1.LearnerService", ready))

    def stop(self) -> None:
        """End after the current step, with a checkpoint. Takes no lock, because signal handlers call it."""
        if not self.stopping.is_set():
            self._stop_s = time.monotonic()
        self.stopping.set()
        self.membership.draining = True

    def close(self) -> None:
        """Leave after the coordinator has acknowledged the last reports, if there is time."""
        left_s = max(LEAVE_WAIT_S, self._stop_s + self.grace_s - time.monotonic())
        if not self.background.wait(self.send_and_leave(left_s), left_s + 5.0):
            log.warning("no coordinator acknowledged this rank's last reports within %.0f s", left_s)
        self.background.close()

    def leave(self, reason: str) -> None:
        """Leave because of a fault. If the coordinator is up, first wait until it has read the report of the fault."""
        with contextlib.suppress(TimeoutError):
            self.background.wait(self.membership.leave(reason=reason), LEAVE_WAIT_S + 1.0)

    def report(self, report: worker_pb2.ConnectRequest) -> None:
        """Send a report from any thread, as soon as there is a stream; a report that a newer one replaces is not sent."""
        self._outgoing.put(report)

    async def send_and_leave(self, wait_s: float) -> bool:
        """Send all waiting reports and leave; return whether the coordinator has acknowledged them."""
        try:
            async with asyncio.timeout(wait_s):
                await self._outgoing.emptied()
                return await self.membership.leave(wait_s)
        except TimeoutError:
            return False

    async def _end_without(self, reason: str) -> None:
        """End this process, because its main thread may be in a collective that another rank never enters."""
        log.error("%s, and no collective can complete without all ranks: this rank ends", reason)
        try:
            await self.membership.leave(reason=reason)
        finally:
            self._end(1)

    async def on_directive(self, directive: worker_pb2.ConnectResponse) -> None:
        """Carry out an order of the coordinator, or pass its message to the current run."""
        run = self.current_run
        match directive.WhichOneof("directive"):
            case "welcome" if run is not None:
                run.report_again()
            case "run":
                self.assigned.put(directive.run)
                if run is not None:
                    run.supersede()
            case "idle":
                self.assigned.newest = None
                if run is not None:
                    run.supersede()
            case "epoch" if run is not None:
                run.publishing.set_members(directive.epoch)
            case "epoch":
                self.assigned.early_roster = directive.epoch
            case "weight_ack" if run is not None:
                run.publishing.acknowledge(directive.weight_ack)
            case "weight_progress" if run is not None:
                run.publishing.progress(directive.weight_progress)
            case "weight_acks" if run is not None:
                for ack in directive.weight_acks.acks:
                    run.publishing.acknowledge(ack)
            case "keep_checkpoints" if run is not None:
                run.keep_checkpoints(directive.keep_checkpoints)
            case "checkpoint":
                with contextlib.suppress(Busy):  # enough orders wait
                    self.orders.ask_checkpoint()
            case "drain":
                self.stop()
            case "rank_lost":
                self.background.post(self._end_without(directive.rank_lost.reason))

    def _hello(self) -> worker_pb2.Hello:
        hello = worker_pb2.Hello(num_threads=torch.get_num_threads())
        hello.MergeFrom(self.introduction)
        if (assigned := self.assigned.newest) is not None:
            hello.run_id, hello.session = assigned.run_id, assigned.session
        if (host := self.relay.identity) is not None:
            hello.host_agent.CopyFrom(host)
        run = self.current_run
        if run is not None and run.session == hello.session and run.receipted:
            # A coordinator whose ledger lacks these receipts was restored from an older backup, and this session cannot
            # continue with it.
            hello.version.session, hello.version.step = run.session, run.receipted
        return hello

    def _gauges(self) -> dict[str, float]:
        run = self.current_run
        return run.gauges if run is not None else {}


MAX_REPLACEABLE = 1024
"""At most this many replaceable reports may wait; beyond this number the oldest is dropped."""
TOKEN_STATISTICS = 8
"""The token statistics of at most this many steps may wait. The statistics of a step replace the waiting statistics of
an earlier step whose number has the same remainder by this number."""
Key = tuple[str, str | int]


class ReportQueue:
    """Holds reports for `send`, which waits while there is no stream. The queue is bounded, however long `send` waits.
    For some reports only the newest counts: the offer to a member, the result of a publish to it, the last staged
    version, token statistics. Such a report replaces its waiting predecessor. All other reports (checkpoints, set-up,
    the end of a run) wait in order and are never dropped; a session has a few of them. Any thread may make the queue
    and `put` a report; `call` calls a function in the loop that runs `run`."""

    def __init__(
        self, call: Callable[[Callable[[], None]], object], send: Callable[[worker_pb2.ConnectRequest], Awaitable[None]]
    ) -> None:
        self._call = call
        self._send = send
        self._lock = threading.Lock()
        self._waiting: dict[Key, worker_pb2.ConnectRequest] = {}
        self._numbers = itertools.count()
        self._news, self._idle = asyncio.Event(), asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, report: worker_pb2.ConnectRequest) -> None:
        newer = _replaces(report)
        with self._lock:
            if newer is not None:
                self._waiting.pop(newer, None)
            self._waiting[newer or ("kept", next(self._numbers))] = report
            replaceable = [key for key in self._waiting if key[0] != "kept"]
            if len(replaceable) > MAX_REPLACEABLE:
                del self._waiting[replaceable[0]]
        self._call(self._news.set)

    async def run(self) -> None:
        """Send the waiting reports, oldest first, until cancelled."""
        while True:
            self._news.clear()
            while (report := self._take()) is not None:
                self._idle.clear()
                await self._send(report)
            self._idle.set()
            # No deadline: there may be no report for as long as a step takes.
            await self._news.wait()

    async def emptied(self) -> None:
        """Wait until all reports that were put before are sent."""
        while self._waiting or not self._idle.is_set():
            self._idle.clear()
            self._news.set()
            await self._idle.wait()

    def _take(self) -> worker_pb2.ConnectRequest | None:
        with self._lock:
            return self._waiting.pop(next(iter(self._waiting)), None) if self._waiting else None


def _replaces(report: worker_pb2.ConnectRequest) -> Key | None:
    """Return the key under which a newer report replaces this one; None if each report counts."""
    match report.WhichOneof("report"):
        case "weight_offer":
            return "offer", report.weight_offer.member_id
        case "publish":
            return "publish", report.publish.member_id
        case "staged":
            return "staged", report.staged.run_id
        case "host_version":
            return "host_version", report.host_version.run_id
        case "token_statistics":
            return "token_statistics", report.token_statistics.step % TOKEN_STATISTICS
        case "run_report" if report.run_report.warning:
            return "warning", report.run_report.warning
    return None


Context = grpc.aio.ServicerContext[Any, Any]
ResultT = TypeVar("ResultT")
ORDER_TIMEOUT_S = 600.0


async def _carried_out(order: Future[ResultT], timeout_s: float) -> ResultT:
    """Return the result of an order. Raises Unavailable, and withdraws the order, if no step ends in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(order)
    except TimeoutError:
        raise Unavailable(
            f"the order was not carried out within {timeout_s:g} s; it waits for the current step, see the learner's log"
        ) from None


class LearnerServicer(learner_pb2_grpc.LearnerServiceServicer):
    """Service of the whole learner, on rank 0: status, and orders for all ranks after the current step."""

    def __init__(self, rank: RankContext, order_timeout_s: float = ORDER_TIMEOUT_S):
        self._rank, self._timeout_s = rank, order_timeout_s

    @with_status
    async def Status(
        self, request: learner_pb2.LearnerServiceStatusRequest, context: Context
    ) -> learner_pb2.LearnerServiceStatusResponse:
        response = learner_pb2.LearnerServiceStatusResponse(world_size=self._rank.place.world_size, phase="idle")
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
        path, step = await _carried_out(self._rank.orders.ask_checkpoint(), self._timeout_s)
        return learner_pb2.CheckpointResponse(path=path, step=step)

    @with_status
    async def Export(self, request: learner_pb2.ExportRequest, context: Context) -> learner_pb2.ExportResponse:
        run = self._check_running()
        name = request.name
        if name and not NAME.fullmatch(name):
            raise InvalidInput(
                f"name {name[:80]!r} is malformed: use 1 to 64 of the characters A-Z a-z 0-9 . _ -, the first a letter or a digit"
            )
        if request.adapter_only:
            check_has_adapter(run.spec.policy)
        order = self._rank.orders.ask_export(ExportOrder(name, request.adapter_only))
        path = await _carried_out(order, self._timeout_s)
        response = learner_pb2.ExportResponse(path=path)
        response.version.session, response.version.step = run.session, run.step
        return response

    def _check_running(self) -> Any:
        run = self._rank.current_run
        if run is None:
            raise Conflict("the learner has no run now; try again when a run trains")
        return run


@click.command()
@worker_options("learner", grace="Seconds for the last checkpoint at SIGTERM.")
@device_option
@fabric_option
@zone_option
def main(
    coordinator: str,
    host: str,
    advertise_host: str,
    fabric: str,
    port: int,
    name: str,
    device: str,
    grace_s: float,
    metrics_port: int | None,
    ready_file: Path | None,
) -> None:
    """Run one rank; its options come from `paceline serve learner`."""
    die_with_starter()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    set_up_tracing("learner")
    raise_file_limit()
    bound_caches()
    return_large_tensors()
    try:
        reachable = advertised_host(host, advertise_host, checked_address(coordinator))
        used = set_up_device(device, fabric or host)
    except PacelineError as error:
        raise click.ClickException(str(error)) from None
    rank = LearnerRank(coordinator, name, used, host, reachable, grace_s, fabric)
    rank.place.cpu_chosen = device == "cpu"
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: rank.stop())
    if rank.place.rank == 0:
        try:
            rank.listeners.server = rank.background.wait(serve_learner(rank, host, port, metrics_port), 30.0)
        except PacelineError as error:  # a port that is taken
            raise click.ClickException(str(error)) from None
        announce(ready_file, rank.introduction.address)
    rank.join()
    status = 0
    try:
        rank.serve_forever()
        rank.close()
    except PacelineError as error:
        log.error("%s", error)
        status = 1
    except Exception:
        log.exception("this rank cannot continue")
        status = 1
    shut_down_tracing()
    end_process(status)


async def serve_learner(rank: LearnerRank, host: str, port: int, metrics_port: int | None = None) -> GrpcServer:
    server = GrpcServer(host, port, worker_guard(rank.membership.coordinator, lambda: rank.membership.call_key))
    servicer = LearnerServicer(rank)
    server.add(servicer, learner_pb2_grpc.add_LearnerServiceServicer_to_server, "paceline.v1.LearnerService")
    await server.start()
    await rank.listeners.kept.enter_async_context(member_metrics("learner", rank.membership, host, metrics_port))
    rank.introduction.address = f"{rank.place.reachable}:{server.port}"
    return server


if __name__ == "__main__":
    main()
