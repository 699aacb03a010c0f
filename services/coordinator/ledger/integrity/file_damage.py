"""Says that the ledger's SQLite file is damaged, where an error is only what follows from it."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import Conflict, InvalidInput, LedgerFault, PacelineError, WireError
from services.coordinator.ledger.integrity.file_check import check_file, damaged_rows, tolerant
from services.coordinator.ledger.integrity.report import REMEDY, UNREADABLE, VerifyReport

DAMAGE_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_damage(error: BaseException) -> bool:
    """Whether SQLite could not make sense of the file, or of a text in it."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return isinstance(error, sqlite3.Error) and (code in DAMAGE_CODES or "Could not decode" in str(error))


def damage_in(error: BaseException) -> BaseException | None:
    """The first error, of one or of a group, that says so."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for each in error.exceptions if (found := damage_in(each)) is not None), None)
    return error if is_damage(error) else None


def sentence(path: Path, detail: object) -> str:
    """What is damaged, and what helps."""
    text = str(detail).removesuffix(f"; {REMEDY}")
    return f"the ledger {path} is damaged: {text}; {REMEDY}"


def check_open_runs(db: sqlite3.Connection, path: Path) -> None:
    """Raises Conflict when the record of a run that is not over is not as it was written: its spec would be obeyed."""
    with tolerant(db):
        for damaged in damaged_rows(db, "runs"):
            if damaged.values["state"] not in ("succeeded", "failed", "cancelled"):
                column = f", column {damaged.change.column}" if damaged.change else ""
                raise Conflict(sentence(path, f"{damaged.name}{column} is not what was written"))


@contextlib.contextmanager
def explained(db: sqlite3.Connection, path: Path) -> Iterator[None]:
    """Where records cannot be read because the file is damaged, that is said. Raises LedgerFault."""
    try:
        yield
    except UNREADABLE as error:
        if isinstance(error, PacelineError) and not isinstance(error, InvalidInput | WireError):
            raise
        report = VerifyReport()
        check_file(db, report)
        if not report.found:
            raise
        raise LedgerFault(sentence(path, report.problems[0])) from error
