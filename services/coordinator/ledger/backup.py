"""Copies a ledger: `paceline ledger backup` and `paceline ledger encrypt`.

`backup` copies the whole ledger into one file, while a coordinator may be writing to it. The texts and arrays of groups
and turns are in the copy's SQLite file, so there is one file to keep, move and restore. A coordinator that is started on
the copy continues from there, also if newer files are beside it (`services/coordinator/ledger/database.py`).

`encrypt` copies a stopped coordinator's ledger into an encrypted file, which replaces the old one once it is complete,
checked and on the disk: at any moment the directory has the whole ledger, in one form or the other. As in a backup, texts
and arrays are in the new file itself, so the old segments are removed; new ones are encrypted.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

from paceline.encryption.storage_key import StorageKey
from paceline.errors import Conflict, LedgerFault, NotFound
from paceline.files.whole_file import written_whole
from paceline.services.coordinator.ledger import database
from paceline.services.coordinator.ledger.connection import lock_ledger
from paceline.services.coordinator.ledger.file_check import VerifyReport, check_file, sentence
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.ledger.segment_cipher import MAGIC
from paceline.services.coordinator.ledger.segments import PayloadStore

ATTEMPTS = 5
"""Number of attempts at a copy, because pruning may remove a segment after the tables were copied."""


def back_up(ledger: Ledger, destination: Path) -> int:
    """Make a consistent copy of the ledger; return its size in bytes. The copy appears whole under its name or not at
    all. Raises NotFound if the destination's folder does not exist, LedgerFault if the ledger is damaged."""
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
        _complete(copy, ledger.payloads, ledger.path, "no copy was made")
        database.mark(copy)


def _write_unsafely(copy: sqlite3.Connection) -> None:
    """Write without syncs: a power cut loses only the .partial file."""
    copy.execute("PRAGMA journal_mode = MEMORY")
    copy.execute("PRAGMA synchronous = OFF")


def _complete(copy: sqlite3.Connection, store: PayloadStore, path: Path, refusal: str) -> None:
    """Copy the texts and arrays of the ledger at `path` into a copy of its tables, and check it. Raises LedgerFault."""
    _write_unsafely(copy)
    copy_payloads(copy, store)
    report = VerifyReport()
    check_file(copy, report)
    if report.found:
        raise LedgerFault(f"{refusal}: {sentence(path, report.problems[0])}")


def copy_payloads(copy: sqlite3.Connection, store: PayloadStore) -> None:
    """Copy the texts and arrays that a copy of the tables refers to into that copy. Raises LedgerFault."""
    copy.execute("BEGIN")
    for table in ("payloads", "episodes"):
        rows = copy.execute(f"SELECT rowid, * FROM {table} WHERE segment IS NOT NULL ORDER BY segment, start")
        for row in rows.fetchall():
            record = store.payload(row).read()
            copy.execute(
                f"UPDATE {table} SET header = ?, arrays = ?, segment = NULL WHERE rowid = ?", (*record, row["rowid"])
            )
    copy.execute("COMMIT")


PRAGMAS = ("user_version", "application_id")
"""Pragmas of the numbers in SQLite's header that belong to the ledger."""
OLD_KEY_REMEDY = (
    "name the file with the ledger's current key by --old-key-file, or leave the option out for a plain ledger"
)
READERS_S = 1.0
"""Seconds for which the command waits until no other process reads the ledger, so that the log can be emptied."""


def encrypt_ledger(path: Path, old: StorageKey | None, new: StorageKey, say: Callable[[str], None]) -> None:
    """Encrypt the ledger at `path` with `new`; `old` is its current key, None for a plain one. `say` is called with a
    line about each action, and about each file beside the ledger that is still plain. Raises NotFound, WrongKey,
    Conflict if a coordinator or another reader has the ledger open, LedgerFault if it is damaged."""
    if not path.is_file():
        raise NotFound(f"no ledger at {path}; name the coordinator's --directory")
    with contextlib.ExitStack() as locks:
        for lock in lock_ledger(path):
            locks.callback(lock.close)
        if database.is_encrypted_with(path, new):
            say(f"{path} is encrypted with the key {new.name.hex()}")
        else:
            database.check_key(path, old, OLD_KEY_REMEDY)
            _replace(path, old, new)
            say(f"{path} is encrypted with the key {new.name.hex()} now")
        _remove_segments(path, new)
    for other in sorted(path.parent.glob(f"{path.name}*")):
        if other.is_dir() and ".set-aside-" in other.name:
            say(f"{other} has unchanged files of an earlier ledger; delete it, or keep it elsewhere")
        elif database.is_plain(other):
            say(f"{other} is not encrypted; delete it, or keep it elsewhere")


def _replace(path: Path, old: StorageKey | None, new: StorageKey) -> None:
    if database.is_backup(path, old):
        raise Conflict(
            f"{path} is a backup that no coordinator has opened yet; start a coordinator with the backup's key once, and stop it"
        )
    try:
        with written_whole(path, durable=True) as partial:
            _export(path, old, partial, new)
            # SQLite would read the old file's log as the new one's. It is empty: its content is in the old file.
            for suffix in ("-wal", "-shm"):
                Path(f"{path}{suffix}").unlink(missing_ok=True)
    except sqlite3.DatabaseError as error:
        raise LedgerFault(sentence(path, error)) from error


def _export(path: Path, old: StorageKey | None, partial: Path, new: StorageKey) -> None:
    with contextlib.closing(database.connect(path, old, busy_s=READERS_S)) as db:
        is_busy, _, _ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if is_busy:
        raise Conflict(f"another process reads the ledger {path}; stop that process first")
    store = PayloadStore(path, old)
    with contextlib.closing(database.connect(partial, new, named=True)) as copy, contextlib.closing(store):
        _write_unsafely(copy)  # before the old file is attached, which must keep its settings
        copy.execute("ATTACH DATABASE ? AS old KEY ?", (str(path), "" if old is None else database.key_text(old)))
        copy.execute("SELECT sqlcipher_export('main', 'old')")
        for pragma in PRAGMAS:
            (number,) = copy.execute(f"PRAGMA old.{pragma}").fetchone()
            copy.execute(f"PRAGMA main.{pragma} = {int(number)}")
        copy.execute("DETACH DATABASE old")
        _complete(copy, store, path, "nothing was changed")


def _remove_segments(path: Path, key: StorageKey) -> None:
    """Remove the segments that are not encrypted with `key`: nothing refers to them."""
    for segment in PayloadStore(path).folder.glob("*.seg"):
        with segment.open("rb") as file:
            is_old = not file.read(len(MAGIC) + len(key.name)).startswith(MAGIC + key.name)
        if is_old:
            segment.unlink()
