"""Caches answers of services in one SQLite file of the host's user.

Promise: an answer survives restarts, and all processes of the user share it. The file stays below its limit. A fault of
the cache never fails a request: without a usable file every question is sent.

`PACELINE_ANSWER_CACHE` is the folder (default `~/.cache/paceline/answers`), `PACELINE_ANSWER_CACHE_MB` its limit in MB
(default 1024; 0 turns the cache off). A folder that other users could change is not used (`paceline.host.own_folder`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.encryption.storage_key import FILE_VARIABLE, KEY_VARIABLE
from paceline.errors import Unreadable
from paceline.files.bounded_cache import bytes_by
from paceline.host.own_folder import own_folder

log = logging.getLogger(__name__)

FOLDER_VARIABLE = "PACELINE_ANSWER_CACHE"
FILE = "answers-1.sqlite"
DEFAULT_MB = 1024
BUSY_S = 5.0
REMOVED_SHARE = 0.2
"""Share of the rows that are deleted when the file reaches its limit, oldest first."""
WRITES_PER_CHECK = 64


def digest_of(question: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a question as canonical JSON."""
    text = json.dumps(question, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


class AnswerCache:
    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._path, self._max_bytes = folder / FILE, max_bytes
        self._db: sqlite3.Connection | None = None
        self._unusable = False
        self._writes = 0

    @classmethod
    def of_user(cls) -> AnswerCache | None:
        """Return the cache that the environment names. Return None if the limit is 0, or if files are encrypted with a
        storage key, because the cache is not encrypted. Raises InvalidInput for a limit that is no number."""
        given = os.environ.get(FOLDER_VARIABLE)
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / "answers"
        size_bytes = bytes_by("PACELINE_ANSWER_CACHE_MB", DEFAULT_MB, least_mb=0)
        if not size_bytes or any(os.environ.get(name) for name in (FILE_VARIABLE, KEY_VARIABLE)):
            return None
        return cls(Path(given) if given else base, size_bytes)

    def get(self, digest: str) -> str | None:
        with self._used() as db:
            if db is not None:
                row = db.execute("SELECT answer FROM answers WHERE digest = ?", (digest,)).fetchone()
                return row[0] if row is not None and isinstance(row[0], str) else None
        return None

    def put(self, digest: str, answer: str) -> None:
        with self._used() as db:
            if db is not None:
                with db:
                    db.execute(
                        "INSERT OR REPLACE INTO answers (digest, answer, written_s) VALUES (?, ?, ?)",
                        (digest, answer, int(time.time())),
                    )
                self._writes += 1
                if self._writes % WRITES_PER_CHECK == 1:
                    self._shrink(db)

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    @contextlib.contextmanager
    def _used(self) -> Iterator[sqlite3.Connection | None]:
        """Yield the open file, or None if it cannot be used. After a fault the cache stays off, with one warning."""
        if self._db is None and not self._unusable:
            try:
                self._db = _opened(self._path)
            except (OSError, sqlite3.Error, Unreadable) as error:
                self._give_up(error)
        try:
            yield self._db
        except sqlite3.Error as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._unusable = True
        with contextlib.suppress(sqlite3.Error):
            self.close()
        log.warning("the cache of answers %s cannot be used, so every question is sent: %s", self._path, error)

    def _shrink(self, db: sqlite3.Connection) -> None:
        (pages,), (size,), (free,) = (
            db.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size", "freelist_count")
        )
        if (pages - free) * size <= self._max_bytes:
            return
        with db:
            (rows,) = db.execute("SELECT COUNT(*) FROM answers").fetchone()
            db.execute(
                "DELETE FROM answers WHERE rowid IN (SELECT rowid FROM answers ORDER BY written_s, rowid LIMIT ?)",
                (max(1, int(rows * REMOVED_SHARE)),),
            )


def _opened(path: Path) -> sqlite3.Connection:
    """Return the file, created if needed. A file that is no database is renamed. Raises Unreadable for a folder that
    other users could change, OSError, sqlite3.Error."""
    own_folder(path.parent, FOLDER_VARIABLE)
    try:
        return _connected(path)
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):  # locked, or not writable
            raise
        path.replace(path.with_suffix(".damaged"))
        return _connected(path)


def _connected(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=BUSY_S)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        with db:
            db.execute(
                "CREATE TABLE IF NOT EXISTS answers (digest TEXT PRIMARY KEY, answer TEXT NOT NULL, written_s INTEGER NOT NULL)"
            )
    except BaseException:
        db.close()
        raise
    return db
