"""The data plane: a ZeroMQ ROUTER in front of the exchange.

Invariants. Nothing is sent that was not asked for. All requests that have arrived are answered in one transaction,
committed to the disk before the first answer leaves (group commit). A request that could be given nothing is parked
until something changes or its own wait ends; a worker has at most one parked request of a kind (a rank: one), so the
parking lot is bounded by the members. Whatever bytes arrive, they are answered or dropped, and the loop goes on.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import zmq
import zmq.asyncio

from paceline.errors import Conflict, WireError
from paceline.wire import MAX_MESSAGE_BYTES, parse_header
from protos.paceline.v1 import exchange_pb2 as pb
from services.coordinator.exchange import Exchange, Notice, Outcome

MAX_REQUESTS_PER_COMMIT = 512
MAX_WAIT_S = 30.0
"""Longest time for which a request is parked, whatever it asks for."""

TICK_S = 0.2
"""How often parked requests are looked at though nothing happened: some answers change with time alone."""

WAKES = {
    "group": {"task"},
    "score": {"batch", "lease"},
    "receipt": {"batch", "lease"},
    "lease_return": {"lease"},
}
"""Which parked requests an arrived one can change the answer to."""

log = logging.getLogger(__name__)


@dataclass
class Waiting:
    """A request with the address to answer to."""

    identity: bytes
    request: pb.ExchangeRequest
    frames: list[bytes]
    deadline_s: float

    @property
    def kind(self) -> str:
        """Name of the request's body."""
        return self.request.WhichOneof("body") or ""

    @property
    def key(self) -> tuple[str, str, int]:
        """Who asks for what. Not by connection: a worker that came back on a new one has nothing on the old."""
        return self.request.member_id, self.kind, self.request.batch.rank if self.kind == "batch" else 0


class ExchangeServer:
    """Runs the loop; `lock` keeps the control plane's transactions apart from its own.

    `record` writes down what happened in the same transaction; `act` does the rest after its commit.
    """

    def __init__(
        self,
        exchange: Exchange,
        lock: asyncio.Lock,
        record: Callable[[list[Notice]], None],
        act: Callable[[list[Notice]], Awaitable[None]],
        host: str,
        port: int,
    ):
        self._exchange = exchange
        self._lock = lock
        self._record = record
        self._act = act
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(
            zmq.SNDHWM, 0
        )  # every reply was asked for; its number is bounded by the requests
        self.port = self._bind(host, port)
        self._parked: dict[tuple[str, str, int], Waiting] = {}
        self._wake: set[str] = set()
        self._bell = asyncio.Event()

    def wake(self, *kinds: str) -> None:
        """Looks again at the parked requests of these kinds: something outside the exchange changed."""
        self._wake.update(kinds)
        self._bell.set()

    async def serve(self) -> None:
        """Answers until cancelled."""
        tick_s = time.monotonic()
        while True:
            arrived = await self._receive()
            kinds = set(self._wake)
            self._wake.clear()
            for waiting in arrived:
                kinds |= WAKES.get(waiting.kind, set())
            if time.monotonic() - tick_s > TICK_S:
                kinds |= {"lease", "task", "batch"}
                tick_s = time.monotonic()
            if arrived or (kinds and self._parked):
                await self._answer(arrived, kinds)

    def close(self) -> None:
        """Sends what is queued, then closes the socket."""
        self._socket.close()
        self._context.term()

    def _bind(self, host: str, port: int) -> int:
        try:
            if not port:
                return self._socket.bind_to_random_port(f"tcp://{host}")
            self._socket.bind(f"tcp://{host}:{port}")
            return port
        except zmq.ZMQError as error:
            self.close()
            raise Conflict(
                f"the exchange cannot listen on {host}:{port} ({error}); is another process there? "
                "Choose another --exchange-port"
            ) from None

    async def _receive(self) -> list[Waiting]:
        """What has arrived; waits for the first message, a wake-up, or a tick."""
        ready, bell = (
            asyncio.ensure_future(self._socket.poll(TICK_S * 1000)),
            asyncio.ensure_future(self._bell.wait()),
        )
        try:
            await asyncio.wait((ready, bell), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            bell.cancel()
        self._bell.clear()
        arrived: list[Waiting] = []
        while len(arrived) < MAX_REQUESTS_PER_COMMIT:
            try:
                frames = await self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            waiting = await self._parse(frames)
            if waiting:
                arrived.append(waiting)
        return arrived

    async def _parse(self, frames: list[bytes]) -> Waiting | None:
        identity, header, *payloads = frames if len(frames) > 1 else [frames[0], b""]
        try:
            request = parse_header(pb.ExchangeRequest, header)
        except WireError as error:
            log.warning("refused a message from %s: %s", identity.hex()[:16], error)
            reply = self._exchange.refuse(pb.ExchangeRequest(), str(error)).reply
            await self._send(identity, Outcome(reply))
            return None
        body = getattr(request, request.WhichOneof("body") or "", None)
        wait_s = min(
            MAX_WAIT_S, getattr(body, "wait_s", 0.0)
        )  # in this order: not-a-number becomes the limit
        return Waiting(identity, request, payloads, time.monotonic() + wait_s)

    async def _answer(self, arrived: list[Waiting], kinds: set[str]) -> None:
        """One transaction for everything; answers leave after its commit."""
        now_s = time.monotonic()
        answers: list[tuple[Waiting, Outcome]] = []
        async with self._lock:
            with self._exchange.ledger.transaction():
                for waiting in arrived:
                    self._settle(waiting, now_s, answers)
                for key, waiting in list(self._parked.items()):
                    if waiting.kind in kinds or waiting.deadline_s <= now_s:
                        del self._parked[key]
                        self._settle(waiting, now_s, answers)
                notices = self._exchange.take_notices()
                self._record(notices)
        for waiting, outcome in answers:
            await self._send(waiting.identity, outcome)
        if notices:
            await self._act(notices)

    def _settle(self, waiting: Waiting, now_s: float, answers: list[tuple[Waiting, Outcome]]) -> None:
        """Answers a request, or parks it when nothing could be given yet."""
        outcome = self._handle(waiting, now_s)
        if not outcome.empty or waiting.deadline_s <= now_s:
            answers.append((waiting, outcome))
            return
        earlier = self._parked.pop(waiting.key, None)
        if earlier is not None and earlier.request.request_id != waiting.request.request_id:
            reply = pb.ExchangeReply.FromString(outcome.reply.SerializeToString())
            reply.request_id = earlier.request.request_id
            answers.append((earlier, Outcome(reply)))
        self._parked[waiting.key] = waiting

    def _handle(self, waiting: Waiting, now_s: float) -> Outcome:
        """One request by itself: a fault in one must not undo the others of the transaction."""
        self._exchange.db.execute("SAVEPOINT request")
        notices = len(self._exchange.notices)
        try:
            outcome = self._exchange.handle(waiting.request, waiting.frames, now_s)
        except sqlite3.Error:
            raise  # the ledger itself is in trouble: nothing may be acknowledged any more
        except Exception as error:
            log.exception("a %s request from %s failed", waiting.kind, waiting.request.member_id)
            self._exchange.db.execute("ROLLBACK TO request")
            del self._exchange.notices[notices:]
            outcome = self._exchange.refuse(waiting.request, f"the coordinator failed on it: {error!r}")
        self._exchange.db.execute("RELEASE request")
        return outcome

    async def _send(self, identity: bytes, outcome: Outcome) -> None:
        try:
            # DONTWAIT: a peer that is gone or does not read must not hold up the others; it will ask again.
            await self._socket.send_multipart(
                [identity, outcome.reply.SerializeToString(), *outcome.payloads], zmq.DONTWAIT
            )
        except zmq.ZMQError as error:
            log.warning("a reply to %s could not be sent: %s", identity.hex()[:16], error)
