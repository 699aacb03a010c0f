"""A worker's connection to the coordinator: one control stream and one exchange socket, replaced whenever they break.

`Membership.run()` keeps the stream: Hello, heartbeats, directives to a callback. No directive counts before the
coordinator has proven that it knows this worker's token. A broken stream is opened again with the same member id after
a growing pause; Welcome names the coordinator's term, under which all unanswered requests are sent again. Heartbeats
mean that both connections work: a worker that has lost the exchange sends no heartbeat until the exchange is back, and
the coordinator leases its work again as for any silent worker. Order of waiting: requests wait for the reader task,
which waits for the socket; nothing waits for a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping

import grpc
from zmq.utils import z85

from paceline.calls.backoff import ExponentialBackoff
from paceline.calls.connection import checked_address
from paceline.calls.proof import AioProver
from paceline.calls.token import known_token
from paceline.errors import Conflict
from paceline.host import gpu_gauges
from paceline.host.resources import process_gauges
from paceline.rate_limited_log import RateLimitedLog, unforeseen
from paceline.services.common.serving.grpc_server import CHANNEL_OPTIONS
from paceline.services.common.worker.exchange_connection import ExchangeConnection
from paceline.tls.channels import open_aio_channel, why_no_channel
from paceline.v1 import exchange_pb2 as pb
from paceline.v1 import worker_pb2, worker_pb2_grpc

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0
LEAVE_WAIT_S = 2.0
"""Default of the longest wait, in seconds, of a leaving worker until the coordinator has read its last reports."""
TROUBLE_LOG_S = 60.0
"""Shortest time between two log lines about a coordinator that does not answer or refuses this worker."""
OUTBOX_SIZE = 1024
CONNECT = "paceline.v1.WorkerService/Connect"
FATAL = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED}
REFUSED = {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
"""Statuses of refusals that only a person or time can end: another protocol, a wrong token or a taken id."""

log = logging.getLogger(__name__)
Directive = Callable[[worker_pb2.ConnectResponse], Awaitable[None]]
Stream = grpc.aio.StreamStreamCall[worker_pb2.ConnectRequest, worker_pb2.ConnectResponse]


class Trouble:
    """Says, seldom, why the coordinator cannot be reached or refuses this worker."""

    def __init__(self, coordinator: str, on_refused: Callable[[], object]):
        self._coordinator, self._on_refused = coordinator, on_refused
        self._next_diagnosis_s, self._diagnosis = 0.0, ""
        self.clear()

    def clear(self) -> None:
        """Begin anew after a Welcome."""
        self._is_refused, self._log = False, RateLimitedLog(log, TROUBLE_LOG_S)

    async def note(self, error: grpc.aio.AioRpcError) -> None:
        if error.code() is grpc.StatusCode.UNAVAILABLE and (fault := await self._tls_fault()):
            self._log.warning("tls", "%s. This worker keeps its results and tries again", fault)
            return
        if error.code() not in REFUSED:
            self._log.warning(
                "away",
                "no coordinator answers at %s: %s. This worker keeps its results and tries again every few seconds; start "
                "the coordinator with `paceline serve coordinator`, or name another with --coordinator",
                self._coordinator,
                error.details(),
            )
            return
        self._log.warning(
            "refused",
            "the coordinator at %s refuses this worker, which keeps its results and tries again: %s",
            self._coordinator,
            error.details(),
        )
        if not self._is_refused:
            self._is_refused = True
            self._on_refused()

    async def _tls_fault(self) -> str:
        """Return the TLS error of the last TROUBLE_LOG_S seconds that prevents a connection; empty if there was none."""
        now_s = time.monotonic()
        if now_s >= self._next_diagnosis_s:
            self._next_diagnosis_s = now_s + TROUBLE_LOG_S
            self._diagnosis = await asyncio.to_thread(why_no_channel, self._coordinator)
        return self._diagnosis


class Membership:
    """One worker's connection to the coordinator, over all reconnects."""

    def __init__(
        self,
        coordinator: str,
        hello: Callable[[], worker_pb2.Hello],
        on_directive: Directive,
        gauges: Callable[[], dict[str, float]] = dict,
        outbox_size: int = OUTBOX_SIZE,
        on_refused: Callable[[], object] = lambda: None,
    ):
        """`on_refused` is called once when the coordinator begins to refuse this worker temporarily, so that the worker
        can save its state."""
        self.coordinator = checked_address(coordinator)
        """Address of the coordinator, HOST:PORT."""
        self._hello = hello
        self._on_directive = on_directive
        self._gauges = gauges
        self.on_beat: Callable[[Mapping[str, float]], None] = lambda _: None
        """Called with the gauges of each heartbeat."""
        self._trouble = Trouble(self.coordinator, on_refused)
        self._outbox: asyncio.Queue[worker_pb2.ConnectRequest] = asyncio.Queue(outbox_size)
        self._unwritten: worker_pb2.ConnectRequest | None = None
        """Report that was taken from the queue but not written yet; kept because the stream may break before that."""
        self.exchange = ExchangeConnection(self.coordinator, lambda: self._hello().member_id, lambda: self.has_stream)
        self.call_key = b""
        """Key of the tickets for calls of this worker, from the coordinator's last Welcome; empty before the first."""
        self.has_stream = False
        """True while this worker has a control stream: from the Welcome until the stream breaks."""
        self.draining = False
        """True if this worker must stop. A coordinator that stops itself waits until the worker has left."""
        self._leaving = asyncio.Event()
        self._left = asyncio.Event()

    async def run(self) -> None:
        """Keep the connection until cancelled. Raises Conflict if the coordinator refuses this worker permanently."""
        backoff = ExponentialBackoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.exchange.resend())
                while True:
                    started_s, broken = time.monotonic(), True
                    try:
                        await self._stream()
                        broken = False
                    except grpc.aio.AioRpcError as error:
                        if error.code() in FATAL:
                            raise Conflict(f"the coordinator refuses this worker: {error.details()}") from None
                        await self._trouble.note(error)
                    if self._leaving.is_set() and not broken:
                        self._left.set()
                        await asyncio.Event().wait()  # until the caller of leave() cancels this task
                    if time.monotonic() - started_s > MAX_BACKOFF_S:
                        backoff.reset()
                    await asyncio.sleep(backoff.next_s() * random.uniform(0.5, 1.0))
        finally:
            self.exchange.close()

    @property
    def waiting_reports(self) -> int:
        """Return the number of reports that no stream has sent yet."""
        return self._outbox.qsize()

    async def report(self, report: worker_pb2.ConnectRequest) -> None:
        """Queue a report, for this stream or the next."""
        await self._outbox.put(report)

    async def leave(self, wait_s: float = LEAVE_WAIT_S, *, reason: str = "") -> bool:
        """Leave, with the `reason` of a fault; return whether the coordinator read all reports within `wait_s` seconds."""
        self._leaving.set()
        await self.report(worker_pb2.ConnectRequest(leave=worker_pb2.Leave(reason=reason)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._left.wait()
        return self._left.is_set()

    @property
    def term(self) -> int:
        return self.exchange.term

    async def request(
        self, request: pb.ExchangeRequest, payloads: list[bytes] | None = None
    ) -> tuple[pb.ExchangeReply, list[bytes]]:
        """Return the reply to an exchange request and its payload frames, as `ExchangeConnection.request`."""
        return await self.exchange.request(request, payloads)

    async def _stream(self) -> None:
        async with open_aio_channel(self.coordinator, CHANNEL_OPTIONS) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            prover = AioProver(channel, self.coordinator, known_token(self.coordinator))
            signed = await prover.sign(CONNECT)
            call = stub.Connect(metadata=signed.metadata)  # type: ignore[call-arg]  # its types know no `write`
            heard = asyncio.Event()
            writing = asyncio.create_task(self._write_stream(call, heard))
            try:
                await prover.check_stream(call, signed)
                async for directive in call:
                    if directive.WhichOneof("directive") == "welcome":
                        self.has_stream = True
                        await self._on_welcome(directive.welcome)
                        heard.set()
                    await self._on_directive(directive)
                    if self._leaving.is_set() and directive.WhichOneof("directive") == "welcome":
                        # It was lost with a stream.
                        await self.report(worker_pb2.ConnectRequest(leave=worker_pb2.Leave()))
            finally:
                self.has_stream = False
                call.cancel()
                writing.cancel()  # also ends this task, because reports left in the outbox belong to the next stream
                await asyncio.wait((writing,))

    async def _write_stream(self, call: Stream, heard: asyncio.Event) -> None:
        """Until the stream breaks, send Hello, then after Welcome all reports and, while the exchange can be reached, a
        heartbeat every second. Nothing is sent before Welcome, because it would be lost if the coordinator refused
        the stream. After an error, this worker sends nothing more: then the coordinator ends the silent stream."""
        try:
            await self._speak_on(call, heard)
        except Exception as error:
            unforeseen.note("a worker's reports", error)

    async def _speak_on(self, call: Stream, heard: asyncio.Event) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            hello = self._hello()
            hello.secret = self.exchange.secret
            hello.exchange_key = z85.decode(self.exchange.keys[0])
            await call.write(worker_pb2.ConnectRequest(hello=hello))
            await heard.wait()
            beat_s = time.monotonic()
            while True:
                try:
                    async with asyncio.timeout(max(0.01, beat_s + 1.0 - time.monotonic())):
                        self._unwritten = self._unwritten or await self._outbox.get()
                except TimeoutError:
                    beat_s = time.monotonic()
                    if self.exchange.connected.is_set():
                        beat = worker_pb2.Heartbeat(gauges=self._safe_gauges(), draining=self.draining)
                        await call.write(worker_pb2.ConnectRequest(heartbeat=beat))
                else:
                    await call.write(self._unwritten)
                    self._unwritten = None

    def _safe_gauges(self) -> dict[str, float]:
        """Return gauges of the worker, memory, GPUs and unexpected errors. If any gauges fail, return only the number
        of unexpected errors, because the heartbeat matters more."""
        try:
            gauges = self._gauges() | process_gauges() | gpu_gauges.SAMPLER.gauges()
        except Exception as error:
            unforeseen.note("a worker's gauges", error)
            gauges = {}
        gauges = gauges | {"unforeseen_errors": float(unforeseen.total)}
        try:
            self.on_beat(gauges)
        except Exception as error:
            unforeseen.note("a worker's metrics", error)
        return gauges

    async def _on_welcome(self, welcome: worker_pb2.Welcome) -> None:
        self.call_key = welcome.call_key
        self._trouble.clear()
        await self.exchange.connect(welcome)
        log.info("member of %s, term %d", self.coordinator, welcome.term)
