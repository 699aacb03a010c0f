"""Receives whole messages and sends replies over the exchange's ZeroMQ socket. No peer can block it, whatever it sends
or fails to read.

With CURVE, connections are encrypted and identified by their public keys. The socket's key is new for each
coordinator's life and reaches workers by Welcome; a worker's key reaches the coordinator by Hello. Both come over the
control stream, which TLS authenticates. ZeroMQ asks a thread of pyzmq (ZAP) whether a key is a member's before it reads
a connection's first message: a stranger's connection is closed then and uses no further resources.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from paceline.array_frames import Buffer
from paceline.errors import Conflict
from paceline.rate_limited_log import RateLimitedLog
from paceline.services.common.serving.endpoints import in_brackets, use_ipv6, watch
from paceline.services.coordinator.exchange.requests.table import kind_of
from paceline.services.coordinator.exchange.transport.connections import DEFAULT_LIMITS, ConnectionLimits, Connections
from paceline.services.coordinator.exchange.uploads.intake import Arrived
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import MAX_MESSAGE_BYTES, parse_message

DOMAIN = "exchange"
MAX_CACHED = 4096
"""Largest number of keys whose decoded bytes are cached."""
KnowsKey = Callable[[bytes], bool]

quiet = logging.getLogger(f"{__name__}.pyzmq")
quiet.setLevel(logging.CRITICAL)  # it logs each attempt


@lru_cache(MAX_CACHED)
def _decoded(text: str) -> bytes:
    return bytes(z85.decode(text))


def key_of(frame: zmq.Frame) -> bytes:
    """Return the public key of the connection that a frame came on; empty if the connection is not encrypted."""
    try:
        return _decoded(str(frame.get("User-Id")))
    except (zmq.ZMQError, ValueError):
        return b""


MAX_FRAMES = 16
"""Largest number of payload frames that are read of a message; more than any request has."""

FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""Events of peers without CURVE, and of peers that replay another connection's bytes."""

seldom = RateLimitedLog(logging.getLogger(__name__))


@dataclass(kw_only=True)
class PendingRequest(Arrived):
    """A request that waits for its answer. Its sender is connected as `identity`."""

    identity: bytes
    deadline_s: float
    header_size: int
    is_counted: bool = False
    """True while the request counts as an unanswered request of its member."""

    @property
    def has_bulk(self) -> bool:
        """True if the request has arrays to be stored before its transaction."""
        return not self.is_decided and kind_of(self.kind).has_bulk(self.frames)

    @property
    def size(self) -> int:
        """Size of the request's frames together, in bytes."""
        return self.header_size + sum(map(len, self.frames))

    @property
    def key(self) -> tuple[str, str, int]:
        """Return member and kind, but no connection: a worker that reconnects awaits nothing on its old connection."""
        return self.request.member_id, self.kind, self.request.batch.rank if self.kind == "batch" else 0


@dataclass
class Message:
    """A received message. Header bytes are copied; payloads, which may be large, are views."""

    identity: bytes
    header: bytes
    payloads: list[Buffer]
    descriptor: int = -1
    key: bytes = b""
    """Public key of the message's connection; empty if the connection is not encrypted."""

    @property
    def size(self) -> int:
        return len(self.header) + sum(map(len, self.payloads))


class ExchangeSocket:
    """A ROUTER on `host:port`; port 0 takes a free one. Raises Conflict if it cannot listen."""

    def __init__(
        self,
        host: str,
        port: int,
        knows: KnowsKey | None = None,
        limits: ConnectionLimits = DEFAULT_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`knows` returns whether a public key is a member's; with it, all connections are encrypted."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, 1000)
        # Unbounded: every reply answers a request, so the requests bound the replies.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        # Unbounded: if ZeroMQ has stopped reading a connection, the peer closes it, and a PING of the peer had arrived,
        # ZeroMQ aborts the process (an assertion, as of 4.3.5). So `connections` bounds the unread bytes.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        watch(self._socket)
        self.public_key = b""
        """Public key, 32 bytes, that peers need; empty without encryption."""
        self._knows = knows
        self._authenticator = self._encrypt() if knows is not None else None
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | FAILED
        self._monitor = self._socket.get_monitor_socket(events)
        self._discarded_at_once = limits.discarded_at_once
        self._discarding = False
        """True while the rest of a message with too many frames is discarded."""
        self._to_cut: int | None = None
        """Descriptor of the connection with a message that has too many frames. The connection is closed if the rest of
        the message is long; it is closed only once, because the number may soon be another connection's."""
        self.port = self._bind(host, port)
        self.connections = Connections(self.port, limits, clock)

    def _encrypt(self) -> ThreadAuthenticator:
        """Let the socket, before it is bound, accept members only; return the thread that authenticates."""
        public, self._socket.curve_secretkey = zmq.curve_keypair()
        self.public_key = z85.decode(public)
        self._socket.curve_server = True
        self._socket.zap_domain = DOMAIN.encode()
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        authenticator = ThreadAuthenticator(self._context, log=quiet)
        authenticator.start()
        authenticator.configure_curve_callback(DOMAIN, self)
        return authenticator

    def callback(self, domain: str, key: bytes) -> bool:
        """Return to pyzmq's thread whether a peer is accepted; `key` is in Z85."""
        is_member = self._knows is not None and self._knows(z85.decode(key))
        if not is_member:
            seldom.warning("key", "refused a connection to the exchange: its key is no member's")
        return is_member

    @property
    def descriptor(self) -> int:
        """Return a descriptor that becomes readable at changes only, so that the socket must be read until empty."""
        return int(self._socket.FD)

    def receive(self) -> Message | None:
        """Return the next message; None if none has arrived or a message is still being discarded."""
        socket = self._socket
        if not self.discard():
            return None
        try:
            identity = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        frame = socket.recv(zmq.NOBLOCK, copy=False)  # never blocks: messages arrive whole
        header, descriptor = frame.bytes, _source(frame)
        key = key_of(frame) if self.public_key else b""
        payloads: list[Buffer] = []
        while frame.more:  # cheaper than RCVMORE
            frame = socket.recv(zmq.NOBLOCK, copy=False)
            payloads.append(frame.buffer)
            if len(payloads) > MAX_FRAMES:
                self._discarding, self._to_cut = True, descriptor
                break
        return Message(identity, header, payloads, descriptor, key)

    def discard(self) -> bool:
        """Discard the rest of a message with too many frames; return whether all is discarded. Reads some frames at a
        time, because there may be millions; if some are left, the connection is closed."""
        if not self._discarding:
            return True
        for _ in range(self._discarded_at_once):
            if not self._socket.getsockopt(zmq.RCVMORE):
                self._discarding = False
                return True
            self._socket.recv(zmq.NOBLOCK)
        if self._to_cut is not None:
            self.connections.cut(self._to_cut)
            self._to_cut = None
        return False

    def note_message(self, message: Message, *, of_member: bool, first: bool = False) -> None:
        """Note that a message was received. For the `first` message of a connection the monitor is read before, because
        ZeroMQ reports a connection before the connection's first message, and descriptors are reused."""
        if first or not self.connections.is_of_member(message.descriptor):
            self.read_monitor()
        self.connections.note_message(message.descriptor, message.size, of_member=of_member)

    def check_connections(self, *, all_read: bool = True) -> None:
        """Close connections with too many unread bytes or without a member; `all_read` is true if no message waits."""
        self.read_monitor()
        for reason in self.connections.check(all_read=all_read):
            seldom.warning("cut off", "a connection to the exchange was closed: %s", reason)

    def send(self, identity: bytes, reply: pb.ExchangeReply, payloads: Sequence[Buffer] = ()) -> None:
        """Send a reply without blocking. If the peer is gone or does not read, drop the reply: the peer asks again."""
        frames = [identity, reply.SerializeToString(), *payloads]
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT, copy=not payloads)
        except zmq.ZMQError as error:
            seldom.warning("unsent", "a reply to %s could not be sent: %s", identity.hex()[:16], error)

    def read_monitor(self) -> None:
        """Note connections that opened or closed."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self.connections.opened(event["value"])
            elif event["event"] & FAILED:
                seldom.warning(
                    "handshake",
                    "refused a connection to the exchange: its handshake failed, because the peer does not use CURVE "
                    "or repeats another connection's bytes",
                )
            else:
                self.connections.closed(event["value"])

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def _bind(self, host: str, port: int) -> int:
        try:
            address = f"tcp://{in_brackets(host)}"
            use_ipv6(self._socket, address)
            if not port:
                return self._socket.bind_to_random_port(address)
            self._socket.bind(f"{address}:{port}")
            return port
        except zmq.ZMQError as error:
            self.close()
            raise Conflict(
                f"the exchange cannot listen on {host}:{port} ({error}); does another process use the port? "
                "Choose another --exchange-port"
            ) from None


def _source(frame: zmq.Frame) -> int:
    """Return the descriptor of the connection that a frame came on; -1 if ZeroMQ does not report it."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def parse(message: Message, max_wait_s: float) -> PendingRequest:
    """Return the request in a message, to be parked for at most `max_wait_s`. Raises WireError."""
    request = parse_message(pb.ExchangeRequest, message.header)
    body = getattr(request, request.WhichOneof("body") or "", None)
    wait_s = min(max_wait_s, getattr(body, "wait_s", 0.0))  # in this order, NaN becomes the limit
    return PendingRequest(
        request,
        message.payloads,
        identity=message.identity,
        deadline_s=time.monotonic() + wait_s,
        header_size=len(message.header),
    )
