"""A worker's connection to the coordinator: one control stream and one exchange socket, replaced whenever they break.

`Membership.run()` keeps the stream: Hello, heartbeats, directives to a callback. No directive counts before the
coordinator has proven that it knows this worker's token. A broken stream is opened again with the same member id after
a growing pause; Welcome names the coordinator's term, under which all unanswered requests are sent again. Heartbeats
mean that both connections work: a worker that has lost the exchange sends none until it is back, and the coordinator
leases its work again as for any silent worker. Order of waiting: requests wait for the reader task, which waits for the
socket; nothing waits for a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import grpc
import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from paceline.calls.backoff import ExponentialBackoff
from paceline.calls.connection import checked_address
from paceline.calls.proof import AioProver
from paceline.calls.token import known_token
from paceline.errors import Conflict, WireError
from paceline.host import gpu_gauges
from paceline.host.resources import process_gauges
from paceline.rate_limited_log import RateLimitedLog, unforeseen
from paceline.services.common.serving.endpoints import use_ipv6, watch
from paceline.services.common.serving.grpc_server import CHANNEL_OPTIONS
from paceline.tls.channels import open_aio_channel, why_no_channel
from paceline.tls.folder import tls_folder
from paceline.v1 import exchange_pb2 as pb
from paceline.v1 import worker_pb2, worker_pb2_grpc
from paceline.wire import MAX_MESSAGE_BYTES, PROTOCOL, parse_message

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0
LEAVE_WAIT_S = 2.0
"""Default of the longest wait, in seconds, of a leaving worker until the coordinator has read its last reports."""
RESEND_S = 60.0
"""A request without a reply is sent again after this many seconds, then after pauses of twice the length each time. The
first pause is longer than any wait that a request may ask for."""
MAX_SENDINGS = 16
"""Largest number of transmissions of one request whose replies still count: the newest transmissions."""
NEWEST_REPLY_ONLY = frozenset({"lease", "task"})
"""Kinds of requests for which only a reply to the newest transmission counts: the newest request lists the worker's
leases, so the coordinator has revoked anything that an earlier reply granted."""
MAX_BULK = 4
"""Largest number of requests with payloads that wait for replies: the coordinator must keep all their payloads."""
TROUBLE_LOG_S = 60.0
"""Shortest time between two log lines about a coordinator that does not answer or refuses this worker."""
MAX_TURNS = 64
"""Largest number of finished turns that wait for replies; those that arrive together share one synced write."""
OUTBOX_SIZE = 1024
CONNECT = "paceline.v1.WorkerService/Connect"
FATAL = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED}
REFUSED = {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
"""Statuses of refusals that only a person or time can end: another protocol, a wrong token or a taken id."""

log = logging.getLogger(__name__)
Directive = Callable[[worker_pb2.ConnectResponse], Awaitable[None]]
Stream = grpc.aio.StreamStreamCall[worker_pb2.ConnectRequest, worker_pb2.ConnectResponse]


@dataclass
class Pending:
    """A request that waits for its reply."""

    request: pb.ExchangeRequest
    payloads: list[bytes]
    reply: asyncio.Future[tuple[pb.ExchangeReply, list[bytes]]]
    terms: dict[int, int] = field(default_factory=dict)
    """Maps the number of each transmission whose reply still counts to the term in which it was sent."""
    pause_s: float = field(default_factory=lambda: RESEND_S)
    sent_s: float = field(default_factory=time.monotonic)


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
        """`on_refused` is called once when the coordinator begins to refuse this worker temporarily, to save its state."""
        self.coordinator = checked_address(coordinator)
        """Address of the coordinator, HOST:PORT."""
        self._hello = hello
        self._on_directive = on_directive
        self._gauges = gauges
        self._on_refused = on_refused
        self.on_beat: Callable[[Mapping[str, float]], None] = lambda _: None
        """Called with the gauges of each heartbeat."""
        self._is_refused = False
        self._trouble = RateLimitedLog(log, TROUBLE_LOG_S)
        self._next_diagnosis_s = 0.0
        self._diagnosis = ""
        self._outbox: asyncio.Queue[worker_pb2.ConnectRequest] = asyncio.Queue(outbox_size)
        self._unwritten: worker_pb2.ConnectRequest | None = None
        """Report that was taken from the queue but not written yet; kept because the stream may break before that."""
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._connected = asyncio.Event()
        self._pending: dict[int, Pending] = {}
        """Pending requests by the number of each transmission whose reply counts."""
        self._numbers = itertools.count(1)
        self._bulk = asyncio.Semaphore(MAX_BULK)
        self._turns = asyncio.Semaphore(MAX_TURNS)
        self.term = 0
        self._public_key, self._private_key = zmq.curve_keypair() if tls_folder() is not None else (b"", b"")
        self._secret = b""
        """Secret from the coordinator's last Welcome; empty before the first."""
        self.call_key = b""
        """Key of the tickets for calls of this worker, from the coordinator's last Welcome; empty before the first."""
        self.has_stream = False
        """True while this worker has a control stream: from the Welcome until the stream breaks."""
        self.draining = False
        """True if this worker must stop. A coordinator that stops itself waits until the worker has left."""
        self._welcomed = asyncio.Event()
        self._leaving = asyncio.Event()
        self._left = asyncio.Event()

    async def run(self) -> None:
        """Keep the connection until cancelled. Raises Conflict if the coordinator refuses this worker permanently."""
        backoff = ExponentialBackoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._resend())
                while True:
                    started_s, broken = time.monotonic(), True
                    try:
                        await self._stream()
                        broken = False
                    except grpc.aio.AioRpcError as error:
                        if error.code() in FATAL:
                            raise Conflict(f"the coordinator refuses this worker: {error.details()}") from None
                        await self._note(error)
                    if self._leaving.is_set() and not broken:
                        self._left.set()
                        await asyncio.Event().wait()  # until the caller of leave() cancels this task
                    if time.monotonic() - started_s > MAX_BACKOFF_S:
                        backoff.reset()
                    await asyncio.sleep(backoff.next_s() * random.uniform(0.5, 1.0))
        finally:
            self._close_socket()
            self._context.term()

    async def _note(self, error: grpc.aio.AioRpcError) -> None:
        if error.code() is grpc.StatusCode.UNAVAILABLE and (fault := await self._tls_fault()):
            self._trouble.warning("tls", "%s. This worker keeps its results and tries again", fault)
            return
        if error.code() not in REFUSED:
            self._trouble.warning(
                "away",
                "no coordinator answers at %s: %s. This worker keeps its results and tries again every few seconds; start "
                "the coordinator with `paceline serve coordinator`, or name another with --coordinator",
                self.coordinator,
                error.details(),
            )
            return
        self._trouble.warning(
            "refused",
            "the coordinator at %s refuses this worker, which keeps its results and tries again: %s",
            self.coordinator,
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
            self._diagnosis = await asyncio.to_thread(why_no_channel, self.coordinator)
        return self._diagnosis

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

    async def request(
        self, request: pb.ExchangeRequest, payloads: list[bytes] | None = None
    ) -> tuple[pb.ExchangeReply, list[bytes]]:
        """Return the reply to an exchange request and its payload frames. Wait without limit, because everything that
        the coordinator has not acknowledged must be kept, also over its restart. Cancel to give up."""
        await self._welcomed.wait()
        request.protocol, request.member_id = PROTOCOL, self._hello().member_id
        pending = Pending(request, payloads or [], asyncio.get_running_loop().create_future())
        limit = self._turns if request.WhichOneof("body") == "turn" else self._bulk
        async with limit if payloads else contextlib.nullcontext():
            try:
                await self._send(pending)
                return await pending.reply
            finally:
                self._drop_request(pending)

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
            hello.secret = self._secret
            hello.exchange_key = z85.decode(self._public_key)
            await call.write(worker_pb2.ConnectRequest(hello=hello))
            await heard.wait()
            beat_s = time.monotonic()
            while True:
                try:
                    async with asyncio.timeout(max(0.01, beat_s + 1.0 - time.monotonic())):
                        self._unwritten = self._unwritten or await self._outbox.get()
                except TimeoutError:
                    beat_s = time.monotonic()
                    if self._connected.is_set():
                        beat = worker_pb2.Heartbeat(gauges=self._safe_gauges(), draining=self.draining)
                        await call.write(worker_pb2.ConnectRequest(heartbeat=beat))
                else:
                    await call.write(self._unwritten)
                    self._unwritten = None

    def _safe_gauges(self) -> dict[str, float]:
        """Return gauges of the worker, memory, GPUs and unexpected errors; only the last if any
        gauges fail, because the heartbeat matters more."""
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
        self.term, self._secret, self._is_refused = welcome.term, welcome.secret, False
        self.call_key = welcome.call_key
        self._trouble = RateLimitedLog(log, TROUBLE_LOG_S)
        self._close_socket()
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        # The exchange uses the same port; all replies are to requests that were sent.
        socket.setsockopt(zmq.RCVHWM, 0)
        watch(socket)
        if welcome.exchange_key:
            socket.curve_publickey, socket.curve_secretkey = self._public_key, self._private_key
            socket.curve_serverkey = z85.encode(welcome.exchange_key)
        # Watched before connecting, because an earlier end of the handshake would be missed.
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._monitor: zmq.asyncio.Socket = socket.get_monitor_socket(events)
        endpoint = _reachable(welcome.exchange_endpoint, self.coordinator)
        use_ipv6(socket, endpoint)
        socket.connect(endpoint)
        self._socket = socket
        self._reader = asyncio.create_task(self._read(socket))
        self._reader.add_done_callback(self._fail_pending)
        self._watcher = asyncio.create_task(self._watch_connection(self._monitor))
        self._welcomed.set()
        log.info("member of %s, term %d", self.coordinator, self.term)
        for pending in self._unanswered():
            await self._send(pending)

    async def _send(self, pending: Pending) -> None:
        if pending.reply.done():
            return
        request, one_answer = pending.request, pending.request.WhichOneof("body") in NEWEST_REPLY_ONLY
        request.again = bool(pending.terms) and not one_answer
        while len(pending.terms) >= (1 if one_answer else MAX_SENDINGS):
            oldest = next(iter(pending.terms))
            del self._pending[oldest], pending.terms[oldest]
        request.request_id = next(self._numbers)
        request.term, request.secret = self.term, self._secret
        self._pending[request.request_id], pending.terms[request.request_id] = pending, self.term
        pending.sent_s = time.monotonic()
        if self._socket is not None:
            await self._socket.send_multipart([pending.request.SerializeToString(), *pending.payloads])

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            header, *payloads = await socket.recv_multipart()
            try:
                reply = parse_message(pb.ExchangeReply, header)
            except WireError as error:
                log.warning("ignored a message from the exchange: %s", error)
                continue
            pending = self._pending.get(reply.request_id)
            # Without a stream another program may have taken the exchange's port; the next Welcome sends the request again.
            if pending is None or pending.reply.done() or not self.has_stream:
                continue
            if reply.status == pb.REPLY_STATUS_STALE and reply.term != pending.terms[reply.request_id]:
                continue  # it was sent before a Welcome that is due or has come by now: it is sent again
            pending.reply.set_result((reply, payloads))

    def _unanswered(self) -> list[Pending]:
        return list({id(pending): pending for pending in self._pending.values()}.values())

    def _drop_request(self, pending: Pending) -> None:
        for number in pending.terms:
            del self._pending[number]

    def _fail_pending(self, reader: asyncio.Task[None]) -> None:
        error = None if reader.cancelled() else reader.exception()
        for pending in self._pending.values():
            if error is not None and not pending.reply.done():
                pending.reply.set_exception(error)

    async def _watch_connection(self, monitor: zmq.asyncio.Socket) -> None:
        """Send all requests again after ZeroMQ has reconnected, because messages in transit were lost."""
        broken = False
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            if event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected.clear()
                broken = True
                continue
            self._connected.set()
            await self._introduce()
            if broken:
                broken = False
                log.warning("connected to the exchange again")
                for pending in self._unanswered():
                    await self._send(pending)

    async def _introduce(self) -> None:
        """Identify this worker on the new connection, even if there is nothing to request for a long time."""
        introduction = pb.ExchangeRequest(
            protocol=PROTOCOL, member_id=self._hello().member_id, term=self.term, secret=self._secret
        )
        if self._socket is not None:
            await self._socket.send(introduction.SerializeToString())

    async def _resend(self) -> None:
        """Send requests again after a while, because a reply can be lost without a broken connection."""
        while True:
            await asyncio.sleep(RESEND_S / 4)
            for pending in self._unanswered():
                if time.monotonic() - pending.sent_s > pending.pause_s:
                    pending.pause_s *= 2
                    await self._send(pending)

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._reader.cancel()
            self._watcher.cancel()
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close()
            self._socket = None
            self._connected.clear()


def _reachable(endpoint: str, coordinator: str) -> str:
    """Return the exchange's endpoint, with the host by which the coordinator was reached if the endpoint names none."""
    parts = urlsplit(endpoint)
    if parts.hostname in ("0.0.0.0", "::", "*"):
        return f"tcp://{coordinator.rsplit(':', 1)[0]}:{parts.port}"
    return endpoint
