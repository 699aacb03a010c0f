"""A new SQLite file from the readable rows of a damaged one.

Rows are read along the table's key from both ends; rows between the two places where reading fails are read one by one,
because a damaged page hides the pages after it only from a scan in order. Checksums are copied as they are, so that a
row that is damaged itself is found afterwards.

In an encrypted file every page that was changed is lost as a whole, the first with the list of tables too, and a connection that has
met one reads nothing more: reading goes on with another connection.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.encryption.storage_key import StorageKey
from paceline.errors import LedgerFault
from services.coordinator.ledger import database
from services.coordinator.ledger.integrity import row_checksums
from services.coordinator.ledger.schema import SCHEMA, SCHEMA_VERSION

HEADER_BYTES = 100
LOGS = ("-wal", "-shm")
MAX_CUT_OFF = 1 << 40
"""Most bytes that a file can lack: if its header states more, the header is damaged."""

MAX_ASKED = 1_000_000
"""Rows of a table that are read one by one."""


def rescue(path: Path, key: StorageKey | None, say: Callable[[str], None]) -> None:
    """Replace the file at `path`, encrypted with `key`, by one with its readable rows. Raises LedgerFault when it shows no
    tables at all.
    """
    fresh = path.with_name(path.name + ".rescued")
    try:
        _make(fresh, key)
        if key is None:
            _make_readable(path, fresh, say)
        else:
            _make_whole(path, key, say)
        _copy(path, fresh, key, say)
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        for suffix in LOGS:
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        fresh.replace(path)
    finally:
        for suffix in ("", *LOGS):
            fresh.with_name(fresh.name + suffix).unlink(missing_ok=True)


def _make(fresh: Path, key: StorageKey | None) -> None:
    fresh.unlink(missing_ok=True)
    with contextlib.closing(database.connect(fresh, key)) as new:
        new.executescript(SCHEMA)
        new.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        new.execute("PRAGMA journal_mode = WAL")


def _make_whole(path: Path, key: StorageKey, say: Callable[[str], None]) -> None:
    """Extend an encrypted file that was cut off until SQLite opens it. How long it was is in its first page, which only
    SQLCipher reads.
    """
    size = extended = path.stat().st_size
    while not _has_tables(path, key):
        extended *= 2
        if not 0 < extended <= size + MAX_CUT_OFF:
            os.truncate(path, size)
            raise LedgerFault(
                f"the ledger {path} shows no tables any more and cannot be repaired; restore a backup"
            )
        os.truncate(path, extended)
    if extended != size:
        say("the SQLite file: its end was cut off")


def _make_readable(path: Path, fresh: Path, say: Callable[[str], None]) -> None:
    """Extend a file that was cut off, because SQLite finds pages of zeros damaged only when it reads them; write a
    header where there is none.
    """
    size = path.stat().st_size
    header = path.read_bytes()[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
    whole = _page_size(header) * int.from_bytes(header[28:32], "big")
    if size < whole <= size + MAX_CUT_OFF:
        with path.open("r+b") as file:
            file.truncate(whole)
        say(f"the SQLite file: {whole - size} of its {whole} bytes were cut off")
    if _has_tables(path, None):
        return
    if _write_schema(path, fresh):
        say("the SQLite file: its list of tables was put right")
        return
    new = bytearray(fresh.read_bytes()[:HEADER_BYTES])
    new[28:32] = (path.stat().st_size // _page_size(new)).to_bytes(4, "big")
    new[32:40] = bytes(8)  # the list of free pages, which are lost
    new[92:96] = new[24:28]
    _write_header(path, new)
    if not _has_tables(path, None):
        _write_header(path, header)
        raise LedgerFault(
            f"the ledger {path} shows no tables any more and cannot be repaired; restore a backup"
        )
    say("the SQLite file: its header was written anew")


def _write_schema(path: Path, fresh: Path) -> bool:
    """Correct an entry of the list of tables, the same in every ledger; return whether the tables can be read."""
    query = "SELECT rowid, type, name, tbl_name, sql FROM sqlite_master"
    with contextlib.closing(database.connect(fresh, None)) as new:
        expected = {row[2]: row[1:] for row in new.execute(query)}
    try:
        with contextlib.closing(database.connect(path, None)) as db:
            db.text_factory = lambda content: content.decode(errors="surrogateescape")
            db.execute("PRAGMA writable_schema = ON")
            found = {row[0]: row[1:] for row in db.execute(query)}
            missing = expected.keys() - {row[1] for row in found.values()}
            for rowid, row in found.items():
                right = expected.get(row[1]) or (expected[missing.pop()] if len(missing) == 1 else row)
                if row != right:
                    db.execute(
                        "UPDATE sqlite_master SET type = ?, name = ?, tbl_name = ?, sql = ? WHERE rowid = ?",
                        (*right, rowid),
                    )
    except sqlite3.Error:
        return False
    return _has_tables(path, None)


def _page_size(header: bytes | bytearray) -> int:
    return int.from_bytes(header[16:18], "big")


def _write_header(path: Path, header: bytes | bytearray) -> None:
    with path.open("r+b") as file:
        file.write(header)


class _Damaged:
    """The damaged file."""

    def __init__(self, path: Path, key: StorageKey | None):
        self._path, self._key = path, key
        self._db = self._connected()

    def rows(self, query: str, values: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query. Raises sqlite3.Error at the first that cannot be read."""
        try:
            yield from self._db.execute(query, values)
        except sqlite3.Error:
            if self._key is not None:
                self.close()
                self._db = self._connected()
            raise

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _connected(self) -> sqlite3.Connection:
        db = database.connect(self._path, self._key, read_only=True)
        db.text_factory = lambda content: content.decode(errors="surrogateescape")
        return db


def _copy(path: Path, fresh: Path, key: StorageKey | None, say: Callable[[str], None]) -> None:
    with (
        contextlib.closing(_Damaged(path, key)) as old,
        contextlib.closing(database.connect(fresh, key)) as new,
    ):
        new.execute("BEGIN")
        for name in row_checksums.tables():
            copied, incomplete = _copy_table(old, new, name)
            if incomplete:
                say(f"table {name}: {copied} rows could be read, others are lost")
        new.execute("COMMIT")


def _has_tables(path: Path, key: StorageKey | None) -> bool:
    try:
        with contextlib.closing(database.connect(path, key, read_only=True)) as db:
            return bool(db.execute("SELECT COUNT(*) FROM sqlite_master WHERE name = 'runs'").fetchone()[0])
    except sqlite3.Error:
        return False


def _copy_table(old: _Damaged, new: sqlite3.Connection, name: str) -> tuple[int, bool]:
    """Copy a table; return the number of copied rows, and whether some could not be read."""
    key = row_checksums.tables()[name].key
    try:
        columns = [column[1] for column in old.rows(f"PRAGMA table_info({name})")]
    except sqlite3.Error:
        return 0, True
    new_columns = [column[1] for column in new.execute(f"PRAGMA table_info({name})").fetchall()]
    columns = [column for column in columns if column in new_columns]
    if not columns:
        return 0, True
    insert = f"INSERT OR IGNORE INTO {name} ({', '.join(columns)}) VALUES ({', '.join('?' for _ in columns)})"
    copied, incomplete = 0, False

    def take(rows: Iterator[tuple[Any, ...]]) -> tuple[Any, ...] | None:
        """Copy rows until one cannot be read; return the last one's key."""
        nonlocal copied, incomplete
        last = None
        try:
            for row in rows:
                with contextlib.suppress(sqlite3.IntegrityError, UnicodeEncodeError):  # a row that cannot be
                    copied += new.execute(insert, [_storable(cell) for cell in row]).rowcount
                last = tuple(row[columns.index(column)] for column in key)
        except sqlite3.Error:
            incomplete = True
        return last

    select = f"SELECT {', '.join(columns)} FROM {name} NOT INDEXED"
    first = take(old.rows(f"{select} ORDER BY {', '.join(key)}"))
    if incomplete:
        take(old.rows(select))  # without ORDER BY, a table is read in the order of its pages
        last = take(old.rows(f"{select} ORDER BY {', '.join(f'{column} DESC' for column in key)}"))
        if first and last and len(key) == 2 and first[0] == last[0] and isinstance(first[1], int):
            for number in range(first[1] + 1, min(int(last[1]), first[1] + MAX_ASKED)):
                take(old.rows(f"{select} WHERE {key[0]} = ? AND {key[1]} = ?", (first[0], number)))
    return copied, incomplete


def _storable(cell: object) -> object:
    """Return the value to store. Text that is not UTF-8 any more is kept as its bytes: its checksum shows the damage
    either way.
    """
    if isinstance(cell, str):
        try:
            cell.encode()
        except UnicodeEncodeError:
            return cell.encode(errors="surrogateescape")
    return cell
