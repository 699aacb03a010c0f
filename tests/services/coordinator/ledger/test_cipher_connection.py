"""A connection to an encrypted file behaves like one of the module `sqlite3`, errors included."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_files import KEY_TEXT

from paceline.encryption.storage_key import StorageKey
from paceline.services.coordinator.ledger import database

KEY = StorageKey(bytes.fromhex(KEY_TEXT))


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """A connection with named rows to a file with one table."""
    with contextlib.closing(database.connect(tmp_path / "file", KEY, named=True)) as db:
        db.executescript("CREATE TABLE words (id INTEGER PRIMARY KEY, text TEXT NOT NULL);")
        db.executemany("INSERT INTO words VALUES (?, ?)", [(1, "one"), (2, "two")])
        yield db


def test_rows_have_their_columns_by_name(db: sqlite3.Connection) -> None:
    row = db.execute("SELECT * FROM words WHERE id = ?", (2,)).fetchone()
    assert dict(row) == {"id": 2, "text": "two"}
    assert [tuple(row) for row in db.execute("SELECT * FROM words ORDER BY id")] == [(1, "one"), (2, "two")]
    assert len(db.execute("SELECT * FROM words").fetchmany(5)) == 2


def test_errors_are_those_of_sqlite3_with_their_codes(db: sqlite3.Connection) -> None:
    with pytest.raises(sqlite3.OperationalError, match="no such table: none") as missing:
        db.execute("SELECT * FROM none")
    assert missing.value.sqlite_errorcode == sqlite3.SQLITE_ERROR
    with pytest.raises(sqlite3.IntegrityError, match="UNIQUE") as twice:
        db.execute("INSERT INTO words VALUES (1, 'again')")
    assert twice.value.sqlite_errorcode & 0xFF == sqlite3.SQLITE_CONSTRAINT
    with pytest.raises(sqlite3.IntegrityError, match="NOT NULL"):
        db.executemany("INSERT INTO words (text) VALUES (?)", [(None,)])
    with pytest.raises(sqlite3.OperationalError, match="syntax error"):
        db.executescript("CREATE nothing")
    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        database.connect(Path("/nowhere/at/all"), KEY)


def test_errors_while_rows_are_read_are_those_of_sqlite3(db: sqlite3.Connection) -> None:
    text = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
    rows = db.execute(text)
    assert next(rows)[0] == 1
    db.set_progress_handler(lambda: 1, 1)
    with pytest.raises(sqlite3.OperationalError, match="interrupted"):
        next(rows)
    db.set_progress_handler(None, 1)
    rows = db.execute(text)
    db.set_progress_handler(lambda: 1, 1)
    with pytest.raises(sqlite3.OperationalError, match="interrupted"):
        rows.fetchone()
    db.set_progress_handler(None, 1)


def test_a_copy_by_sqlites_backup_has_the_key_of_its_target(db: sqlite3.Connection, tmp_path: Path) -> None:
    with contextlib.closing(database.connect(tmp_path / "copy", KEY)) as copy:
        db.backup(copy)
    assert b"words" not in (tmp_path / "copy").read_bytes()
    with contextlib.closing(database.connect(tmp_path / "copy", KEY, read_only=True)) as copy:
        assert copy.execute("SELECT text FROM words ORDER BY id").fetchall() == [("one",), ("two",)]
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            copy.execute("DELETE FROM words")


def test_the_library_writes_nothing_to_standard_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    with (
        contextlib.closing(database.connect(path, KEY)) as db,
        pytest.raises(sqlite3.DatabaseError, match="file is not a database") as damaged,
    ):
        db.execute("SELECT * FROM sqlite_master")
    assert damaged.value.sqlite_errorcode == sqlite3.SQLITE_NOTADB
    assert capfd.readouterr() == ("", "")
