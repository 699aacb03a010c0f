"""A worker's side of belonging: one control stream, one exchange socket, both made anew whenever they break.

Used by all three roles. `Membership.run()` keeps the stream: Hello, heartbeats, directives to a callback. When it
breaks, it comes back with the same member id after a growing pause; the coordinator tells a new term by Welcome.
`request()` sends an exchange request and waits for its reply. Only the absence of a reply is a reason to send
again: after a reconnect, everything that is still unanswered is sent again under the new term.

Heartbeats say that both connections stand. A worker that has lost the exchange cannot hand in what it holds, so it sends
none until it is there again, and the coordinator lends to others what it would lend for any silent worker.

Who waits for whom: requests wait for the reader task, which waits for the socket; nothing waits for a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import grpc
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from paceline.address import checked_address
from paceline.backoff import ExponentialBackoff
from paceline.errors import Conflict, WireError
from paceline.rate_limited_log import unforeseen
from paceline.token import metadata, read_token, token_path
from paceline.wire import MAX_MESSAGE_BYTES, PROTOCOL, parse_message
from protos.paceline.v1 import exchange_pb2 as pb
from protos.paceline.v1 import worker_pb2, worker_pb2_grpc
from services.common.grpc_server import CHANNEL_OPTIONS
from services.common.zmq_keepalive import use_ipv6, watch

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0
LEAVE_WAIT_S = 2.0
"""How long a worker that leaves waits, unless it says otherwise, for the coordinator to have taken its last words."""

RESEND_S = 60.0
"""A request without reply for this long is sent again, and then each time after twice as long; longer than any wait that a
request may ask for. What is slow to answer gets no faster by being sent more often."""

MAX_SENDINGS = 16
"""Sendings of one request to which a reply still counts."""

ONE_ANSWER = frozenset({"lease", "task"})
"""Kinds of which only a reply to the newest sending counts: that one said what the worker holds, so what an earlier one was
given has been taken back."""

MAX_BULK = 4
"""Requests with payloads that wait for their replies at one time; the others wait here. The coordinator has to keep whatever has
come, also while its disk is full."""

OUTBOX_SIZE = 1024
FATAL = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED}
REFUSED = {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED}
"""The worker waits until a person, or time, has changed what it is refused for: another protocol, a token, a taken id."""

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
    """Term of each sending whose reply counts, by its number."""
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
        """`on_refused` is called once when the coordinator begins to refuse this worker for now: it should save what it can."""
        self._coordinator = checked_address(coordinator)
        self._hello = hello
        self._on_directive = on_directive
        self._gauges = gauges
        self._on_refused = on_refused
        self._is_refused = False
        self._outbox: asyncio.Queue[worker_pb2.ConnectRequest] = asyncio.Queue(outbox_size)
        self._unsaid: worker_pb2.ConnectRequest | None = None
        """Taken from there; the stream may break before it is written."""
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._stands = asyncio.Event()
        """Whether there is a connection to the exchange."""
        self._pending: dict[int, Pending] = {}
        """By the number of each sending whose reply counts."""
        self._numbers = itertools.count(1)
        self._bulk = asyncio.Semaphore(MAX_BULK)
        self.term = 0
        self._secret = b""
        """Of the last Welcome."""
        self.draining = False
        """Set by a worker that was told to stop: the coordinator, told the same, stays until it has left."""
        self._welcomed = asyncio.Event()
        self._leaving = asyncio.Event()
        self._left = asyncio.Event()

    async def run(self) -> None:
        """Belongs until cancelled. Raises Conflict when the coordinator refuses this worker for good."""
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
                            raise Conflict(
                                f"the coordinator refuses this worker: {error.details()}"
                            ) from None
                        self._note(error)
                    if self._leaving.is_set() and not broken:
                        self._left.set()
                        await asyncio.Event().wait()  # until whoever called leave() cancels this
                    if time.monotonic() - started_s > MAX_BACKOFF_S:
                        backoff.reset()
                    await asyncio.sleep(backoff.next_s() * random.uniform(0.5, 1.0))
        finally:
            self._close_socket()
            self._context.term()

    def _note(self, error: grpc.aio.AioRpcError) -> None:
        """A stream that could not be had, or broke; it is tried again."""
        if error.code() not in REFUSED:
            log.warning("no coordinator at %s: %s", self._coordinator, error.details())
            return
        log.error(
            "the coordinator at %s refuses this worker, which keeps what it has and tries again: %s",
            self._coordinator,
            error.details(),
        )
        if not self._is_refused:
            self._is_refused = True
            self._on_refused()

    @property
    def waiting_reports(self) -> int:
        """Reports that no stream has taken yet."""
        return self._outbox.qsize()

    async def report(self, report: worker_pb2.ConnectRequest) -> None:
        """Queues a report; it goes out with this stream or the next."""
        await self._outbox.put(report)

    async def leave(self, wait_s: float = LEAVE_WAIT_S, *, reason: str = "") -> bool:
        """Tells the coordinator, with the reason when it is a fault; whether it ended the stream within `wait_s` seconds,
        having read all reports before.
        """
        self._leaving.set()
        await self.report(worker_pb2.ConnectRequest(leave=worker_pb2.Leave(reason=reason)))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._left.wait(), wait_s)
        return self._left.is_set()

    async def request(
        self, request: pb.ExchangeRequest, payloads: list[bytes] | None = None
    ) -> tuple[pb.ExchangeReply, list[bytes]]:
        """The reply to an exchange request and its payload frames. Waits for as long as it takes: the coordinator
        may be restarting, and what it has not acknowledged must not be forgotten. Cancel to give up.
        """
        await self._welcomed.wait()
        request.protocol, request.member_id = PROTOCOL, self._hello().member_id
        pending = Pending(request, payloads or [], asyncio.get_running_loop().create_future())
        async with self._bulk if payloads else contextlib.nullcontext():
            try:
                await self._send(pending)
                return await pending.reply
            finally:
                self._forget(pending)

    # The control stream

    async def _stream(self) -> None:
        async with grpc.aio.insecure_channel(self._coordinator, options=CHANNEL_OPTIONS) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            call = stub.Connect(metadata=metadata(read_token(token_path())))  # type: ignore[call-arg]  # its types know no `write`
            heard = asyncio.Event()
            speaking = asyncio.create_task(self._speak(call, heard))
            try:
                async for directive in call:
                    if directive.WhichOneof("directive") == "welcome":
                        await self._on_welcome(directive.welcome)
                        heard.set()
                    await self._on_directive(directive)
                    if self._leaving.is_set() and directive.WhichOneof("directive") == "welcome":
                        await self.report(
                            worker_pb2.ConnectRequest(leave=worker_pb2.Leave())
                        )  # lost with a stream
            finally:
                call.cancel()
                speaking.cancel()  # not later than the stream: it would take from the outbox what the next one has to say
                await asyncio.wait((speaking,))

    async def _speak(self, call: Stream, heard: asyncio.Event) -> None:
        """Hello; once it is welcome, because what is written to a stream that is refused is lost, whatever is reported, and a
        heartbeat every second while the exchange can be reached; until the stream breaks, which its reader hears of.

        After an error of this worker's own it says nothing more: the coordinator takes it for silent and ends the stream.
        """
        try:
            await self._speak_on(call, heard)
        except Exception as error:
            unforeseen.note("what a worker reports", error)

    async def _speak_on(self, call: Stream, heard: asyncio.Event) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            hello = self._hello()
            hello.secret = self._secret
            await call.write(worker_pb2.ConnectRequest(hello=hello))
            await heard.wait()
            beat_s = time.monotonic()
            while True:
                try:
                    async with asyncio.timeout(max(0.01, beat_s + 1.0 - time.monotonic())):
                        self._unsaid = self._unsaid or await self._outbox.get()
                except TimeoutError:
                    beat_s = time.monotonic()
                    if self._stands.is_set():
                        beat = worker_pb2.Heartbeat(gauges=self._said_gauges(), draining=self.draining)
                        await call.write(worker_pb2.ConnectRequest(heartbeat=beat))
                else:
                    await call.write(self._unsaid)
                    self._unsaid = None

    def _said_gauges(self) -> dict[str, float]:
        """The worker's gauges, and how many unforeseen errors it met; that alone when they cannot be had, since a heartbeat
        says more than they do."""
        try:
            gauges = self._gauges()
        except Exception as error:
            unforeseen.note("a worker's gauges", error)
            gauges = {}
        return gauges | {"unforeseen_errors": float(unforeseen.total)}

    async def _on_welcome(self, welcome: worker_pb2.Welcome) -> None:
        """(Re)connects the exchange; what was not answered is sent again under the new term."""
        self.term, self._secret, self._is_refused = welcome.term, welcome.secret, False
        self._close_socket()
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RCVHWM, 0)  # as the exchange's; replies were all asked for
        watch(socket)
        # Before there is anything to hear of: a handshake that has ended by then would never be heard of.
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._monitor: zmq.asyncio.Socket = socket.get_monitor_socket(events)
        endpoint = _reachable(welcome.exchange_endpoint, self._coordinator)
        use_ipv6(socket, endpoint)
        socket.connect(endpoint)
        self._socket = socket
        self._reader = asyncio.create_task(self._read(socket))
        self._reader.add_done_callback(self._fail_pending)
        self._mender = asyncio.create_task(self._mend(self._monitor))
        self._welcomed.set()
        log.info("member of %s, term %d", self._coordinator, self.term)
        for pending in self._unanswered():
            await self._send(pending)

    # The exchange

    async def _send(self, pending: Pending) -> None:
        """Sends a request, under a number of its own each time."""
        if pending.reply.done():
            return
        request, one_answer = pending.request, pending.request.WhichOneof("body") in ONE_ANSWER
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
            if pending is None or pending.reply.done():
                continue
            if reply.status == pb.REPLY_STATUS_STALE and reply.term != pending.terms[reply.request_id]:
                continue  # it was sent before a Welcome that is due, or here by now: then it is sent again
            pending.reply.set_result((reply, payloads))

    def _unanswered(self) -> list[Pending]:
        """Every request that waits, once."""
        return list({id(pending): pending for pending in self._pending.values()}.values())

    def _forget(self, pending: Pending) -> None:
        """No reply to it counts any more."""
        for number in pending.terms:
            del self._pending[number]

    def _fail_pending(self, reader: asyncio.Task[None]) -> None:
        """Nobody waits for replies that nobody reads any more."""
        error = None if reader.cancelled() else reader.exception()
        for pending in self._pending.values():
            if error is not None and not pending.reply.done():
                pending.reply.set_exception(error)

    async def _mend(self, monitor: zmq.asyncio.Socket) -> None:
        """ZeroMQ makes a broken connection anew by itself, but what was on its way is lost: everything is sent again."""
        broken = False
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            if event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._stands.clear()
                broken = True
                continue
            self._stands.set()
            await self._introduce()
            if broken:
                broken = False
                log.warning("the connection to the exchange stands again")
                for pending in self._unanswered():
                    await self._send(pending)

    async def _introduce(self) -> None:
        """Says whose the new connection is, also when there is nothing to ask for a long time."""
        introduction = pb.ExchangeRequest(
            protocol=PROTOCOL, member_id=self._hello().member_id, term=self.term, secret=self._secret
        )
        if self._socket is not None:
            await self._socket.send(introduction.SerializeToString())

    async def _resend(self) -> None:
        """A reply can be lost without a connection that breaks: ask again after a while."""
        while True:
            await asyncio.sleep(RESEND_S / 4)
            for pending in self._unanswered():
                if time.monotonic() - pending.sent_s > pending.pause_s:
                    pending.pause_s *= 2
                    await self._send(pending)

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._reader.cancel()
            self._mender.cancel()
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close()
            self._socket = None
            self._stands.clear()


def _reachable(endpoint: str, coordinator: str) -> str:
    """The exchange's endpoint, at the host by which the coordinator was reached if it named none."""
    parts = urlsplit(endpoint)
    if parts.hostname in ("0.0.0.0", "::", "*"):
        return f"tcp://{coordinator.rsplit(':', 1)[0]}:{parts.port}"
    return endpoint
