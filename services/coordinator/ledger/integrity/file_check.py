"""Check of the ledger's SQLite file itself, whatever its rows mean: pages, tables, and the checksum of every row
(`services/coordinator/ledger/integrity/row_checksums.py`)."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from typing import Any, NamedTuple

from paceline.services.coordinator.ledger.integrity import row_checksums
from paceline.services.coordinator.ledger.integrity.report import REMEDY, UNREADABLE, VerifyReport
from paceline.services.coordinator.ledger.schema import SCHEMA


class DamagedRow(NamedTuple):
    """A row that does not match its checksum."""

    name: str
    """Name for messages: its table and its primary key."""
    values: dict[str, Any]


def check_file(db: sqlite3.Connection, report: VerifyReport) -> None:
    """Report every problem that SQLite finds, and every row that is not as it was written. Reads the whole file."""
    with tolerant(db):
        _check_file(db, report)


@contextlib.contextmanager
def tolerant(db: sqlite3.Connection) -> Iterator[None]:
    """Read text that is not UTF-8 any more as it is."""
    factory, db.text_factory = db.text_factory, _decoded
    try:
        yield
    finally:
        db.text_factory = factory


def _decoded(content: bytes) -> str:
    return content.decode(errors="surrogateescape")


def _check_file(db: sqlite3.Connection, report: VerifyReport) -> None:
    check_pages(db, report)
    with report.reading("the SQLite file", "its list of tables"):
        _compare_schema(db, report)
    sealed = 0
    for name in row_checksums.tables():
        with report.reading(f"table {name}"):
            if name not in row_checksums.SEALED:
                for _ in db.execute(f"SELECT * FROM {name} NOT INDEXED"):
                    pass  # every row is read; in a backup the table has the bulk of all groups
                continue
            for damaged in damaged_rows(db, name):
                report.problem(damaged.name, f"it does not give the checksum beside it; {REMEDY}")
            sealed += db.execute(f"SELECT COUNT(*) FROM {name} WHERE seal IS NOT NULL").fetchone()[0]
    report.facts["sealed_rows"] = sealed


def check_pages(db: sqlite3.Connection, report: VerifyReport) -> None:
    """Report every problem that SQLite's own check finds."""
    with report.reading("the SQLite file"):
        for (line,) in db.execute("PRAGMA integrity_check(20)").fetchall():
            if line != "ok":
                report.problem("the SQLite file", f"{line}; {REMEDY}")


def damaged_rows(db: sqlite3.Connection, name: str) -> Iterator[DamagedRow]:
    """Yield the rows of a table that do not match their checksum, or lack a checksum that they should have."""
    table = row_checksums.tables()[name]
    columns = (*table.columns, *sorted({*table.key} - {*table.columns}))
    needed = row_checksums.SEALED[name].format(row=name) or "TRUE"
    rows = db.execute(f"SELECT {', '.join(columns)}, seal, {needed} FROM {name}")
    for *cells, seal, is_needed in rows:
        if seal is None and not is_needed:
            continue
        if seal is not None and row_checksums.checksum(*cells[: len(table.columns)]) == seal:
            continue
        values = dict(zip(columns, cells, strict=True))
        key = ", ".join(f"{column} {values[column]!r}" for column in table.key)
        yield DamagedRow(f"table {name}, row {key}", values)


def _compare_schema(db: sqlite3.Connection, report: VerifyReport) -> None:
    """Report tables and indexes that differ from those of the format."""
    with contextlib.closing(sqlite3.connect(":memory:")) as new:
        new.executescript(SCHEMA)
        expected, found = _schema(new), _schema(db)
    for name in sorted(expected.keys() | found.keys(), key=str):
        if expected.get(name) != found.get(name):
            report.problem("the SQLite file", f"table or index {name} is not as its format says; {REMEDY}")


def _schema(db: sqlite3.Connection) -> dict[str, list[tuple[Any, ...]]]:
    """Return the columns of every table and index by name, sorted."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    query = (
        "SELECT type, name, sql FROM sqlite_master UNION ALL SELECT type, name, sql FROM sqlite_temp_master"
    )
    for kind, name, sql in db.execute(f"{query} WHERE type IN ('table', 'index')").fetchall():
        try:
            info = db.execute(f'PRAGMA {kind}_info("{name}")').fetchall()
            # Beside the columns: the text after the last bracket, WITHOUT ROWID or an index's condition.
            tail = " ".join(str(sql).rpartition(")")[2].split())
            found[name] = [*sorted(tuple(column)[1 if kind == "table" else 0 :] for column in info), (tail,)]
        except UNREADABLE:
            found[name] = []
    return found
