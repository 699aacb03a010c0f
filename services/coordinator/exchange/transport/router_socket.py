"""The exchange's ZeroMQ socket: whole messages in, replies out. No peer can stop it, whatever it sends or fails to
read.

With CURVE, connections are encrypted, and each one is known by its public key. The socket's key is new for each
coordinator's life and reaches workers by Welcome; a worker's key reaches the coordinator by Hello. Both come over the
control stream, which TLS authenticates. ZeroMQ asks a thread of pyzmq's (ZAP) whether a key is a member's before the
first message of its connection is read: a stranger's connection ends there and leaves nothing.
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
from paceline.services.coordinator.exchange.transport.connections import Connections
from paceline.services.coordinator.exchange.uploads.intake import Arrived
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import MAX_MESSAGE_BYTES, parse_message

DOMAIN = "exchange"
MAX_CACHED = 4096
"""Keys whose text is decoded once."""
KnowsKey = Callable[[bytes], bool]

quiet = logging.getLogger(f"{__name__}.pyzmq")
quiet.setLevel(logging.CRITICAL)  # it writes lines for each attempt


@lru_cache(MAX_CACHED)
def _decoded(text: str) -> bytes:
    return bytes(z85.decode(text))


def key_of(frame: zmq.Frame) -> bytes:
    """Return the public key of the connection that a frame came on; empty if it is not encrypted."""
    try:
        return _decoded(str(frame.get("User-Id")))
    except (zmq.ZMQError, ValueError):
        return b""


MAX_FRAMES = 16
"""Payload frames of a message that are read; no request has as many."""

DISCARDED_AT_ONCE = 10_000
"""Further frames that are read in one turn of the event loop."""

FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""Events of peers without CURVE, and of those that repeat the bytes of another connection."""

MAX_WAIT_S = 30.0
"""Longest time for which a request is parked, whatever it asks for."""

seldom = RateLimitedLog(logging.getLogger(__name__))


@dataclass
class PendingRequest:
    """A request with the address to answer to."""

    identity: bytes
    arrived: Arrived
    deadline_s: float
    size: int = 0
    """Bytes of all its frames."""
    header_size: int = 0
    is_counted: bool = False
    """True when it is counted among its member's requests that wait for an answer."""

    @property
    def request(self) -> pb.ExchangeRequest:
        return self.arrived.request

    @property
    def kind(self) -> str:
        return self.arrived.kind

    @property
    def key(self) -> tuple[str, str, int]:
        """Key by member and kind of request. Not by connection: a worker that came back on a new one has nothing on the
        old."""
        return self.request.member_id, self.kind, self.request.batch.rank if self.kind == "batch" else 0


@dataclass
class Message:
    """A message. Only payloads are large, so only they are not copied."""

    identity: bytes
    header: bytes
    payloads: list[Buffer]
    descriptor: int = -1
    """Descriptor of its connection."""
    key: bytes = b""
    """Public key of its connection; empty if it is not encrypted."""

    @property
    def size(self) -> int:
        return len(self.header) + sum(map(len, self.payloads))


class ExchangeSocket:
    """A ROUTER on `host:port`; port 0 takes a free one. Raises Conflict when it cannot listen."""

    def __init__(self, host: str, port: int, knows: KnowsKey | None = None):
        """With `knows`, which tells whether a public key is a member's, connections are encrypted and only members have one."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, 1000)
        # Every reply answers a request, so the number of requests bounds theirs.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        # No bound: where ZeroMQ has stopped to read a connection, the peer ends it, and a PING of the peer's was among what
        # had come, ZeroMQ ends the process (an assertion, as of 4.3.5). So `connections` bounds what is not read.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        watch(self._socket)
        self.public_key = b""
        """The public key, 32 bytes, that peers have to know; empty if nothing is encrypted."""
        self._knows = knows
        self._authenticator = self._encrypt() if knows is not None else None
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | FAILED
        self._monitor = self._socket.get_monitor_socket(events)
        self._discarding = False
        """True when the rest of a message is discarded."""
        self._to_cut: int | None = None
        """Connection of that message, which is cut off if the rest is long; once, as its number may soon be another
        connection's."""
        self.port = self._bind(host, port)
        self.connections = Connections(self.port)
        """Connections that stand."""

    def _encrypt(self) -> ThreadAuthenticator:
        """Let the socket, which is not bound yet, take connections of members alone; return the thread that asks."""
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
        """Answer pyzmq's thread whether a peer is let in; `key` is in Z85."""
        known = self._knows is not None and self._knows(z85.decode(key))
        if not known:
            seldom.warning("key", "refused a connection to the exchange: its key is no member's")
        return known

    @property
    def descriptor(self) -> int:
        """Descriptor that is readable when something changed; it signals changes only, so the socket is read until it
        is empty."""
        return int(self._socket.FD)

    def receive(self) -> Message | None:
        """Return the next message, if one has arrived; None also while `discard` is not done."""
        socket = self._socket
        if not self.discard():
            return None
        try:
            identity = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        frame = socket.recv(zmq.NOBLOCK, copy=False)  # there is one: a message comes whole
        header, descriptor = frame.bytes, _source(frame)
        key = key_of(frame) if self.public_key else b""
        payloads: list[Buffer] = []
        while frame.more:  # cheaper than a call of the socket
            frame = socket.recv(zmq.NOBLOCK, copy=False)
            payloads.append(frame.buffer)
            if len(payloads) > MAX_FRAMES:
                self._discarding, self._to_cut = True, descriptor
                break
        return Message(identity, header, payloads, descriptor, key)

    def discard(self) -> bool:
        """Discard the rest of a message that has more frames than any request; return whether nothing is left of it.
        Some frames at a time: there may be millions, and then its connection is cut off."""
        if not self._discarding:
            return True
        for _ in range(DISCARDED_AT_ONCE):
            if not self._socket.getsockopt(zmq.RCVMORE):
                self._discarding = False
                return True
            self._socket.recv(zmq.NOBLOCK)
        if self._to_cut is not None:
            self.connections.cut(self._to_cut)
            self._to_cut = None
        return False

    def note_message(self, message: Message, *, of_member: bool, first: bool = False) -> None:
        """Note that a message was received; `first`: it is the first of its connection. ZeroMQ reports a connection
        before it gives out a message of it, and a number may be that of an earlier connection which has ended."""
        if first or not self.connections.is_of_member(message.descriptor):
            self._read_monitor()
        self.connections.note_message(message.descriptor, message.size, of_member=of_member)

    def check_connections(self, *, all_read: bool = True) -> None:
        """Cut off connections with too much under way, and those that no member uses. `all_read`: `receive` has nothing
        more."""
        self._read_monitor()
        for reason in self.connections.check(all_read=all_read):
            seldom.warning("cut off", "a connection to the exchange was closed: %s", reason)

    def send(self, identity: bytes, reply: pb.ExchangeReply, payloads: Sequence[Buffer] = ()) -> None:
        """Send a reply, unless its peer is gone or does not read: that must not hold up the others; the peer will ask
        again."""
        frames = [identity, reply.SerializeToString(), *payloads]
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT, copy=not payloads)
        except zmq.ZMQError as error:
            seldom.warning("unsent", "a reply to %s could not be sent: %s", identity.hex()[:16], error)

    def _read_monitor(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self.connections.opened(event["value"])
            elif event["event"] & FAILED:
                seldom.warning(
                    "handshake",
                    "refused a connection to the exchange: its handshake failed, as a member's does not",
                )
            else:
                self.connections.closed(event["value"])

    def close(self) -> None:
        """Send what is queued, then close."""
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
                f"the exchange cannot listen on {host}:{port} ({error}); is another process there? "
                "Choose another --exchange-port"
            ) from None


def _source(frame: zmq.Frame) -> int:
    """Return the descriptor of the connection that a frame came on; -1 where ZeroMQ does not report it."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def parse(message: Message) -> PendingRequest:
    """Return the request in a message. Raises WireError."""
    arrived = Arrived(parse_message(pb.ExchangeRequest, message.header), message.payloads)
    # In this order, NaN becomes the limit.
    wait_s = min(MAX_WAIT_S, getattr(getattr(arrived.request, arrived.kind, None), "wait_s", 0.0))
    deadline_s = time.monotonic() + wait_s
    return PendingRequest(message.identity, arrived, deadline_s, message.size, len(message.header))
