"""Serves the exchange: a ZeroMQ ROUTER in front of its handlers.

Invariants. Nothing is sent without a request. Every answer leaves after the sync of the commit that it reports, and a
commit that refers to a group's bytes begins after their sync. All requests that wait when a transaction begins share it
(group commit). A request that gets an empty answer is parked until something changes or its wait time ends; a worker
has at most one parked request of a kind (a rank: one), so the members bound the number of parked requests. Any bytes
that arrive are answered or dropped, and the loops continue.

A message passes these steps; all but those on the event loop are threads (`PipelineThread`), so that a slow
step does not delay the others. The modules are in this folder and in `services/coordinator/exchange/uploads/`:

  receive   event loop: reads the socket; stops while too many groups wait for the disk (transport/receiver.py)
  check     decodes and hashes groups, which leases do not wait for (uploads/intake.py), and compares their prompts (uploads/prompt_check.py)
  store     writes and syncs groups, several at once
  answer    event loop: one transaction after another; while leases are requested, every second one answers them alone
  sync      syncs commits while the next transactions run; synced requests are answered between two of theirs
  read      reads arrays of tasks and batches from the disk
  send      event loop
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

from paceline.array_frames import Buffer
from paceline.calls.backoff import ExponentialBackoff
from paceline.errors import LedgerFault
from paceline.rate_limited_log import RateLimitedLog, unforeseen
from paceline.services.coordinator.exchange.batches import delivery, selection
from paceline.services.coordinator.exchange.notices import Notice
from paceline.services.coordinator.exchange.replies import Outcome
from paceline.services.coordinator.exchange.state import Exchange
from paceline.services.coordinator.exchange.transport.dispatch import (
    handle,
    handle_alone,
    handle_leases,
    handled_together,
)
from paceline.services.coordinator.exchange.transport.pipeline_thread import PipelineThread
from paceline.services.coordinator.exchange.transport.receiver import DEFAULT_LIMITS, Receiver, ServerLimits
from paceline.services.coordinator.exchange.transport.router_socket import ExchangeSocket, PendingRequest
from paceline.services.coordinator.exchange.uploads.intake import store, validate_upload
from paceline.services.coordinator.exchange.uploads.prompt_check import PromptCheck
from paceline.services.coordinator.ledger.segments import DamagedRecord, UnopenedSegment, read_frame
from paceline.v1 import exchange_pb2 as pb

MAX_TRANSACTION_S = 0.006
"""Seconds in which requests can join a transaction. Requests that come later wait for the transaction's end."""

LEASES_AT_ONCE = 16
"""Largest number of lease requests that are answered together; data that they share are read and written once."""

OTHERS_AT_ONCE = 16
"""Largest number of requests, other than lease requests, that share a savepoint: each savepoint costs a statement."""

MAX_SYNC_BYTES = 4 << 20
"""Bytes of groups stored at a time. A larger sync moves more bytes a second, but delays all that needs the disk."""

MAX_TRANSACTIONS = 1024
"""Largest number of transactions that share a sync; in practice all that wait share one."""

PARKED_AT_ONCE = 64
"""Largest number of parked lease requests, of thousands, that a tick checks: those not checked for the longest time."""

WAKES = {"group": {"task"}, "score": {"batch"}, "receipt": {"batch", "lease"}, "lease_return": {"lease"}}
"""Kinds of parked requests whose answers an arriving request can change. The key is the arriving request's kind."""

log = logging.getLogger(__name__)
seldom = RateLimitedLog(log)


@dataclass
class Committed:
    answers: list[tuple[PendingRequest, Outcome]] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    bulk_bytes: int = 0
    """Size of the transaction's groups, in bytes."""


@dataclass
class ToRead:
    waiting: PendingRequest
    outcome: Outcome
    frames: list[Buffer] = field(default_factory=list)
    damaged: list[DamagedRecord] = field(default_factory=list)
    """Unreadable records of the answer; if there are any, the answer is not sent."""


class ExchangeServer:
    """The exchange's loops; `lock` separates the control plane's transactions from those of the exchange. `record`
    writes the notices in the same transaction; `act` handles them after its commit."""

    def __init__(
        self,
        exchange: Exchange,
        lock: asyncio.Lock,
        record: Callable[[list[Notice]], None],
        act: Callable[[list[Notice]], Awaitable[None]],
        host: str,
        port: int,
        prompts: PromptCheck | None = None,
        *,
        encrypted: bool = False,
        limits: ServerLimits = DEFAULT_LIMITS,
    ):
        """If `encrypted` is true, connections use CURVE, and only members can connect."""
        self._exchange, self._prompts, self._lock, self._limits = exchange, prompts, lock, limits
        self._record, self._act = record, act
        self._socket = ExchangeSocket(host, port, self._knows_key if encrypted else None)
        self.public_key = self._socket.public_key
        self.port = self._socket.port
        self.parked = ParkedRequests(exchange)
        self._wake: set[str] = set()
        self._leases: deque[PendingRequest] = deque()
        """Lease requests. They come first, because samplers without work wait for them."""
        self._others: deque[PendingRequest] = deque()
        """Other requests that can be answered, among them group results that are on the disk."""
        self._ticked = False
        """True if a tick has passed since parked requests were checked."""
        self._leases_were_alone = False
        """True if the last transaction answered lease requests only; then other requests come next."""
        self._damaged: deque[ToRead] = deque()
        """Answers that cannot be sent, because one of their records is unreadable."""
        self._bell = asyncio.Event()
        self._synced: deque[Committed] = deque()
        """Synced transactions that are not answered yet."""
        self._notices: asyncio.Queue[list[Notice]] = asyncio.Queue()
        self._unopened: UnopenedSegment | None = None
        """Unopened segment that storing waits for; a warning in the run's events names it."""
        self._stores: PipelineThread[PendingRequest] = PipelineThread(
            "store", self._store, self._queue, size=lambda waiting: waiting.size, portion_size=MAX_SYNC_BYTES
        )
        self._checks: PipelineThread[PendingRequest] = PipelineThread("check", self._check)
        self.receiver = Receiver(exchange, self._socket, self._checks, self._queue, limits)
        self._syncs: PipelineThread[Committed] = PipelineThread(
            "sync", self._sync, lambda portion: self._send_synced(), portion_size=MAX_TRANSACTIONS
        )
        self._reads: PipelineThread[ToRead] = PipelineThread("read", _read, self._on_read)

    def wake(self, *kinds: str) -> None:
        """Check the parked requests of these kinds again, because something outside the exchange changed."""
        self._wake.update(kinds)
        self._bell.set()

    def _knows_key(self, key: bytes) -> bool:
        """Return whether a connection's public key is a member's. Called by ZeroMQ's thread."""
        if not (is_member := self._exchange.senders.knows_key(key)):
            self._exchange.note_intruder("connection", "", "the connection's key is no member's", "")
        return is_member

    async def serve(self) -> None:
        """Answer until cancelled. Raises LedgerFault if the disk fails."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for step in (
                    self.receiver.run,
                    self._checks.run,
                    self._stores.run,
                    self._answer,
                    self._syncs.run,
                    self._reads.run,
                    self._act_on_notices,
                ):
                    tasks.create_task(step())
        except ExceptionGroup as group:
            fault, _ = group.split(LedgerFault)
            if fault is not None:
                raise fault.exceptions[0] from None
            raise

    def close(self) -> None:
        self._socket.close()

    def _queue(self, portion: Sequence[PendingRequest]) -> None:
        for waiting in portion:
            if waiting.kind == "lease":
                self._leases.append(waiting)
            elif waiting.kind in ("batch", "receipt"):
                self._others.appendleft(waiting)  # the learner waits for these
            else:
                self._others.append(waiting)
        self._bell.set()

    # Check and store

    def _check(self, portion: list[PendingRequest]) -> None:
        for waiting in portion:
            validate_upload(waiting.arrived)
            if self._prompts is not None:
                self._prompts.validate_upload(waiting.arrived)
            self._stores.put(waiting)

    def _store(self, portion: list[PendingRequest]) -> None:
        """Store groups; retry while no segment can be created (no file descriptor, no permission). Unstored groups are
        not acknowledged, and `ServerLimits.pending_bytes` bounds their size."""
        pause = ExponentialBackoff(*self._limits.store_again_s)
        while True:
            try:
                store(self._exchange.ledger.payloads, [waiting.arrived for waiting in portion])
            except UnopenedSegment as fault:
                self._unopened = fault
                if self._stores.ending.wait(pause.next_s()):
                    raise
            else:
                return

    # Answer

    async def _answer(self) -> None:
        """Run one transaction after another, while there are requests to answer."""
        tick_s = time.monotonic()
        while True:
            if not (self._leases or self._others or self._damaged or self._wake):
                self._bell.clear()
                try:
                    async with asyncio.timeout(self._limits.tick_s):
                        await self._bell.wait()
                except TimeoutError:
                    pass
            woken, self._wake = self._wake, set()
            kinds = set(woken)
            if time.monotonic() - tick_s > self._limits.tick_s:
                kinds |= {"task", "batch"}
                tick_s, self._ticked = time.monotonic(), True
                self.receiver.check_connections()
            if self._leases or self._others or self._damaged or ((kinds or self._ticked) and self.parked):
                await self._transact(kinds, woken)
                await asyncio.sleep(0)  # lets other tasks run

    async def _transact(self, kinds: set[str], woken: set[str]) -> None:
        """Run one transaction for the waiting requests; its answers wait for their sync. Parked requests of `kinds` are
        checked again; for the kinds in `woken`, something outside the exchange changed."""
        now_s, committed = time.monotonic(), Committed()
        self._leases_were_alone = alone = bool(self._leases) and not self._leases_were_alone
        async with self._lock:
            with self._exchange.ledger.transaction(synced=False):
                fault, self._unopened = self._unopened, None
                if fault is not None:
                    self._exchange.notices.warn_of_unopened(fault)
                while self._damaged:
                    self._answer_anew(self._damaged.popleft())
                    kinds |= {"lease", "batch"}
                end_s = time.monotonic() + MAX_TRANSACTION_S
                while self._leases and time.monotonic() < end_s:
                    for waiting, outcome in self._answer_leases(now_s):
                        self._finish_request(waiting, outcome, now_s, committed)
                    self._send_synced()  # they need not wait for the end of this transaction
                    if not alone:
                        break
                end_s = time.monotonic() + MAX_TRANSACTION_S
                while self._others and not alone and time.monotonic() < end_s:
                    for waiting, outcome in self._answer_others(now_s, end_s):
                        self._finish_request(waiting, outcome, now_s, committed)
                        kinds |= WAKES.get(waiting.kind, set())
                        if waiting.kind == "score" and waiting.request.score.handed_back:
                            kinds.add("task")
                        committed.bulk_bytes += waiting.size if waiting.arrived.has_bulk else 0
                if self._exchange.take_freed():
                    kinds.add("lease")
                if "batch" in kinds - woken and not delivery.fix_and_check_served(self._exchange, now_s):
                    kinds.discard("batch")
                at_tick, self._ticked = PARKED_AT_ONCE if self._ticked else 0, False
                max_leases = len(self.parked) if "lease" in kinds else at_tick
                for waiting in self.parked.take_due(kinds, max_leases, now_s):
                    if waiting.kind == "lease":
                        self._leases.append(waiting)
                    else:
                        self._finish_request(waiting, handle_alone(self._exchange, waiting, now_s), now_s, committed)
                committed.notices = self._exchange.notices.take()
                self._record(committed.notices)
        self._syncs.put(committed)

    def _sync(self, portion: list[Committed]) -> None:
        self._exchange.ledger.sync()
        self._synced.extend(portion)

    def _send_synced(self) -> None:
        if not self._synced:
            return
        while self._synced:
            committed = self._synced.popleft()
            for waiting, outcome in committed.answers:
                frames = outcome.in_memory()
                if frames is None:
                    self._reads.put(ToRead(waiting, outcome))
                else:
                    self._socket.send(waiting.identity, outcome.reply, frames)
            self.receiver.release(committed.bulk_bytes)
            if committed.notices:
                self._notices.put_nowait(committed.notices)
        self.receiver.poll()

    async def _act_on_notices(self) -> None:
        while True:
            notices = await self._notices.get()
            try:
                await self._act(notices)
            except (LedgerFault, sqlite3.Error):
                raise
            except Exception as error:  # the commit stays; the next notices are handled
                unforeseen.note("the handling of notices after a commit", error)

    def _answer_leases(self, now_s: float) -> list[tuple[PendingRequest, Outcome]]:
        by_member: dict[str, PendingRequest] = {}
        while self._leases and len(by_member) < LEASES_AT_ONCE and self._leases[0].request.member_id not in by_member:
            waiting = self._leases.popleft()
            by_member[waiting.request.member_id] = waiting
        with handled_together(self._exchange) as outcomes:
            outcomes += handle_leases(self._exchange, [waiting.arrived for waiting in by_member.values()])
        if not outcomes:
            outcomes = [handle_alone(self._exchange, waiting, now_s) for waiting in by_member.values()]
        return list(zip(by_member.values(), outcomes, strict=True))

    def _answer_others(self, now_s: float, end_s: float) -> list[tuple[PendingRequest, Outcome]]:
        """Answer some of the requests other than lease requests, until `end_s` at the latest."""
        handled: list[PendingRequest] = []
        with handled_together(self._exchange) as outcomes:
            while self._others and len(handled) < OTHERS_AT_ONCE and (not handled or time.monotonic() < end_s):
                handled.append(self._others.popleft())
                outcomes.append(handle(self._exchange, handled[-1].arrived, now_s))
                self._send_synced()
        if not outcomes:
            outcomes = [handle_alone(self._exchange, waiting, now_s) for waiting in handled]
        return list(zip(handled, outcomes, strict=True))

    def _finish_request(self, waiting: PendingRequest, outcome: Outcome, now_s: float, committed: Committed) -> None:
        self.receiver.filter.finished(waiting)
        committed.answers += self.parked.answer_or_park(waiting, outcome, now_s)

    # Read

    def _on_read(self, portion: list[ToRead]) -> None:
        for each in portion:
            if each.damaged:
                self._damaged.append(each)
                self._bell.set()
            else:
                self._socket.send(each.waiting.identity, each.outcome.reply, each.frames)
        self.receiver.poll()

    def _answer_anew(self, unread: ToRead) -> None:
        run, waiting = self._exchange.active, unread.waiting
        if run is not None:
            selection.release_unsent(self._exchange, run, unread.outcome.reply, waiting.request.member_id)
            for damaged in unread.damaged:
                selection.handle_damaged(self._exchange, run, damaged)
        (self._leases if waiting.kind == "lease" else self._others).append(waiting)


def _read(portion: list[ToRead]) -> None:
    for each in portion:
        for frame in each.outcome.payloads:
            try:
                each.frames.append(read_frame(frame))
            except DamagedRecord as damaged:
                each.damaged.append(damaged)


class ParkedRequests:
    """Holds at most one parked request of a kind for each member, and one for each rank of a learner."""

    def __init__(self, exchange: Exchange):
        self._exchange = exchange
        self._waiting: dict[tuple[str, str, int], PendingRequest] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def answer_or_park(
        self, waiting: PendingRequest, outcome: Outcome, now_s: float
    ) -> list[tuple[PendingRequest, Outcome]]:
        """Return the answers to send; park the request if its answer is empty. An earlier request of the same sender is
        answered empty, because new work goes to the later one."""
        answers = []
        earlier = self._waiting.pop(waiting.key, None)
        if earlier is not None and earlier.request.request_id != waiting.request.request_id:
            answers.append((earlier, self._nothing(earlier)))
        if not outcome.empty or waiting.deadline_s <= now_s:
            answers.append((waiting, outcome))
        else:
            self._waiting[waiting.key] = waiting
        return answers

    def take_due(self, kinds: Collection[str], max_leases: int, now_s: float) -> list[PendingRequest]:
        """Remove and return up to `max_leases` lease requests, other requests of `kinds`, and all expired ones."""
        due_requests = []
        for key, waiting in list(self._waiting.items()):
            due = max_leases > 0 if waiting.kind == "lease" else waiting.kind in kinds
            if due or waiting.deadline_s <= now_s:
                max_leases -= waiting.kind == "lease"
                del self._waiting[key]
                due_requests.append(waiting)
        return due_requests

    def _nothing(self, waiting: PendingRequest) -> Outcome:
        reply = self._exchange.replies.ok(waiting.request)
        if waiting.kind == "batch":
            reply.batch.state, reply.batch.step = pb.BATCH_STATE_WAIT, waiting.request.batch.step
        else:
            getattr(reply, waiting.kind).SetInParent()
        return Outcome(reply)
