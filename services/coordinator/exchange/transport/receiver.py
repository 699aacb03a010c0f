"""Receives requests from the exchange's socket while there is room for their groups, and refuses frames that their kind
does not use, more requests than a member needs, and repetitions. Each message is checked on arrival, before any part
of it is kept. A refused message is answered at once."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from paceline.errors import WireError
from paceline.rate_limited_log import RateLimitedLog
from paceline.services.coordinator.exchange.replies import refuse
from paceline.services.coordinator.exchange.requests.table import kind_of
from paceline.services.coordinator.exchange.state import Exchange
from paceline.services.coordinator.exchange.transport.dispatch import is_introduction, refusal_of_key, refusal_of_sender
from paceline.services.coordinator.exchange.transport.pipeline_thread import PipelineThread
from paceline.services.coordinator.exchange.transport.router_socket import (
    ExchangeSocket,
    Message,
    PendingRequest,
    parse,
)
from paceline.services.coordinator.exchange.uploads.intake import Limits
from paceline.v1 import exchange_pb2 as pb

MAX_RECEIVED_AT_ONCE = 64
"""Number of messages that are read before other tasks of the event loop get a turn."""


@dataclass(frozen=True)
class ServerLimits:
    pending_bytes: int = 128 << 20
    """Largest number of bytes of uncommitted groups in memory; while there are more, no groups are read from ZeroMQ.
    The limit is below a segment's size, so the segment of a record that no transaction refers to yet is among the two
    newest, which are never removed."""
    unanswered: int = 4096
    """Largest number of a member's unanswered requests. Parked ones do not count: a member parks one of a kind."""
    wait_s: float = 30.0
    """Longest time, in seconds, for which a request is parked, even if the request asks for a longer wait."""
    tick_s: float = 0.2
    """Seconds after which parked requests are checked without an event, because time alone changes some answers."""
    store_again_s: tuple[float, float] = (0.2, 10.0)
    """First and longest back-off, in seconds, after which groups are stored again if no segment could be created."""


DEFAULT_LIMITS = ServerLimits()
seldom = RateLimitedLog(logging.getLogger(__name__))


class Receiver:
    """First step of the pipeline, on the event loop. Passes results with arrays to `checks`, other requests to
    `queue`."""

    def __init__(
        self,
        exchange: Exchange,
        socket: ExchangeSocket,
        request_filter: RequestFilter,
        checks: PipelineThread[PendingRequest],
        queue: Callable[[Sequence[PendingRequest]], None],
        limits: ServerLimits = DEFAULT_LIMITS,
    ):
        self._exchange = exchange
        self._socket = socket
        self._checks, self._queue = checks, queue
        self._readable, self._room = asyncio.Event(), asyncio.Event()
        self._limits = limits
        self.filter = request_filter
        self.pending_bytes = 0
        """Number of bytes of results with arrays that are not answered yet."""

    async def run(self) -> None:
        """Read the socket whenever it signals. Only changes are signaled, so the socket is read until empty."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket.descriptor, self._readable.set)
        try:
            while True:
                if self.pending_bytes >= self._limits.pending_bytes:
                    loop.remove_reader(self._socket.descriptor)
                    self._room.clear()
                    await self._room.wait()
                    loop.add_reader(self._socket.descriptor, self._readable.set)
                self._readable.clear()
                if self._read_some():
                    await self._readable.wait()
                else:
                    await asyncio.sleep(0)
        finally:
            loop.remove_reader(self._socket.descriptor)

    def poll(self) -> None:
        """Read the socket again, because sending may have consumed its descriptor's signal."""
        self._readable.set()

    def release(self, size_bytes: int) -> None:
        self.pending_bytes -= size_bytes
        self._room.set()

    def check_connections(self) -> None:
        """Check the connections, at every tick. Reads first, because an unread message may complete a transfer."""
        all_read = self.pending_bytes < self._limits.pending_bytes and self._read_some()
        self._socket.check_connections(all_read=all_read)
        self._readable.set()

    def _read_some(self) -> bool:
        """Read some messages; return whether these were all that had arrived."""
        for _ in range(MAX_RECEIVED_AT_ONCE):
            if self.pending_bytes >= self._limits.pending_bytes or not self._socket.discard():
                return False
            message = self._socket.receive()
            if message is None:
                return True
            self._take(message)
        return False

    def _take(self, message: Message) -> None:
        try:
            waiting = parse(message, self._limits.wait_s)
        except WireError as error:
            seldom.warning("garbage", "refused a message from %s: %s", message.identity.hex()[:16], error)
            reply = refuse(pb.ExchangeRequest(), str(error), self._exchange.ledger.term).reply
            self._socket.note_message(message, of_member=False)
            self._socket.send(message.identity, reply)
            return
        refusal = refusal_of_sender(self._exchange, waiting.request)
        if refusal is None and self._socket.public_key:
            refusal = refusal_of_key(self._exchange, waiting.request, message.key)
        if refusal is not None and refusal.reply.status == pb.REPLY_STATUS_INVALID:
            seldom.warning("sender", "refused a request: %s", refusal.reply.message)
            address = self._socket.connections.address_of(message.descriptor)
            member_id, why = waiting.request.member_id[:64], refusal.reply.message
            self._exchange.note_intruder(waiting.kind, member_id, why, address)
        introduction = is_introduction(waiting.request)
        self._socket.note_message(message, of_member=refusal is None, first=introduction)
        if refusal is None and introduction:
            return
        if refusal is None and (fault := self.filter.fault(waiting)):
            refusal = refuse(waiting.request, fault)
        if refusal is not None:  # before any part of it is stored or parked
            self._socket.send(waiting.identity, refusal.reply)
            return
        if waiting.has_bulk and self.filter.join_under_way(waiting):
            return
        if waiting.has_bulk and self.filter.is_decided(waiting):
            # Its arrays are not needed: it is handled as a request without any.
            waiting.is_decided, waiting.frames = True, []
        self.filter.let_in(waiting)
        if waiting.has_bulk:
            run = self._exchange.active
            waiting.limits = Limits.of(run.spec) if run is not None else None
            self.pending_bytes += waiting.size
            self._checks.put(waiting)
        else:
            self._queue([waiting])


TEXTS_HEADER_BYTES = 64 << 20
"""Largest number of header bytes of a lease returned with samples; their texts count as bytes to be stored."""

MAX_HELD = 10_000
"""Largest number of groups that a worker may report as held."""

MAX_RANKS = 1 << 16

Key = tuple[str, str, str, int, int, Hashable]


class RequestFilter:
    """Refuses requests, joins repeated ones, and counts accepted ones until they are answered."""

    def __init__(self, exchange: Exchange, max_unanswered: int):
        self._exchange, self._max_unanswered = exchange, max_unanswered
        self.unanswered: Counter[str] = Counter()
        self.under_way: dict[Key, PendingRequest] = {}
        """Requests with arrays that are being checked or stored, or wait for their transaction. The key is a `Key`."""

    def fault(self, waiting: PendingRequest) -> str:
        """Return why a member's request is refused; empty if it is accepted."""
        request, kind, frames = waiting.request, waiting.kind, waiting.frames
        facts = kind_of(kind)
        if len(frames) > facts.frames:
            return f"a {kind} request has {facts.frames} payload frames at most, not {len(frames)}"
        brings_texts = kind == "lease_return" and frames
        most = TEXTS_HEADER_BYTES if brings_texts else facts.header_bytes
        if waiting.header_size > most:
            return f"the header of a {kind} request has {most} bytes at most, not {waiting.header_size}"
        if kind in ("lease", "task"):
            held = len(getattr(request, kind).held.group_ids)
            if held > MAX_HELD:
                return f"a worker holds {MAX_HELD} groups at most, not {held}"
        if kind in ("batch", "receipt") and getattr(request, kind).world_size > MAX_RANKS:
            return f"a learner has {MAX_RANKS} ranks at most, not {getattr(request, kind).world_size}"
        if self.unanswered[request.member_id] >= self._max_unanswered:
            return (
                f"{self._max_unanswered} requests of {request.member_id} are unanswered already; wait for their answers"
            )
        return ""

    def join_under_way(self, waiting: PendingRequest) -> bool:
        """Return whether an earlier request with the same result is under way; its answer then goes to this sender."""
        first = self.under_way.get(_key(waiting)) if waiting.request.again else None
        if first is None:
            return False
        first.identity = waiting.identity
        first.request.request_id, first.request.secret = waiting.request.request_id, waiting.request.secret
        return True

    def is_decided(self, waiting: PendingRequest) -> bool:
        """Return whether a repeated result is decided in the ledger, so that its bytes are not needed."""
        run, request, kind = self._exchange.active, waiting.request, waiting.kind
        if not request.again or run is None or run.run_id != request.run_id:
            return False
        row = self._exchange.group_queries.get(run.run_id, getattr(request, kind).group_id)
        return row is None or kind_of(kind).is_decided(self._exchange, run, request, row)

    def let_in(self, waiting: PendingRequest) -> None:
        waiting.is_counted = True
        self.unanswered[waiting.request.member_id] += 1
        if waiting.has_bulk:
            self.under_way.setdefault(_key(waiting), waiting)

    def finished(self, waiting: PendingRequest) -> None:
        if not waiting.is_counted:
            return
        waiting.is_counted = False
        member_id = waiting.request.member_id
        self.unanswered[member_id] -= 1
        if not self.unanswered[member_id]:
            del self.unanswered[member_id]
        if waiting.has_bulk and self.under_way.get(_key(waiting)) is waiting:
            del self.under_way[_key(waiting)]


def _key(waiting: PendingRequest) -> Key:
    request, kind = waiting.request, waiting.kind
    submission = getattr(request, kind)
    part: Hashable
    if kind == "turn":
        part = submission.sample, submission.life, submission.index
    else:
        part = "" if kind == "lease_return" else submission.digest
    return request.run_id, kind, request.member_id, submission.group_id, submission.attempt, part
