"""Reports the ledger's SQLite file as damaged where an error is only a consequence of that."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import Conflict, InvalidInput, LedgerFault, PacelineError, WireError
from paceline.services.coordinator.ledger.integrity.file_check import check_file, damaged_rows, tolerant
from paceline.services.coordinator.ledger.integrity.report import REMEDY, UNREADABLE, VerifyReport

DAMAGE_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_damage(error: BaseException) -> bool:
    """Return whether SQLite could not read the file, or a text in it."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return isinstance(error, sqlite3.Error) and (code in DAMAGE_CODES or "Could not decode" in str(error))


def damage_in(error: BaseException) -> BaseException | None:
    """Return the first error, of this one or of its group, that is due to damage."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for each in error.exceptions if (found := damage_in(each)) is not None), None)
    return error if is_damage(error) else None


def sentence(path: Path, detail: object) -> str:
    """Return the message: the damage, and the remedy."""
    text = str(detail).removesuffix(f"; {REMEDY}")
    return f"the ledger {path} is damaged: {text}; {REMEDY}"


def check_open_runs(db: sqlite3.Connection, path: Path) -> None:
    """Raises Conflict when the row of a run that is not over is not as it was written, because its spec would be
    obeyed.
    """
    with tolerant(db):
        for damaged in damaged_rows(db, "runs"):
            if damaged.values["state"] not in ("succeeded", "failed", "cancelled"):
                raise Conflict(sentence(path, f"{damaged.name} is not what was written"))


@contextlib.contextmanager
def explained(db: sqlite3.Connection, path: Path) -> Iterator[None]:
    """Replace an error in the body that damage explains by a LedgerFault that reports the damage."""
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
