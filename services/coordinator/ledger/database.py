"""Opens the SQLite files of ledgers and their copies: plain ones without a storage key, encrypted ones with it.

Promises: every connection to a ledger comes from here. With a key, no content reaches the disk in plain: pages,
write-ahead log and rollback journal are encrypted, and temporary tables stay in memory. `check_key` refuses a file of
another key, an encrypted file if no key is given, and a plain file if a key is given.

An encrypted file begins with 16 bytes that SQLCipher calls its salt: 8 bytes of magic, and the name of the key
(`paceline/encryption/storage_key.py`). So it shows which key it needs, wherever it is moved.

`paceline ledger backup` marks its copies in SQLite's header. The first coordinator that opens a marked file moves the
remains of an earlier ledger (its log, which SQLite would write into this file, and its segments, which this ledger
would treat as unused) into a folder `<ledger>.set-aside-N`, and removes the mark. Nothing is deleted.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from paceline.encryption.encrypted_file import REMEDY, WrongKey, wrong_key
from paceline.encryption.storage_key import FILE_VARIABLE, KEY_VARIABLE, NAME_BYTES, StorageKey
from paceline.errors import InvalidInput
from paceline.files.whole_file import sync_folder

MAGIC = b"PLCLEDG1"
PLAIN_MAGIC = b"SQLite format 3\0"
BUSY_S = 5.0
"""Default time, in seconds, that a statement waits for another connection's lock."""


class Queries:
    """Read methods over the connection `db`."""

    def __init__(self, db: sqlite3.Connection):
        self.db = db

    def rows(self, query: str, values: Sequence[object] = ()) -> list[sqlite3.Row]:
        return self.db.execute(query, values).fetchall()

    def row(self, query: str, values: Sequence[object] = ()) -> sqlite3.Row | None:
        """Return the first row of a query; None if there is none."""
        row: sqlite3.Row | None = self.db.execute(query, values).fetchone()
        return row

    def value(self, query: str, values: Sequence[object] = ()) -> Any:
        """Return the first column of the first row of a query; None without a row."""
        row = self.row(query, values)
        return None if row is None else row[0]


def connect(
    path: Path,
    key: StorageKey | None,
    *,
    read_only: bool = False,
    immutable: bool = False,
    any_thread: bool = False,
    named: bool = False,
    busy_s: float = BUSY_S,
) -> sqlite3.Connection:
    """Open the file at `path`, without the library's implicit transactions. `immutable` reads only this file, without
    the log beside it; `any_thread` is for a connection that threads use one after another; `named` rows have columns
    by name. Raises InvalidInput if the library for encrypted files is missing."""
    mode = "?mode=ro" if read_only or immutable else "?mode=rwc"
    target = f"file:{quote(str(path))}{mode}{'&immutable=1' if immutable else ''}"
    options: dict[str, Any] = {
        "uri": True,
        "isolation_level": None,
        "check_same_thread": not any_thread,
        "timeout": busy_s,
    }
    if key is None:
        db: sqlite3.Connection = sqlite3.connect(target, **options)
        if named:
            db.row_factory = sqlite3.Row
        return db
    try:
        from paceline.services.coordinator.ledger import cipher_connection
    except ImportError as error:
        raise InvalidInput(
            f"the ledger {path} cannot be opened with a storage key: {error}; pip install 'paceline[encryption]'"
        ) from None
    db = cipher_connection.connect(target, **options)
    # Before the key, because the library would also write its errors to standard error.
    db.execute("PRAGMA cipher_log_level = NONE")
    db.execute(f'PRAGMA key = "{key_text(key)}"')
    db.execute("PRAGMA temp_store = MEMORY")
    if named:
        db.row_factory = cipher_connection.Row
    return db


def key_text(key: StorageKey) -> str:
    """Return key and salt in the form that SQLCipher uses directly, without a slow derivation."""
    return f"x'{(key.derive('ledger') + MAGIC + key.name).hex()}'"


def check_key(path: Path, key: StorageKey | None, remedy: str = "") -> None:
    """Refuse a ledger that the given key does not open. Raises WrongKey, with `remedy` if the key does not come from
    the environment; a missing or empty file passes."""
    start = _start(path)
    encrypted_with = start[len(MAGIC) :] if start.startswith(MAGIC) else None
    name = f"the ledger {path}"
    if encrypted_with is not None and (key is None or key.name != encrypted_with):
        raise wrong_key(name, encrypted_with, key, remedy or REMEDY)
    if key is not None and start == PLAIN_MAGIC:
        remedy = remedy or (
            f"stop its coordinator and run `paceline ledger encrypt --directory {path.parent}`, or unset"
            f" {FILE_VARIABLE} and {KEY_VARIABLE}"
        )
        raise WrongKey(f"{name} is not encrypted, and the storage key {key.name.hex()} is given; {remedy}")


def is_encrypted_with(path: Path, key: StorageKey) -> bool:
    """Return whether the file is a ledger that is encrypted with this key."""
    return _start(path) == MAGIC + key.name


def is_plain(path: Path) -> bool:
    """Return whether the file is a SQLite file that is not encrypted."""
    return _start(path) == PLAIN_MAGIC


def application_id(path: Path, key: StorageKey) -> int:
    """Return the application_id in an encrypted file itself, regardless of its log; 0 if the file cannot be read. If
    its coordinator is writing the first page at the same time, the file is no marked backup, so 0 is right."""
    with contextlib.suppress(sqlite3.DatabaseError), contextlib.closing(connect(path, key, immutable=True)) as db:
        return int(db.execute("PRAGMA application_id").fetchone()[0])
    return 0


def _start(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(len(MAGIC) + NAME_BYTES)


MARK = 0x5043424B
"""SQLite's application_id of a backup: PCBK."""
APPLICATION_ID = 68
"""Offset, in bytes, of the application_id in SQLite's header. The id has four bytes, the most significant first."""
JOURNAL = 18
"""Offset, in bytes, of SQLite's write version. It is 2 for a file with a write-ahead log, and 1 without."""
NOT_ITS_OWN = ("-wal", "-shm", "-journal", "-segments")


def mark(copy: sqlite3.Connection) -> None:
    copy.execute(f"PRAGMA application_id = {MARK}")


def is_backup(ledger: Path, key: StorageKey | None = None) -> bool:
    """Return whether this is a backup that no coordinator has opened. Bypasses SQLite, which would open the log."""
    if not ledger.is_file():
        return False
    if key is not None:
        return application_id(ledger, key) == MARK
    # Copies by other programs have no mark. A coordinator's ledger always has a log, a copy never.
    return _is_marked(ledger) or (is_copy(ledger) and Path(f"{ledger}-wal").exists())


def is_copy(ledger: Path, key: StorageKey | None = None) -> bool:
    """Return whether this is a backup, or a copy by SQLite, that no coordinator has opened."""
    if key is not None:
        return is_backup(ledger, key)
    with ledger.open("rb") as file:
        return file.read(100)[JOURNAL : JOURNAL + 1] == b"\1" or _is_marked(ledger)


def _is_marked(ledger: Path) -> bool:
    with ledger.open("rb") as file:
        return file.read(100)[APPLICATION_ID : APPLICATION_ID + 4] == MARK.to_bytes(4, "big")


def set_aside(ledger: Path) -> Path | None:
    """Move the files of another ledger away; return their new folder, or None if there were none."""
    others = [other for suffix in NOT_ITS_OWN if (other := Path(f"{ledger}{suffix}")).exists()]
    if not others:
        return None
    folder = free_name(ledger.with_name(f"{ledger.name}.set-aside"))
    folder.mkdir()
    for other in others:
        other.rename(folder / other.name)
    sync_folder(ledger.parent)
    return folder


def remove_mark(db: sqlite3.Connection) -> None:
    """Remove a backup's mark before the first transaction, while there is no log: the file is never a backup again."""
    db.execute("PRAGMA application_id = 0")


def free_name(path: Path) -> Path:
    """Return `<path>-N` with the lowest free N."""
    number = 1
    while (free := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return free
