"""Writes the audit log of a coordinator to the disk, and the hash of the newest record into the ledger.

Any thread may add a record, which is written at once, without waiting for the disk. Every SYNC_S seconds a thread syncs
the new records; then the newest hash goes into the ledger's table `audit_heads`, and receipts carry it to the learner
and into its checkpoints' manifests. So a power cut loses the last SYNC_S seconds at most, and the ledger never has the
hash of a record that is not on the disk. A log that cannot be written ends the coordinator, because no change may be
unrecorded. `RefusalLimits` bounds the records of refused calls, which could fill the disk and push out older records.

Entries name the caller, the call and its subject, never the content. The reason of a refusal is kept if the guard gave
it, or if a worker's Hello was refused; other refusals may quote the request, so the log has only their status.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from paceline.calls.connection import FORM
from paceline.errors import LedgerFault
from paceline.files.names import AUDIT_NAME
from paceline.services.common.access.tls import address_of
from paceline.services.common.access.token_guard import OF_GUARD, Call
from paceline.services.coordinator.audit_log.records import OK, AuditFiles, Entry
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.ledger.tables.audit_heads import AuditHead

SYNC_S = 0.5
WINDOW_S = 60.0
FIRST = 10
"""Largest number of records of one source's refusals in a window."""
MOST = 60
"""Largest number of records of all sources' refusals in a window."""
MAX_SOURCES = 32
OTHERS = "others"
"""Name under which the refusals of all sources beyond the first MAX_SOURCES are counted together."""

log = logging.getLogger(__name__)


@dataclass
class _Counted:
    recorded: int = 0
    left_out: int = 0
    newest: Entry | None = None


class RefusalLimits:
    """Decides which refusals are recorded one by one: in a window, at most FIRST of one source (a caller's name, else
    the peer's host) and MOST of all sources. Further refusals are only counted, in one record for each source; the
    sources beyond MAX_SOURCES share one record. A pure state machine."""

    def __init__(self) -> None:
        self._sources: dict[str, _Counted] = {}
        self._recorded = 0
        self._end_s = 0.0

    def admits(self, entry: Entry, now_s: float) -> bool:
        """Return whether a refusal gets its own record; if not, count it. Call `due` first."""
        name = entry.who or _host_of(entry.address)
        if name not in self._sources and len(self._sources) >= MAX_SOURCES:
            name = OTHERS
        counted = self._sources.setdefault(name, _Counted())
        if not self._end_s:
            self._end_s = now_s + WINDOW_S
        if counted.recorded < FIRST and self._recorded < MOST:
            counted.recorded += 1
            self._recorded += 1
            return True
        counted.left_out += entry.count
        counted.newest = entry
        return False

    def due(self, now_s: float, *, last: bool = False) -> list[Entry]:
        """If the window has ended (`last` ends it now), begin a new one and return records for the counted refusals."""
        if not self._end_s or (now_s < self._end_s and not last):
            return []
        found = [
            replace(
                counted.newest,
                count=counted.left_out,
                why=f"{counted.left_out} more calls of {name or 'an unknown peer'} were refused; the newest refusal: "
                f"{counted.newest.why}",
            )
            for name, counted in self._sources.items()
            if counted.newest is not None
        ]
        self._sources, self._recorded, self._end_s = {}, 0, 0.0
        return found


class AuditLog:
    """The audit log of one coordinator, in a folder beside its ledger."""

    def __init__(self, ledger: Ledger):
        """Raises LedgerFault if the folder cannot be written."""
        self._ledger = ledger
        self.folder: Path = ledger.path.parent / AUDIT_NAME
        self._lock = threading.Lock()
        self._files = AuditFiles(self.folder, ledger.audit_heads.newest(), time.time)
        self._limits = RefusalLimits()
        self._fault: LedgerFault | None = None
        self._unsynced: dict[int, AuditHead] = {}
        """Newest record of each file, if the ledger does not have that record yet. The key is the file's number."""
        for found in self._files.repaired:
            log.warning("the audit log %s: %s", self.folder, found)
        self.record(Entry("audit/start", why="; ".join(self._files.repaired), subject=f"term {ledger.term}"))

    def record(self, entry: Entry) -> None:
        """Append an entry. A refusal is appended only within the limits."""
        with self._lock:
            self._append_all(self._limits.due(now_s := time.monotonic()))
            if entry.result == OK or self._limits.admits(entry, now_s):
                self._append_all([entry])
        if self._fault is not None:
            self._ledger.on_fault(self._fault)

    def note_call(self, call: Call) -> None:
        self.record(entry_of_call(call))

    def note_intruder(self, kind: str, member_id: str, why: str, address: str) -> None:
        """Record a request to the exchange that was refused because of its sender. May be called from any thread."""
        self.record(entry_of_request(kind, member_id, why, address))

    def note_change(self, what: str, name: str) -> None:
        """Record a change of tokens or certificates by a command on this host."""
        self.record(Entry(what, subject=name))

    async def run(self, lock: asyncio.Lock) -> None:
        """Sync every SYNC_S seconds until cancelled. `lock` serialises the transactions. Raises LedgerFault."""
        while True:
            await asyncio.sleep(SYNC_S)
            with self._lock:
                self._append_all(self._limits.due(time.monotonic()))
            if self._fault is not None:
                raise self._fault
            heads = await asyncio.to_thread(self._sync)
            if heads:
                async with lock:
                    self._put(heads, synced=False)

    def close(self) -> None:
        """Record the end, write everything to the disk and into the ledger, and close. Raises LedgerFault."""
        with self._lock:
            self._append_all([*self._limits.due(time.monotonic(), last=True), Entry("audit/stop")])
        if self._fault is None:
            self._put(self._sync(), synced=True)
        self._files.close()

    def _append_all(self, entries: list[Entry]) -> None:
        """Append entries under the lock. After a fault append nothing, because the last record may be incomplete."""
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
        """Sync the files; return the newest record of each file that has new ones. Any thread may call. Raises
        LedgerFault."""
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


def _host_of(address: str) -> str:
    found = FORM.fullmatch(address)
    return found[1] if found else address


CONNECT = "paceline.v1.WorkerService/Connect"
SUBJECTS = ("member_id", "run_id", "name", "sha256")
"""Fields of requests that name the subject of a call."""


def entry_of_call(call: Call) -> Entry:
    message = getattr(call.request, "hello", call.request)  # the first message of a worker's stream
    keeps_reason = call.code in OF_GUARD or call.method == CONNECT
    return Entry(
        call.method,
        call.code.name,
        call.caller.name if call.caller else "",
        tuple(sorted(call.caller.roles)) if call.caller else (),
        call.certificate,
        address_of(call.peer),
        _subject(message) or _subject(getattr(call.answer, "run", None)),
        call.details if keeps_reason else "",
        _digest(call.request),
    )


def entry_of_request(kind: str, member_id: str, why: str, address: str) -> Entry:
    """Return the entry of a request to the exchange that was refused because of its sender."""
    return Entry(
        f"exchange/{kind or 'connection'}",
        grpc.StatusCode.PERMISSION_DENIED.name,
        address=address,
        subject=member_id,
        why=why,
    )


def _subject(message: Any) -> str:
    for name in SUBJECTS:
        value = getattr(message, name, "")
        if value and isinstance(value, str):
            return value
    return ""


def _digest(request: Any) -> str:
    if request is None or not hasattr(request, "SerializeToString"):
        return ""
    return hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest()
