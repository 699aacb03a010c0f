"""Verifies the audit log: its chain, the ledger's table `audit_heads`, and the manifests of checkpoints.

Promise: a changed, removed, added or moved record is named by its number. If the end was cut off, or if the files or
the ledger were replaced by older copies, the first missing record is named, provided that the ledger or a manifest
names a later record. An attacker who can rewrite log, ledger and every manifest together is not detected. To detect
such an attacker too, run `paceline audit verify` regularly and keep its newest hash on another machine. Verification
writes nothing and may run beside the coordinator.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.files.names import AUDIT_NAME, CHECKPOINT_MANIFEST
from paceline.files.storage import Folder
from paceline.services.coordinator.audit_log.records import (
    MAX_FILES,
    AuditRecord,
    audit_files,
    end_of,
    open_file,
    read_line,
)
from paceline.services.coordinator.ledger.database import is_copy
from paceline.services.coordinator.ledger.file_check import VerifyReport
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.ledger.tables.audit_heads import NONE, AuditHead

SUBJECT = "audit log"


def verify(ledger: Ledger, max_files: int = MAX_FILES) -> VerifyReport:
    """Verify the whole log beside a ledger. The ledger is open for reading. Any damage is a problem in the report."""
    report, folder = VerifyReport(), ledger.path.parent / AUDIT_NAME
    heads = ledger.audit_heads.all()  # before the files, which are never behind the ledger
    named = dict(_named_by_manifests(ledger, report))
    chain = _Chain(report, heads, named)
    files = audit_files(folder)
    _check_numbers(report, files, heads, max_files)
    for number, path in files.items():
        chain.follow(number, path)
    chain.finish()
    report.facts |= {
        "records": chain.head.sequence,
        "hash": chain.head.hash,
        "files": len(files),
        "manifests": len(named),
    }
    return report


def check_end(ledger: Ledger, report: VerifyReport) -> None:
    """For `paceline ledger verify`: check only that the log's end is not missing, and report the number of records."""
    newest = ledger.audit_heads.newest()
    files = list(audit_files(ledger.path.parent / AUDIT_NAME).values())
    end = NONE
    with report.reading(SUBJECT, "its last record"):
        end = next((end for path in reversed(files) if (end := end_of(path)[0]).sequence), NONE)
    if not files and is_copy(ledger.path, ledger.key):  # a copy of a ledger has no log beside it
        if newest.sequence:
            report.facts["audit_log"] = f"missing beside this copy, which has record {newest.sequence}"
        return
    if end.sequence < newest.sequence:
        report.problem(SUBJECT, f"the log ends with record {end.sequence}, but the ledger has record {newest.sequence}")
    if files:
        report.facts["audit_log"] = f"{end.sequence} records; `paceline audit verify` checks them"


def records(folder: Path, damaged: Callable[[str], None]) -> Iterator[AuditRecord]:
    """Yield the readable records, the oldest first; an incomplete last line is left out. `damaged` is called for each
    unreadable line, and for each file that cannot be a file of a log."""
    for path in audit_files(folder).values():
        try:
            with open_file(path) as file:
                lines = file.read().splitlines(keepends=True)
        except OSError as error:
            damaged(f"{path.name}: {error.strerror}")
            continue
        for line in lines:
            try:
                if line.endswith(b"\n"):
                    yield read_line(line[:-1])
            except ValueError as fault:
                damaged(f"{path.name}: {fault}")


class _Chain:
    """Checks the records file by file, and compares them with the records that the ledger and manifests name."""

    def __init__(self, report: VerifyReport, heads: dict[int, AuditHead], named: dict[str, AuditHead]):
        self._report, self._heads = report, heads
        self.head, self._is_first = NONE, True
        self._expected: dict[int, list[tuple[str, str]]] = {}
        """Expected hashes, each as (source, hash). The key is the number of the record."""
        for number, head in heads.items():
            self._expected.setdefault(head.sequence, []).append((f"the ledger, of file {number},", head.hash))
        for place, head in named.items():
            self._expected.setdefault(head.sequence, []).append((f"the manifest {place}", head.hash))

    def follow(self, number: int, path: Path) -> None:
        """Check the records of a file."""
        if self._is_first and number > 1:  # the oldest file that is kept
            self.head = self._heads.get(number - 1, NONE)
            self._expected = {each: hashes for each, hashes in self._expected.items() if each > self.head.sequence}
        self._is_first = False
        with self._report.reading(f"file {number}"), open_file(path) as file:
            for index, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    self._report.facts["unfinished_bytes"] = len(line)
                    continue
                try:
                    self._take(read_line(line[:-1]), path.name)
                except ValueError as fault:
                    expected = self.head.sequence + 1
                    self._report.problem(f"record {expected}", f"line {index} of {path.name} was changed: {fault}")
                    self.head = AuditHead(expected, "")

    def finish(self) -> None:
        for sequence, expected in self._expected.items():
            if sequence <= self.head.sequence:
                continue
            for who, _ in expected:
                self._report.problem(
                    f"record {self.head.sequence + 1}",
                    f"the log ends with record {self.head.sequence}, but {who} has record {sequence}: the log was cut off",
                )

    def _take(self, record: AuditRecord, name: str) -> None:
        expected, previous = self.head.sequence + 1, self.head.hash
        subject = f"record {record.sequence}"
        if record.sequence > expected:
            self._report.problem(
                f"record {expected}", f"records {expected} to {record.sequence - 1} are missing in {name}"
            )
        elif record.sequence < expected:
            self._report.problem(subject, f"the record is in {name} after record {expected - 1}")
        elif previous and record.previous != previous:
            self._report.problem(subject, f"the previous hash in {name} is not the hash of record {expected - 1}")
        for who, digest in self._expected.get(record.sequence, ()):
            self._report.compare(subject, f"the hash in {name} is {{}}, but {who} has {{}}", record.hash, digest)
        self.head = AuditHead(max(record.sequence, self.head.sequence), record.hash)


def _check_numbers(report: VerifyReport, files: dict[int, Path], heads: dict[int, AuditHead], max_files: int) -> None:
    """Check that no file is missing, except the oldest files, which are deleted when there are too many."""
    first = min(files, default=0) if len(files) >= max_files else 1
    before = first - 1
    for number in sorted(each for each in {*files, *heads} if each >= first):
        if number > before + 1:
            report.problem(f"file {before + 1}", f"the files {before + 1} to {number - 1} are missing")
        if number not in files:
            last = heads[number].sequence or "never recorded"
            report.problem(f"file {number}", f"the file is missing; its last record was {last}")
        before = number


def _named_by_manifests(ledger: Ledger, report: VerifyReport) -> Iterator[tuple[str, AuditHead]]:
    """Yield the records that checkpoints' manifests name: the manifests of registered checkpoints, and all manifests in
    the runs' folders, because an older ledger may lack some checkpoints."""
    folder = ledger.path.parent
    registered = {path for row in ledger.runs() for path in ledger.checkpoints.paths(row["run_id"])}
    found = {str(path.parent) for path in folder.glob(f"*/checkpoints/*/{CHECKPOINT_MANIFEST}")}
    for place in sorted(registered | found):
        checkpoint = Folder(place)
        try:
            if checkpoint.exists(CHECKPOINT_MANIFEST):
                manifest = json.loads(checkpoint.read(CHECKPOINT_MANIFEST))
                if head := _head_in(manifest.get("extra", {})):
                    yield place, head
        except Exception as error:  # an object store's client raised it; the other manifests are still read
            report.facts.setdefault("unread_manifests", {})[place] = f"{type(error).__name__}: {error}"


def _head_in(extra: Any) -> AuditHead | None:
    match extra:
        case {"audit": {"sequence": int(sequence), "hash": str(digest)}}:
            return AuditHead(sequence, digest)
    return None
