"""Checks the ledger's SQLite file: pages, tables, and the checksum of every row
(`services/coordinator/ledger/row_checksums.py`). Also defines the report of `paceline ledger verify`, which continues
after unreadable records, and replaces errors that damage has caused by errors that name the damage."""

from __future__ import annotations

import contextlib
import functools
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import Conflict, InvalidInput, LedgerFault, PacelineError, WireError
from paceline.services.coordinator.ledger import row_checksums
from paceline.services.coordinator.ledger.schema import SCHEMA

UNREADABLE = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError),
    *(OSError, PacelineError, sqlite3.Error),
)

REMEDY = "restore a backup, or what `sqlite3 .recover` can read (docs/operate/operations.md)"

EXPLAIN_S = 30.0
"""Longest time in which the damage behind an error is searched; `paceline ledger verify` reads the whole file."""
PROGRESS = 100_000
"""SQLite's instructions between two readings of the clock."""

MAX_TEXT = 500
"""Largest number of characters of a problem, because a damaged record can have any length."""


@dataclass(frozen=True)
class Problem:
    subject: str
    """Record, group, step or file with the problem."""
    text: str

    def __str__(self) -> str:
        printable = f"{self.subject}: {self.text}".encode(errors="backslashreplace").decode()
        line = " ".join(printable.split())
        return line if len(line) <= MAX_TEXT else line[:MAX_TEXT] + "…"


@dataclass
class VerifyReport:
    """Problems that `verify` found. If there are none, the promise holds as far as records can show it."""

    found: list[Problem] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts that were compared. The key is the fact's name."""

    @property
    def problems(self) -> list[str]:
        """One line for each problem."""
        return [str(problem) for problem in self.found]

    def compare(self, subject: str, text: str, one: object, other: object) -> None:
        """Add a problem unless both values are equal; `text` has two placeholders for them."""
        if one != other:
            self.problem(subject, text.format(one, other))

    def problem(self, subject: str, text: str) -> None:
        self.found.append(Problem(subject, text))

    @contextlib.contextmanager
    def reading(self, subject: str, what: str = "it") -> Iterator[None]:
        """Add a problem if the body cannot read its records."""
        try:
            yield
        except UNREADABLE as error:
            remedy = f"; {REMEDY}" if isinstance(error, sqlite3.Error) else ""
            self.problem(subject, f"{what} cannot be read: {type(error).__name__}: {error}{remedy}")


class DamagedRow(NamedTuple):
    """A row that does not match its checksum."""

    name: str
    """Table and primary key, for messages."""
    values: dict[str, Any]


def check_file(db: sqlite3.Connection, report: VerifyReport) -> None:
    """Report every problem that SQLite finds, and every row that does not match its checksum. Reads the whole file."""
    with tolerant(db):
        with report.reading("the SQLite file"):
            for (line,) in db.execute("PRAGMA integrity_check(20)").fetchall():
                if line != "ok":
                    report.problem("the SQLite file", f"{line}; {REMEDY}")
        with report.reading("the SQLite file", "its list of tables"):
            _compare_schema(db, report)
        report.facts["sealed_rows"] = sum(_check_rows(db, report, name) for name in row_checksums.tables())


def _check_rows(db: sqlite3.Connection, report: VerifyReport, name: str) -> int:
    """Report the rows of a table that do not match their checksums; return the number of rows with a checksum."""
    with report.reading(f"table {name}"):
        if name not in row_checksums.SEALED:
            for _ in db.execute(f"SELECT * FROM {name} NOT INDEXED"):
                pass  # reads every row; in a backup the table has the texts and arrays of all groups
            return 0
        for damaged in damaged_rows(db, name):
            report.problem(damaged.name, f"the row does not match its checksum; {REMEDY}")
        return int(db.execute(f"SELECT COUNT(*) FROM {name} WHERE seal IS NOT NULL").fetchone()[0])
    return 0


@contextlib.contextmanager
def tolerant(db: sqlite3.Connection) -> Iterator[None]:
    """Decode text that is no longer UTF-8 with surrogate escapes."""
    factory, db.text_factory = db.text_factory, _decoded
    try:
        yield
    finally:
        db.text_factory = factory


def _decoded(content: bytes) -> str:
    return content.decode(errors="surrogateescape")


def damaged_rows(db: sqlite3.Connection, name: str) -> Iterator[DamagedRow]:
    """Yield the rows of a table that do not match their checksum, or lack one that they should have."""
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
    expected, actual = _schema_of_format(), _schema(db)
    for name in sorted(expected.keys() | actual.keys(), key=str):
        if expected.get(name) != actual.get(name):
            report.problem("the SQLite file", f"table or index {name} differs from the format; {REMEDY}")


@functools.cache
def _schema_of_format() -> dict[str, list[tuple[Any, ...]]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as new:
        new.executescript(SCHEMA)
        return _schema(new)


def _schema(db: sqlite3.Connection) -> dict[str, list[tuple[Any, ...]]]:
    """Return the columns of every table and index, sorted. The key is the name of the table or index."""
    schema: dict[str, list[tuple[Any, ...]]] = {}
    query = "SELECT type, name, sql FROM sqlite_master UNION ALL SELECT type, name, sql FROM sqlite_temp_master"
    for kind, name, sql in db.execute(f"{query} WHERE type IN ('table', 'index')").fetchall():
        try:
            info = db.execute(f'PRAGMA {kind}_info("{name}")').fetchall()
            # Besides columns: the text after the last bracket, WITHOUT ROWID or an index's condition.
            tail = " ".join(str(sql).rpartition(")")[2].split())
            schema[name] = [*sorted(tuple(column)[1 if kind == "table" else 0 :] for column in info), (tail,)]
        except UNREADABLE:
            schema[name] = []
    return schema


DAMAGE_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def is_damage(error: BaseException) -> bool:
    """Return whether SQLite could not read the file or a text in it."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return isinstance(error, sqlite3.Error) and (code in DAMAGE_CODES or "Could not decode" in str(error))


def damage_in(error: BaseException) -> BaseException | None:
    """Return the first error that is due to damage: `error` itself or one in its group."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for each in error.exceptions if (found := damage_in(each)) is not None), None)
    return error if is_damage(error) else None


def sentence(path: Path, detail: object) -> str:
    text = str(detail).removesuffix(f"; {REMEDY}")
    return f"the ledger {path} is damaged: {text}; {REMEDY}"


def check_open_runs(db: sqlite3.Connection, path: Path) -> None:
    """Raise Conflict if the row of an unfinished run is damaged, because the coordinator would follow its spec."""
    with tolerant(db):
        for damaged in damaged_rows(db, "runs"):
            if damaged.values["state"] not in ("succeeded", "failed", "cancelled"):
                raise Conflict(sentence(path, f"{damaged.name} does not match its checksum"))


@contextlib.contextmanager
def explained(db: sqlite3.Connection, path: Path) -> Iterator[None]:
    """Replace an error in the body by a LedgerFault with the damage, if damage is found within EXPLAIN_S."""
    try:
        yield
    except UNREADABLE as error:
        if isinstance(error, PacelineError) and not isinstance(error, InvalidInput | WireError):
            raise
        report, deadline_s = VerifyReport(), time.monotonic() + EXPLAIN_S
        db.set_progress_handler(lambda: time.monotonic() > deadline_s, PROGRESS)
        try:
            check_file(db, report)
        finally:
            db.set_progress_handler(None, 0)
        problems = [problem for problem in report.problems if "interrupted" not in problem]
        if not problems:
            raise
        raise LedgerFault(sentence(path, problems[0])) from error


LOST = "the run's row with the spec is lost, so no command finds the run; only a backup has the row"
TABLES = ("groups", "batches", "events")


def lost_runs(db: sqlite3.Connection) -> list[str]:
    """Return the ids of runs with groups, batches or events but no row."""
    others = " UNION ".join(f"SELECT run_id FROM {table}" for table in TABLES)
    rows = db.execute(f"SELECT run_id FROM ({others}) EXCEPT SELECT run_id FROM runs ORDER BY run_id")
    return [row[0] for row in rows.fetchall()]
