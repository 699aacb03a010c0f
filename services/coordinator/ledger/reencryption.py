"""`paceline ledger encrypt`: copy a stopped coordinator's ledger into an encrypted file, which then takes its place.

Promise: at any moment the directory has the whole ledger, in the old form or in the new one. The old file is replaced once the
new one is complete, checked and on the disk. As in a backup, texts and arrays of groups and turns are in the new file itself, so
the old segments are removed; new ones are encrypted.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

from paceline.encryption.storage_key import StorageKey
from paceline.errors import Conflict, LedgerFault, NotFound
from paceline.files.whole_file import written_whole
from paceline.services.coordinator.ledger import database, restored_backup
from paceline.services.coordinator.ledger.backup import take_in_payloads
from paceline.services.coordinator.ledger.connection import lock_ledger
from paceline.services.coordinator.ledger.integrity.file_check import check_file
from paceline.services.coordinator.ledger.integrity.file_damage import sentence
from paceline.services.coordinator.ledger.integrity.report import VerifyReport
from paceline.services.coordinator.ledger.segment_cipher import MAGIC
from paceline.services.coordinator.ledger.segments import PayloadStore

PRAGMAS = ("user_version", "application_id")
"""Numbers in SQLite's header that belong to the ledger."""
OLD_KEY_REMEDY = (
    "name the file with its key until now by --old-key-file, or leave the option out for a plain ledger"
)
READERS_S = 1.0
"""Seconds for which a reader of another process may keep the log from being emptied."""


def encrypt_ledger(path: Path, old: StorageKey | None, new: StorageKey, say: Callable[[str], None]) -> None:
    """Encrypt the ledger at `path` with `new`; `old` is its key until now, None for a plain one. `say` is called with what was done,
    and with each file beside it that is still plain.

    Raises NotFound, WrongKey, Conflict when a coordinator has it or another process reads it, LedgerFault when it is damaged.
    """
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
            say(f"{other} has files of an earlier ledger as they were; delete it, or keep it elsewhere")
        elif database.is_plain(other):
            say(f"{other} is not encrypted; delete it, or keep it elsewhere")


def _replace(path: Path, old: StorageKey | None, new: StorageKey) -> None:
    if restored_backup.is_backup(path, old):
        raise Conflict(
            f"{path} is a backup that no coordinator has opened yet; start one with its key once, and stop it"
        )
    try:
        with written_whole(path, durable=True) as partial:
            _copy(path, old, partial, new)
            # SQLite would take the old file's log for that of the new one. It is empty by now: all of it is in the old file.
            for suffix in ("-wal", "-shm"):
                Path(f"{path}{suffix}").unlink(missing_ok=True)
    except sqlite3.DatabaseError as error:
        raise LedgerFault(sentence(path, error)) from error


def _copy(path: Path, old: StorageKey | None, partial: Path, new: StorageKey) -> None:
    with contextlib.closing(database.connect(path, old, busy_s=READERS_S)) as db:
        is_busy, _, _ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    if is_busy:
        raise Conflict(f"another process reads the ledger {path}; stop it first")
    store = PayloadStore(path, old)
    with contextlib.closing(database.connect(partial, new, named=True)) as copy, contextlib.closing(store):
        copy.execute("PRAGMA journal_mode = MEMORY")  # a power cut loses only the .partial file
        copy.execute("PRAGMA synchronous = OFF")
        copy.execute(
            "ATTACH DATABASE ? AS old KEY ?", (str(path), "" if old is None else database.key_text(old))
        )
        copy.execute("SELECT sqlcipher_export('main', 'old')")
        for pragma in PRAGMAS:
            (number,) = copy.execute(f"PRAGMA old.{pragma}").fetchone()
            copy.execute(f"PRAGMA main.{pragma} = {int(number)}")
        copy.execute("DETACH DATABASE old")
        take_in_payloads(copy, store)
        report = VerifyReport()
        check_file(copy, report)
        if report.found:
            raise LedgerFault(f"nothing was changed: {sentence(path, report.problems[0])}")


def _remove_segments(path: Path, key: StorageKey) -> None:
    """Remove the segments that are not encrypted with `key`: nothing refers to them."""
    for segment in PayloadStore(path).folder.glob("*.seg"):
        with segment.open("rb") as file:
            is_old = not file.read(len(MAGIC) + len(key.name)).startswith(MAGIC + key.name)
        if is_old:
            segment.unlink()
