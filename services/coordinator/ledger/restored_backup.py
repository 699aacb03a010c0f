"""A backup that was put back: the files beside it that belong to another ledger are set aside.

`paceline ledger backup` marks its copies in SQLite's header. The first coordinator that opens a marked file moves what
an earlier ledger left beside it (its log, which SQLite would write into this file, and its segments, which this ledger
would take for unused) into a folder `<ledger>.set-aside-N`, and removes the mark. Nothing is deleted.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from paceline.encryption.storage_key import StorageKey
from paceline.files.whole_file import sync_folder
from paceline.services.coordinator.ledger import database

MARK = 0x5043424B
"""SQLite's application_id of a backup: PCBK."""
PLACE = 68
"""Offset of the application_id in SQLite's header: four bytes, the most significant first."""
JOURNAL = 18
"""Offset of the byte for SQLite's way to write the file: 2 with a log, 1 without."""
NOT_ITS_OWN = ("-wal", "-shm", "-journal", "-segments")


def mark(copy: sqlite3.Connection) -> None:
    """Mark a copy as a backup."""
    copy.execute(f"PRAGMA application_id = {MARK}")


def is_backup(ledger: Path, key: StorageKey | None = None) -> bool:
    """Return whether this file is a backup that no coordinator has opened yet. Reads past SQLite, which would open the
    log.
    """
    if not ledger.is_file():
        return False
    if key is not None:
        return database.application_id(ledger, key) == MARK
    with ledger.open("rb") as file:
        header = file.read(100)
    is_marked = header[PLACE : PLACE + 4] == MARK.to_bytes(4, "big")
    # A copy by another program has no mark. A coordinator's ledger always has a log, a copy never.
    return is_marked or (header[JOURNAL : JOURNAL + 1] == b"\1" and Path(f"{ledger}-wal").exists())


def set_aside(ledger: Path) -> Path | None:
    """Move the files of another ledger away; return their new folder, or None when there were none."""
    others = [other for suffix in NOT_ITS_OWN if (other := Path(f"{ledger}{suffix}")).exists()]
    if not others:
        return None
    place = free_name(ledger.with_name(f"{ledger.name}.set-aside"))
    place.mkdir()
    for other in others:
        other.rename(place / other.name)
    sync_folder(ledger.parent)
    return place


def take_mark_away(db: sqlite3.Connection) -> None:
    """Remove the mark, before the first transaction and while the file has no log yet: it must never be taken for a
    backup again.
    """
    db.execute("PRAGMA application_id = 0")


def free_name(path: Path) -> Path:
    """Return `<path>-N` with the lowest N that is free."""
    number = 1
    while (place := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return place
