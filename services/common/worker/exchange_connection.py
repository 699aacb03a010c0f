"""Keeps a worker's socket to the exchange, and the requests that wait for replies, over all reconnects. All unanswered
requests are sent again after each Welcome, after ZeroMQ has reconnected, and after a while without a reply. Requests
wait for the reader task, which waits for the socket; nothing waits for a request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from paceline.errors import WireError
from paceline.services.common.serving.endpoints import use_ipv6, watch
from paceline.tls.folder import tls_folder
from paceline.v1 import exchange_pb2 as pb
from paceline.v1 import worker_pb2
from paceline.wire import MAX_MESSAGE_BYTES, PROTOCOL, parse_message

RESEND_S = 60.0
"""A request without a reply is sent again after this many seconds, then after pauses of twice the length each time. The
first pause is longer than any wait that a request may ask for."""
MAX_SENDINGS = 16
"""A reply counts only if it is to one of this many newest transmissions of its request."""
NEWEST_REPLY_ONLY = frozenset({"lease", "task"})
"""Kinds of requests for which only a reply to the newest transmission counts: the newest request lists the worker's
leases, so the coordinator has revoked anything that an earlier reply granted."""
MAX_BULK = 4
"""Largest number of requests with payloads that wait for replies: the coordinator must keep all their payloads."""
MAX_TURNS = 64
"""Largest number of finished turns that wait for replies; those that arrive together share one synced write."""

log = logging.getLogger(__name__)


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


@dataclass
class Connection:
    """One socket, its monitor, and the tasks that read them."""

    socket: zmq.asyncio.Socket
    monitor: zmq.asyncio.Socket
    reader: asyncio.Task[None]
    watcher: asyncio.Task[None]

    def close(self) -> None:
        self.reader.cancel()
        self.watcher.cancel()
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()


class ExchangeConnection:
    def __init__(self, coordinator: str, member_id: Callable[[], str], has_stream: Callable[[], bool]):
        """`coordinator` is the address by which the coordinator was reached; `has_stream` returns whether this worker has
        a control stream."""
        self._coordinator, self._member_id, self._has_stream = coordinator, member_id, has_stream
        self._context = zmq.asyncio.Context()
        self._connection: Connection | None = None
        self.connected = asyncio.Event()
        self._pending: dict[int, Pending] = {}
        """Pending requests by the number of each transmission whose reply counts."""
        self._numbers = itertools.count(1)
        self._bulk = asyncio.Semaphore(MAX_BULK)
        self._turns = asyncio.Semaphore(MAX_TURNS)
        self.term = 0
        self.keys = zmq.curve_keypair() if tls_folder() is not None else (b"", b"")
        """Public and private key; both empty if connections are not encrypted."""
        self.secret = b""
        """Secret from the coordinator's last Welcome; empty before the first."""
        self._welcomed = asyncio.Event()

    async def connect(self, welcome: worker_pb2.Welcome) -> None:
        """Replace the connection by that of a Welcome, and send all unanswered requests again."""
        self.term, self.secret = welcome.term, welcome.secret
        self._disconnect()
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        # The exchange uses the same port; all replies are to requests that were sent.
        socket.setsockopt(zmq.RCVHWM, 0)
        watch(socket)
        if welcome.exchange_key:
            socket.curve_publickey, socket.curve_secretkey = self.keys
            socket.curve_serverkey = z85.encode(welcome.exchange_key)
        # Watch before connecting: otherwise a handshake that ends at once is missed.
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        monitor: zmq.asyncio.Socket = socket.get_monitor_socket(events)
        endpoint = _reachable(welcome.exchange_endpoint, self._coordinator)
        use_ipv6(socket, endpoint)
        socket.connect(endpoint)
        reader = asyncio.create_task(self._read(socket))
        reader.add_done_callback(self._fail_pending)
        watcher = asyncio.create_task(self._watch_connection(monitor))
        self._connection = Connection(socket, monitor, reader, watcher)
        self._welcomed.set()
        for pending in self._unanswered():
            await self._send(pending)

    async def request(
        self, request: pb.ExchangeRequest, payloads: list[bytes] | None = None
    ) -> tuple[pb.ExchangeReply, list[bytes]]:
        """Return the reply to an exchange request and its payload frames. Wait without limit, because everything that
        the coordinator has not acknowledged must be kept, also over its restart. Cancel to give up."""
        await self._welcomed.wait()
        request.protocol, request.member_id = PROTOCOL, self._member_id()
        pending = Pending(request, payloads or [], asyncio.get_running_loop().create_future())
        limit = self._turns if request.WhichOneof("body") == "turn" else self._bulk
        async with limit if payloads else contextlib.nullcontext():
            try:
                await self._send(pending)
                return await pending.reply
            finally:
                self._drop_request(pending)

    async def _send(self, pending: Pending) -> None:
        if pending.reply.done():
            return
        request, one_answer = pending.request, pending.request.WhichOneof("body") in NEWEST_REPLY_ONLY
        request.again = bool(pending.terms) and not one_answer
        while len(pending.terms) >= (1 if one_answer else MAX_SENDINGS):
            oldest = next(iter(pending.terms))
            del self._pending[oldest], pending.terms[oldest]
        request.request_id = next(self._numbers)
        request.term, request.secret = self.term, self.secret
        self._pending[request.request_id], pending.terms[request.request_id] = pending, self.term
        pending.sent_s = time.monotonic()
        if self._connection is not None:
            await self._connection.socket.send_multipart([pending.request.SerializeToString(), *pending.payloads])

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            header, *payloads = await socket.recv_multipart()
            try:
                reply = parse_message(pb.ExchangeReply, header)
            except WireError as error:
                log.warning("ignored a message from the exchange: %s", error)
                continue
            pending = self._pending.get(reply.request_id)
            # If there is no stream, another program may have the exchange's port; the request is repeated after the next Welcome.
            if pending is None or pending.reply.done() or not self._has_stream():
                continue
            if reply.status == pb.REPLY_STATUS_STALE and reply.term != pending.terms[reply.request_id]:
                continue  # of an earlier term: the request is repeated after the Welcome that is due or has just come
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
                self.connected.clear()
                broken = True
                continue
            self.connected.set()
            await self._introduce()
            if broken:
                broken = False
                log.warning("connected to the exchange again")
                for pending in self._unanswered():
                    await self._send(pending)

    async def _introduce(self) -> None:
        """Identify this worker on the new connection, even if there is nothing to request for a long time."""
        introduction = pb.ExchangeRequest(
            protocol=PROTOCOL, member_id=self._member_id(), term=self.term, secret=self.secret
        )
        if self._connection is not None:
            await self._connection.socket.send(introduction.SerializeToString())

    async def resend(self) -> None:
        """Send requests again after a while, because a reply can be lost without a broken connection."""
        while True:
            await asyncio.sleep(RESEND_S / 4)
            for pending in self._unanswered():
                if time.monotonic() - pending.sent_s > pending.pause_s:
                    pending.pause_s *= 2
                    await self._send(pending)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self.connected.clear()

    def close(self) -> None:
        self._disconnect()
        self._context.term()


def _reachable(endpoint: str, coordinator: str) -> str:
    """Return the exchange's endpoint, with the host by which the coordinator was reached if the endpoint names none."""
    parts = urlsplit(endpoint)
    if parts.hostname in ("0.0.0.0", "::", "*"):
        return f"tcp://{coordinator.rsplit(':', 1)[0]}:{parts.port}"
    return endpoint
