"""Receives requests from the exchange's socket and filters them, for as long as there is room for their groups."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from paceline.errors import WireError
from paceline.rate_limited_log import RateLimitedLog
from paceline.services.coordinator.exchange.state import Exchange
from paceline.services.coordinator.exchange.transport.dispatch import (
    is_introduction,
    refusal_of_key,
    refusal_of_sender,
)
from paceline.services.coordinator.exchange.transport.pipeline_thread import PipelineThread
from paceline.services.coordinator.exchange.transport.request_filter import RequestFilter
from paceline.services.coordinator.exchange.transport.router_socket import (
    ExchangeSocket,
    Message,
    PendingRequest,
    parse,
)
from paceline.services.coordinator.exchange.uploads.array_checks import Limits
from paceline.v1 import exchange_pb2 as pb

MAX_RECEIVED_AT_ONCE = 64
"""Messages that are read before other tasks have their turn."""

MAX_PENDING_BYTES = 128 << 20
"""Bytes of groups in memory that are not committed; beyond it groups are not read from ZeroMQ. A segment is larger, so that
the segment of a record that no transaction refers to yet is among the two newest, which are never removed."""

seldom = RateLimitedLog(logging.getLogger(__name__))


class Receiver:
    """The first step of the pipeline, on the event loop. Of the requests that are let in, `checks` takes results with
    arrays, and `queue` the others.
    """

    def __init__(
        self,
        exchange: Exchange,
        socket: ExchangeSocket,
        checks: PipelineThread[PendingRequest],
        queue: Callable[[Sequence[PendingRequest]], None],
    ):
        self._exchange = exchange
        self._socket = socket
        self._checks, self._queue = checks, queue
        self._readable, self._room = asyncio.Event(), asyncio.Event()
        self.filter = RequestFilter(exchange)
        self.pending_bytes = 0
        """Size of results with arrays that are not answered."""

    async def run(self) -> None:
        """Read whenever the socket has something. Its descriptor signals changes only, so it is read until empty."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket.descriptor, self._readable.set)
        try:
            while True:
                if self.pending_bytes >= MAX_PENDING_BYTES:
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
        """Read the socket again, because sending may have used up its descriptor's signal."""
        self._readable.set()

    def release(self, size_bytes: int) -> None:
        """Make room: results of this size are answered."""
        self.pending_bytes -= size_bytes
        self._room.set()

    def check_connections(self) -> None:
        """Check the connections, every TICK_S. Messages are read before, because an
        unread one may complete an unfinished transfer."""
        all_read = self.pending_bytes < MAX_PENDING_BYTES and self._read_some()
        self._socket.check_connections(all_read=all_read)
        self._readable.set()

    def _read_some(self) -> bool:
        """Read some messages; return whether that was all that had arrived."""
        for _ in range(MAX_RECEIVED_AT_ONCE):
            if self.pending_bytes >= MAX_PENDING_BYTES or not self._socket.discard():
                return False
            message = self._socket.receive()
            if message is None:
                return True
            self._take(message)
        return False

    def _take(self, message: Message) -> None:
        try:
            waiting = parse(message)
        except WireError as error:
            seldom.warning("garbage", "refused a message from %s: %s", message.identity.hex()[:16], error)
            reply = self._exchange.refuse(pb.ExchangeRequest(), str(error)).reply
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
            refusal = self._exchange.refuse(waiting.request, fault)
        if refusal is not None:  # before anything of it is stored or parked
            self._socket.send(waiting.identity, refusal.reply)
            return
        arrived = waiting.arrived
        if arrived.has_bulk and self.filter.join_under_way(waiting):
            return
        decided = arrived.has_bulk and self.filter.is_decided(waiting)
        if decided:  # its arrays are not needed, so it goes the way of requests without any
            arrived.is_decided, arrived.frames, waiting.size = True, [], 0
        self.filter.let_in(waiting)
        if arrived.has_bulk and not decided:
            run = self._exchange.active
            arrived.limits = Limits.of(run.spec) if run is not None else None
            self.pending_bytes += waiting.size
            self._checks.put(waiting)
        else:
            self._queue([waiting])
