"""Serves the exchange: a ZeroMQ ROUTER in front of its handlers.

Invariants. Nothing is sent without a request. Every answer leaves after the sync of the commit that it reports, and a
commit that refers to a group's bytes begins after the sync of these bytes. All requests that wait when a transaction
begins share it (group commit). Any bytes that arrive are answered or dropped, and the loops continue.

A message passes these steps; all but those on the event loop are threads (`PipelineThread`), so that a slow
step does not delay the others. The modules are in this folder, in `requests/` and in `uploads/` beside it:

  receive   event loop: reads the socket; stops while too many groups wait for the disk (transport/receiver.py)
  check     decodes and hashes groups, which leases do not wait for (requests/table.py:validate_upload), and compares their
            prompts (uploads/prompt_check.py)
  store     writes and syncs groups, several at once
  answer    event loop: one transaction after another; while leases are requested, every second one answers only them
            (transport/transactions.py)
  sync      syncs commits while the next transactions run; the answers are sent between two requests of those
  read      reads arrays of tasks and batches from the disk
  send      event loop
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import deque
from collections.abc import Awaitable, Callable

from paceline.calls.backoff import ExponentialBackoff
from paceline.errors import LedgerFault
from paceline.rate_limited_log import RateLimitedLog, unforeseen
from paceline.services.coordinator.exchange.notices import Notice
from paceline.services.coordinator.exchange.requests.table import validate_upload
from paceline.services.coordinator.exchange.state import Exchange
from paceline.services.coordinator.exchange.transport.pipeline_thread import PipelineThread
from paceline.services.coordinator.exchange.transport.receiver import (
    DEFAULT_LIMITS,
    Receiver,
    RequestFilter,
    ServerLimits,
)
from paceline.services.coordinator.exchange.transport.router_socket import ExchangeSocket, PendingRequest
from paceline.services.coordinator.exchange.transport.transactions import Committed, ToRead, Transactions
from paceline.services.coordinator.exchange.uploads.intake import store
from paceline.services.coordinator.exchange.uploads.prompt_check import PromptCheck
from paceline.services.coordinator.ledger.segments import DamagedRecord, UnopenedSegment, read_frame

MAX_SYNC_BYTES = 4 << 20
"""Bytes of groups stored at a time. A larger sync moves more bytes a second, but delays all that needs the disk."""

MAX_TRANSACTIONS = 1024
"""Largest number of transactions that share a sync; in practice all that wait share one."""

log = logging.getLogger(__name__)
seldom = RateLimitedLog(log)


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
        self._exchange, self._prompts, self._limits, self._act = exchange, prompts, limits, act
        self._socket = ExchangeSocket(host, port, self._knows_key if encrypted else None)
        self.public_key = self._socket.public_key
        self.port = self._socket.port
        self._synced: deque[Committed] = deque()
        """Synced transactions that are not answered yet."""
        self._notices: asyncio.Queue[list[Notice]] = asyncio.Queue()
        self._checks: PipelineThread[PendingRequest] = PipelineThread("check", self._check)
        self._syncs: PipelineThread[Committed] = PipelineThread(
            "sync", self._sync, lambda portion: self._send_synced(), portion_size=MAX_TRANSACTIONS
        )
        request_filter = RequestFilter(exchange, limits.unanswered)
        self.transactions = Transactions(exchange, lock, record, request_filter, self._syncs, self._send_synced)
        self._stores: PipelineThread[PendingRequest] = PipelineThread(
            "store",
            self._store,
            self.transactions.queue,
            size=lambda waiting: waiting.size,
            portion_size=MAX_SYNC_BYTES,
        )
        self.receiver = Receiver(exchange, self._socket, request_filter, self._checks, self.transactions.queue, limits)
        self._reads: PipelineThread[ToRead] = PipelineThread("read", _read, self._on_read)

    def wake(self, *kinds: str) -> None:
        self.transactions.wake(*kinds)

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
                    self._syncs.run,
                    self._reads.run,
                    self._act_on_notices,
                ):
                    tasks.create_task(step())
                tasks.create_task(self.transactions.run(self._limits.tick_s, self.receiver.check_connections))
        except ExceptionGroup as group:
            fault, _ = group.split(LedgerFault)
            if fault is not None:
                raise fault.exceptions[0] from None
            raise

    def close(self) -> None:
        self._socket.close()

    # Check and store

    def _check(self, portion: list[PendingRequest]) -> None:
        for waiting in portion:
            validate_upload(waiting)
            if self._prompts is not None:
                self._prompts.validate_upload(waiting)
            self._stores.put(waiting)

    def _store(self, portion: list[PendingRequest]) -> None:
        """Store groups; retry while no segment can be created (no file descriptor, no permission). Unstored groups are
        not acknowledged, and `ServerLimits.pending_bytes` bounds their size."""
        pause = ExponentialBackoff(*self._limits.store_again_s)
        while True:
            try:
                store(self._exchange.ledger.payloads, portion)
            except UnopenedSegment as fault:
                self.transactions.note_unopened(fault)
                if self._stores.ending.wait(pause.next_s()):
                    raise
            else:
                return

    # Sync and send

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

    # Read

    def _on_read(self, portion: list[ToRead]) -> None:
        for each in portion:
            if each.damaged:
                self.transactions.add_damaged(each)
            else:
                self._socket.send(each.waiting.identity, each.outcome.reply, each.frames)
        self.receiver.poll()


def _read(portion: list[ToRead]) -> None:
    for each in portion:
        for frame in each.outcome.payloads:
            try:
                each.frames.append(read_frame(frame))
            except DamagedRecord as damaged:
                each.damaged.append(damaged)
