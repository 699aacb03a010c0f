"""The audit log of a coordinator: takes entries at any time, from any thread, and brings them to the disk and into the ledger.

A record is written at once, without a wait for the disk. Every SYNC_S a thread syncs what is new, and then the newest hash goes into
the ledger's table `audit_heads`, from where receipts carry it to the learner and into its checkpoints' manifests. So a power cut
loses the last SYNC_S at most, and the ledger never knows a record that is not on the disk. A log that cannot be written ends the
coordinator, as the ledger does: a change without a record is what the log is there to exclude.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from paceline.errors import LedgerFault
from paceline.files.names import AUDIT_NAME
from paceline.refusal_sums import RefusalSums
from protos.paceline.v1 import worker_pb2
from services.common.token_guard import Call
from services.coordinator.audit_log.calls import entries_of_report, entry_of_call, entry_of_request
from services.coordinator.audit_log.files import AuditFiles
from services.coordinator.audit_log.record import OK, Entry
from services.coordinator.audit_log.refusal_limits import FIRST_REPORTED, RefusalLimits
from services.coordinator.ledger.ledger import Ledger
from services.coordinator.ledger.tables.audit_heads import AuditHead

SYNC_S = 0.5
WHY_NO_EXCHANGE_HANDSHAKE = (
    "it did not speak as a member does, or repeated what another connection had sent, or the peer left"
)

log = logging.getLogger(__name__)


class AuditLog:
    """One log, beside the ledger of the coordinator that has it open."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.time):
        """`clock` returns seconds since 1970. Raises LedgerFault when the folder cannot be written."""
        self._ledger = ledger
        self.folder: Path = ledger.path.parent / AUDIT_NAME
        self._lock = threading.Lock()
        self._files = AuditFiles(self.folder, ledger.audit_heads.newest(), clock)
        self._limits, self._limits_of_reports = RefusalLimits(), RefusalLimits(FIRST_REPORTED)
        self._handshakes = RefusalSums()
        self._fault: LedgerFault | None = None
        self._unsynced: dict[int, AuditHead] = {}
        """Newest record of each file that is not in the ledger yet."""
        for found in self._files.repaired:
            log.warning("the audit log %s: %s", self.folder, found)
        self.record(Entry("audit/start", why="; ".join(self._files.repaired), subject=f"term {ledger.term}"))

    def record(self, entry: Entry) -> None:
        """Append an entry; of refusals, those within the limits."""
        with self._lock:
            self._append_due(now_s := time.monotonic())
            self._append_admitted(entry, now_s)
        if self._fault is not None:
            self._ledger.on_fault(self._fault)

    def note_call(self, call: Call) -> None:
        """Record a call that changed something, or was refused."""
        self.record(entry_of_call(call))

    def note_intruder(self, kind: str, member_id: str, why: str, address: str) -> None:
        """Record a request to the exchange that was refused because of its sender. Any thread."""
        self.record(entry_of_request(kind, member_id, why, address))

    def note_handshake(self, address: str, count: int = 1) -> None:
        """Record connections from an address (empty: unknown) that ended before a call, at growing intervals. Any thread."""
        self._handshakes.note_handshake(address, count)

    def note_exchange_handshake(self) -> None:
        """Record a connection to the exchange whose handshake failed, at growing intervals. Any thread."""
        self._handshakes.note(
            "exchange/handshake", grpc.StatusCode.UNAUTHENTICATED.name, "", WHY_NO_EXCHANGE_HANDSHAKE
        )

    def note_reported(self, member_id: str, reported: worker_pb2.Refusals) -> None:
        """Record refusals that a member of this coordinator reports of its own ports."""
        for entry in entries_of_report(member_id, reported):
            self.record(entry)

    def note_change(self, what: str, name: str) -> None:
        """Record a change of tokens or certificates, which a command made on this host."""
        self.record(Entry(what, subject=name))

    async def run(self, lock: asyncio.Lock) -> None:
        """Sync every SYNC_S, until cancelled. `lock` is that of the ledger's transactions. Raises LedgerFault."""
        while True:
            await asyncio.sleep(SYNC_S)
            with self._lock:
                self._append_due(time.monotonic())
            if self._fault is not None:
                raise self._fault
            heads = await asyncio.to_thread(self._sync)
            if heads:
                async with lock:
                    self._put(heads, synced=False)

    def close(self) -> None:
        """Record the end, bring everything to the disk and into the ledger, and close. Raises LedgerFault."""
        with self._lock:
            self._append_due(time.monotonic(), last=True)
            self._append_all([Entry("audit/stop")])
        if self._fault is None:
            self._put(self._sync(), synced=True)
        self._files.close()

    def _append_due(self, now_s: float, *, last: bool = False) -> None:
        """Append what was counted and whose time has come. Under the lock."""
        both = self._limits, self._limits_of_reports
        self._append_all([entry for limits in both for entry in limits.due(now_s)])
        while (refusals := self._handshakes.take(last=last)) is not None:
            for each in refusals.refusals:
                entry = Entry(each.what, each.result, address=each.address, why=each.why, count=each.count)
                self._append_admitted(entry, now_s)
        if last:
            self._append_all([entry for limits in both for entry in limits.due(now_s, last=True)])

    def _append_admitted(self, entry: Entry, now_s: float) -> None:
        """Append an entry; of refusals, those within the limits. Under the lock."""
        limits = self._limits_of_reports if entry.reported_by else self._limits
        if entry.result == OK or limits.admits(entry, now_s):
            self._append_all([entry])

    def _append_all(self, entries: list[Entry]) -> None:
        """Append under the lock; after a fault nothing more, because a record may be there in part."""
        for entry in entries:
            if self._fault is not None:
                return
            try:
                head = self._files.append(entry)
            except OSError as error:
                self._fault = self._fault_of(error)
                return
            self._unsynced[self._files.number] = head

    def _sync(self) -> dict[int, AuditHead]:
        """Sync, and return the newest record of each file that has new ones. Any thread. Raises LedgerFault."""
        with self._lock:
            heads, self._unsynced = self._unsynced, {}
            if not heads:
                return {}
            descriptor = self._files.duplicate()
        try:
            os.fdatasync(descriptor)
        except OSError as error:
            raise self._fault_of(error) from error
        finally:
            os.close(descriptor)
        return heads

    def _put(self, heads: dict[int, AuditHead], *, synced: bool) -> None:
        with self._ledger.transaction(synced=synced):
            for number, head in heads.items():
                self._ledger.audit_heads.put(number, head)

    def _fault_of(self, error: OSError) -> LedgerFault:
        return LedgerFault(
            f"the audit log {self.folder} cannot be written: {error}; make room, or repair the disk, then start the coordinator again"
        )
