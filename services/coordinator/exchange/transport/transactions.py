"""Transactions of the exchange, one after another, each for all requests that wait when it begins.

A request that gets an empty answer is parked until something changes or its wait time ends; a worker has at most one
parked request of each kind, and a rank has at most one, so the members bound the number of parked requests.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from paceline.array_frames import Buffer
from paceline.services.coordinator.exchange.batches import selection
from paceline.services.coordinator.exchange.notices import Notice
from paceline.services.coordinator.exchange.replies import Outcome, ok
from paceline.services.coordinator.exchange.requests.batch import fix_and_check_served
from paceline.services.coordinator.exchange.requests.table import kind_of
from paceline.services.coordinator.exchange.state import Exchange
from paceline.services.coordinator.exchange.transport.dispatch import (
    handle,
    handle_alone,
    handle_leases,
    handled_together,
)
from paceline.services.coordinator.exchange.transport.pipeline_thread import PipelineThread
from paceline.services.coordinator.exchange.transport.receiver import RequestFilter
from paceline.services.coordinator.exchange.transport.router_socket import PendingRequest
from paceline.services.coordinator.ledger.segments import DamagedRecord, UnopenedSegment
from paceline.v1 import exchange_pb2 as pb

MAX_TRANSACTION_S = 0.006
"""Requests join a transaction for at most these seconds. A later request waits for the next transaction."""

LEASES_AT_ONCE = 16
"""Largest number of lease requests that are answered together; data that they share are read and written once."""

OTHERS_AT_ONCE = 16
"""Largest number of requests, other than lease requests, that share a savepoint: each savepoint costs a statement."""

PARKED_AT_ONCE = 64
"""Largest number of parked lease requests that a tick checks, those first that were not checked for the longest
time."""


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


class Transactions:
    """Runs the exchange's transactions. The control plane's transactions take the same `lock`. `record` writes notices
    in the transaction that made them. `send_synced` sends answers after the sync of their commit, also while another
    transaction runs."""

    def __init__(
        self,
        exchange: Exchange,
        lock: asyncio.Lock,
        record: Callable[[list[Notice]], None],
        request_filter: RequestFilter,
        syncs: PipelineThread[Committed],
        send_synced: Callable[[], None],
    ):
        self._exchange, self._lock, self._record = exchange, lock, record
        self._filter, self._syncs, self._send_synced = request_filter, syncs, send_synced
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
        self._unopened: UnopenedSegment | None = None
        """Unopened segment that storing waits for; a warning in the run's events names it."""

    def wake(self, *kinds: str) -> None:
        """Check the parked requests of these kinds again, because something outside the exchange changed."""
        self._wake.update(kinds)
        self._bell.set()

    def note_unopened(self, fault: UnopenedSegment) -> None:
        """Warn in the next transaction. Called by the thread that stores."""
        self._unopened = fault

    def add_damaged(self, unread: ToRead) -> None:
        self._damaged.append(unread)
        self._bell.set()

    def queue(self, portion: Sequence[PendingRequest]) -> None:
        for waiting in portion:
            if waiting.kind == "lease":
                self._leases.append(waiting)
            elif kind_of(waiting.kind).is_urgent:
                self._others.appendleft(waiting)
            else:
                self._others.append(waiting)
        self._bell.set()

    async def run(self, tick_s: float, at_tick: Callable[[], None]) -> None:
        """Run one transaction after another, while there are requests to answer; call `at_tick` every `tick_s`
        seconds."""
        ticked_s = time.monotonic()
        while True:
            if not (self._leases or self._others or self._damaged or self._wake):
                self._bell.clear()
                try:
                    async with asyncio.timeout(tick_s):
                        await self._bell.wait()
                except TimeoutError:
                    pass
            woken, self._wake = self._wake, set()
            kinds = set(woken)
            if time.monotonic() - ticked_s > tick_s:
                kinds |= {"task", "batch"}
                ticked_s, self._ticked = time.monotonic(), True
                at_tick()
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
                        kinds.update(kind_of(waiting.kind).wakes(waiting.request))
                        committed.bulk_bytes += waiting.size if waiting.has_bulk else 0
                if self._exchange.take_freed():
                    kinds.add("lease")
                if "batch" in kinds - woken and not fix_and_check_served(self._exchange, now_s):
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

    def _answer_leases(self, now_s: float) -> list[tuple[PendingRequest, Outcome]]:
        by_member: dict[str, PendingRequest] = {}
        while self._leases and len(by_member) < LEASES_AT_ONCE and self._leases[0].request.member_id not in by_member:
            waiting = self._leases.popleft()
            by_member[waiting.request.member_id] = waiting
        with handled_together(self._exchange) as outcomes:
            outcomes += handle_leases(self._exchange, list(by_member.values()))
        if not outcomes:
            outcomes = [handle_alone(self._exchange, waiting, now_s) for waiting in by_member.values()]
        return list(zip(by_member.values(), outcomes, strict=True))

    def _answer_others(self, now_s: float, end_s: float) -> list[tuple[PendingRequest, Outcome]]:
        """Answer some of the requests other than lease requests, until `end_s` at the latest."""
        handled: list[PendingRequest] = []
        with handled_together(self._exchange) as outcomes:
            while self._others and len(handled) < OTHERS_AT_ONCE and (not handled or time.monotonic() < end_s):
                handled.append(self._others.popleft())
                outcomes.append(handle(self._exchange, handled[-1], now_s))
                self._send_synced()
        if not outcomes:
            outcomes = [handle_alone(self._exchange, waiting, now_s) for waiting in handled]
        return list(zip(handled, outcomes, strict=True))

    def _finish_request(self, waiting: PendingRequest, outcome: Outcome, now_s: float, committed: Committed) -> None:
        self._filter.finished(waiting)
        committed.answers += self.parked.answer_or_park(waiting, outcome, now_s)

    def _answer_anew(self, unread: ToRead) -> None:
        run, waiting = self._exchange.active, unread.waiting
        if run is not None:
            selection.release_unsent(self._exchange, run, unread.outcome.reply, waiting.request.member_id)
            for damaged in unread.damaged:
                selection.handle_damaged(self._exchange, run, damaged)
        (self._leases if waiting.kind == "lease" else self._others).append(waiting)


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
        reply = ok(waiting.request)
        if waiting.kind == "batch":
            reply.batch.state, reply.batch.step = pb.BATCH_STATE_WAIT, waiting.request.batch.step
        else:
            getattr(reply, waiting.kind).SetInParent()
        return Outcome(reply)
