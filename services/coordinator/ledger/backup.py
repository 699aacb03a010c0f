"""`paceline ledger backup`: copy the whole ledger into one file, while a coordinator may be writing to it.

In the copy the texts and arrays of groups and turns are in the SQLite file itself, so that one file is all there is to keep, move
and put back. A coordinator that is started on the copy goes on from there, also where newer files are beside it
(`services/coordinator/ledger/restored_backup.py`).
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from paceline.errors import LedgerFault, NotFound
from paceline.files.whole_file import written_whole
from paceline.services.coordinator.ledger import database, restored_backup
from paceline.services.coordinator.ledger.integrity.file_check import check_file
from paceline.services.coordinator.ledger.integrity.file_damage import sentence
from paceline.services.coordinator.ledger.integrity.report import VerifyReport
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.ledger.segments import PayloadStore

ATTEMPTS = 5
"""Copies that are tried, because pruning may remove a segment between the copy of the tables and that of the
segment."""


def back_up(ledger: Ledger, destination: Path) -> int:
    """Make a consistent copy of the ledger; return its size in bytes.

    The copy appears whole under its name or not at all. Raises NotFound when the destination's folder does not exist,
    LedgerFault when the ledger is damaged, because the copy would be damaged too.
    """
    if not destination.parent.is_dir():
        raise NotFound(f"no folder {destination.parent}; make it first")
    with written_whole(destination, durable=True) as partial:
        for attempt in range(1, ATTEMPTS + 1):
            partial.unlink(missing_ok=True)
            try:
                _copy(ledger, partial)
                break
            except sqlite3.DatabaseError as error:
                raise LedgerFault(sentence(ledger.path, error)) from error
            except LedgerFault:
                if attempt == ATTEMPTS:
                    raise
    return destination.stat().st_size


def _copy(ledger: Ledger, partial: Path) -> None:
    with contextlib.closing(database.connect(partial, ledger.key, named=True)) as copy:
        ledger.db.backup(copy)
        copy.execute("PRAGMA journal_mode = MEMORY")  # a power cut loses only the .partial file
        copy.execute("PRAGMA synchronous = OFF")
        take_in_payloads(copy, ledger.payloads)
        report = VerifyReport()
        check_file(copy, report)
        if report.found:
            raise LedgerFault(f"no copy was made: {sentence(ledger.path, report.problems[0])}")
        restored_backup.mark(copy)


def take_in_payloads(copy: sqlite3.Connection, store: PayloadStore) -> None:
    """Read the texts and arrays that a copy of the tables refers to into the copy itself. Raises LedgerFault."""
    copy.execute("BEGIN")
    for table in ("payloads", "episodes"):
        rows = copy.execute(f"SELECT rowid, * FROM {table} WHERE segment IS NOT NULL ORDER BY segment, start")
        for row in rows.fetchall():
            record = store.payload(row).read()
            copy.execute(
                f"UPDATE {table} SET header = ?, arrays = ?, segment = NULL WHERE rowid = ?",
                (*record, row["rowid"]),
            )
    copy.execute("COMMIT")
