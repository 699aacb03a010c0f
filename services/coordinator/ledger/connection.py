"""Opens the ledger's SQLite file, runs its transactions, and caches what they read.

Promises: a transaction's writes are on the disk before it returns, so an acknowledgement sent after it survives a power
cut; a second process that opens the same file is refused; every opening is a new term, and a process whose term is over
writes nothing more. Only the coordinator's one event loop writes, one transaction at a time. Long syncs run on a thread
while the loop continues with the next transaction; answers are sent after the sync (`sync_off_loop`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import sqlite3
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from paceline.encryption.storage_key import storage_key
from paceline.errors import Conflict, LedgerFault, NotFound
from paceline.files.whole_file import sync_folder, written_whole
from paceline.host.regular_file import fd_to_append
from paceline.services.coordinator.ledger import database, row_checksums
from paceline.services.coordinator.ledger.file_check import REMEDY as RESTORE
from paceline.services.coordinator.ledger.file_check import check_open_runs, is_damage
from paceline.services.coordinator.ledger.schema import SCHEMA, SCHEMA_VERSION, UPGRADES
from paceline.services.coordinator.ledger.segments import PayloadStore

ValueT = TypeVar("ValueT")
MAX_CACHED = 256
"""Largest number of values in the cache."""

REMEDY = "make room, or repair the disk, then start the coordinator again"
SQLITE_LOCKS_FROM = 0x40000000
"""First byte that SQLite locks (its PENDING_BYTE)."""

LOG_READERS_S = 0.1
"""Seconds. One attempt to empty the log waits at most this long for readers of other processes."""

log = logging.getLogger(__name__)


class OlderFormat(Conflict):
    """A reader cannot read this format, but a writer upgrades it."""


class LedgerFile(database.Queries):
    """A ledger's file, opened by its one writer or by a reader beside it."""

    def __init__(self, path: Path, *, read_only: bool = False):
        path = Path(os.path.realpath(path))  # the lock must be beside the file itself, not beside a link
        self.path = path
        self.key = storage_key()
        """Key of the ledger's encrypted files; None if the files are plain."""
        self.payloads = PayloadStore(path, self.key)
        self.on_fault: Callable[[LedgerFault], None] = lambda fault: None
        """Called with the fault when the disk refuses a transaction; the ledger's owner must then stop."""
        self.set_aside: Path | None = None
        """Folder with files of another ledger that were beside a backup; None if there is none."""
        self._locks: list[IO[bytes]] = []
        self.term = 0
        """Number of this opening of the ledger; 0 before it is assigned."""
        self._cache: dict[str, Any] | None = None if read_only else {}
        """Unchanged values by the key of `cached`; None in a reader, because another process changes the file."""
        self._decisions: dict[str, Any] = {}
        """Results of `decided` in this transaction. The key is that of `decided`."""
        self._uncounted: dict[tuple[str, str], int] = {}
        """Amounts that the transaction adds to counters before its commit. The key is run and counter's name."""
        self._syncer = ThreadPoolExecutor(1, "ledger-sync")
        self._log_fd: int | None = None
        """File descriptor of SQLite's write-ahead log, which stays the same file while the ledger is open."""
        self._commits = self._synced_commits = 0
        """Numbers of transactions since the opening: all, and those that are synced."""
        if read_only:
            if not path.is_file():
                raise NotFound(f"no ledger at {path}")
            database.check_key(path, self.key)
            # The log beside a backup that was never opened belongs to another ledger, so it must not be read.
            alone = database.is_backup(path, self.key)
            self.db = database.connect(path, self.key, read_only=True, immutable=alone, named=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._locks = lock_ledger(path)
            try:
                database.check_key(path, self.key)
                is_backup = database.is_backup(path, self.key)
                if is_backup:
                    self.set_aside = database.set_aside(path)
                    self.payloads = PayloadStore(path, self.key)
                self.db = database.connect(path, self.key, any_thread=True, named=True)
            except BaseException:
                for lock in self._locks:
                    lock.close()
                raise
        row_checksums.install(self.db)
        try:
            if not read_only and is_backup:
                database.remove_mark(self.db)
            self._open_schema(read_only)
            if not read_only:
                check_open_runs(self.db, path)
                row_checksums.keep(self.db)
            self.term = self._meta("term") if read_only else self._next_term(is_backup=is_backup)
        except (sqlite3.DatabaseError, TypeError, ValueError) as error:  # SQLite quotes damaged text
            self.close()
            raise Conflict(f"{path} is not a ledger, or a damaged one: {error}; {RESTORE}") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file and release its locks."""
        self._syncer.shutdown()
        self.db.close()
        if self._log_fd is not None:
            os.close(self._log_fd)
        self.payloads.close()
        # After SQLite: a process that closes a file loses all its POSIX locks on it.
        for lock in self._locks:
            lock.close()

    @contextmanager
    def transaction(self, *, synced: bool = True) -> Iterator[None]:
        """Run the body as a transaction: all or nothing, durable on return. If `synced` is False, it is durable after a
        `sync` that begins later, and no answer may be sent before that. Raises LedgerFault if the disk fails."""
        with self._faults_named(), self._rolled_back():
            self._begin()
            yield
            self._write_counters()
            self.db.execute("COMMIT")
            self._commits += 1
        if synced:
            self.sync()

    def sync(self) -> None:
        """Wait until every transaction that was committed before this call is on the disk. Raises LedgerFault."""
        commits = self._commits
        if self._synced_commits >= commits:
            return
        try:
            if self._log_fd is None:
                self._log_fd = os.open(f"{self.path}-wal", os.O_RDONLY | os.O_CLOEXEC)
                sync_folder(self.path.parent)  # for the log's name, which SQLite makes durable only when it syncs
            os.fdatasync(self._log_fd)
        except OSError as error:
            raise self._fault(f"the ledger {self.path} cannot be written: {error}; {REMEDY}") from error
        self._synced_commits = max(self._synced_commits, commits)

    async def sync_off_loop(self) -> None:
        """Run `sync` on a thread, while other tasks, also transactions, continue."""
        await asyncio.get_running_loop().run_in_executor(self._syncer, self.sync)

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Run the body as a part of a transaction. An exception rolls back only this part."""
        self.db.execute("SAVEPOINT part")
        uncounted = dict(self._uncounted)
        try:
            yield
        except BaseException:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK TO part")
                self.db.execute("RELEASE part")
            self._uncounted = uncounted
            self._invalidate_all()
            raise
        self.db.execute("RELEASE part")

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Run the body on one state of the file. The body may only read."""
        self.db.execute("BEGIN")
        try:
            yield
        finally:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")

    def cached(self, key: str, read: Callable[[], ValueT]) -> ValueT:
        """Return the cached value of `key`, else call `read` and cache its result; `invalidate` removes it."""
        return read() if self._cache is None else _once(self._cache, key, read)

    def decided(self, key: str, decide: Callable[[], ValueT]) -> ValueT:
        """Return the result of `decide` for `key`, which is called once in a transaction."""
        return _once(self._decisions, key, decide) if self.db.in_transaction else decide()

    def invalidate(self, key: str) -> None:
        """Remove a changed value from the cache and from the transaction's decisions."""
        if self._cache is not None:
            self._cache.pop(key, None)
        self._decisions.pop(key, None)

    def _invalidate_all(self) -> None:
        if self._cache is not None:
            self._cache.clear()
        self._decisions.clear()

    def _begin(self) -> None:
        self.db.execute("BEGIN IMMEDIATE")
        if self.term and (newer := self._meta("term")) != self.term:
            raise self._fault(
                f"the ledger {self.path} belongs to another coordinator now, in term {newer}; "
                f"this coordinator's term was {self.term}"
            )
        self._uncounted = {}
        self._decisions.clear()

    def written_counters(self, run_id: str) -> dict[str, int]:
        """Return a run's counters without the amounts of this transaction."""

        def read() -> dict[str, int]:
            rows = self.db.execute("SELECT name, value FROM counters WHERE run_id = ?", (run_id,))
            return {row["name"]: row["value"] for row in rows}

        return self.cached(f"counters {run_id}", read)

    def _write_counters(self) -> None:
        """Add the amounts to the counters. Seals are computed here: a trigger for each would take the interpreter
        lock."""
        rows: list[dict[str, Any]] = [
            {"run_id": run_id, "name": name, "value": self.written_counters(run_id).get(name, 0) + amount}
            for (run_id, name), amount in self._uncounted.items()
        ]
        self.db.executemany(
            "INSERT OR REPLACE INTO counters (run_id, name, value, seal) VALUES (:run_id, :name, :value, :seal)",
            [{**row, "seal": row_checksums.of("counters", row)} for row in rows],
        )
        for row in rows:
            self.written_counters(row["run_id"])[row["name"]] = row["value"]
        self._uncounted = {}

    @contextmanager
    def _rolled_back(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self.db.in_transaction:  # SQLite itself rolls back after some errors
                self.db.execute("ROLLBACK")
            self._invalidate_all()
            self._uncounted = {}
            raise

    @contextmanager
    def _faults_named(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            damaged = f"the ledger {self.path} is damaged: {error}; {RESTORE}"
            unwritable = f"the ledger {self.path} cannot be written: {error}; {REMEDY}"
            raise self._fault(damaged if is_damage(error) else unwritable) from error

    def _fault(self, message: str) -> LedgerFault:
        fault = LedgerFault(message)
        self.on_fault(fault)
        return fault

    # Opening

    def _open_schema(self, read_only: bool) -> None:
        version = self.db.execute("PRAGMA user_version").fetchone()[0]
        self._check_format(version, read_only)
        if read_only:
            return
        self.db.execute("PRAGMA journal_mode = WAL")
        # `sync` syncs the log before an answer leaves. SQLite itself syncs the log before it moves its content to the file, and
        # the file before it overwrites the log.
        self.db.execute("PRAGMA synchronous = NORMAL")
        if version in UPGRADES:
            self._copy_before_upgrade(version)
        while version != SCHEMA_VERSION:
            script, version = (UPGRADES[version], version + 1) if version else (SCHEMA, SCHEMA_VERSION)
            self.db.executescript(f"BEGIN; {script} PRAGMA user_version = {version}; COMMIT;")
        # A statement with triggers saves the earlier content of its pages. In temporary files on a shared folder that
        # would double the cost of a group. Set after an upgrade, because its statements change every page.
        self.db.execute("PRAGMA temp_store = MEMORY")

    def _check_format(self, version: int, read_only: bool) -> None:
        """Raise Conflict if the format cannot be read."""
        if version == SCHEMA_VERSION or (not read_only and (version == 0 or version in UPGRADES)):
            return
        if version > SCHEMA_VERSION:
            remedy = "a newer Paceline wrote this ledger: use that version, or restore an older backup"
        elif version in UPGRADES:
            raise OlderFormat(
                f"the ledger {self.path} has format {version}, but this Paceline reads {SCHEMA_VERSION}; start its coordinator once, "
                "which upgrades the ledger"
            )
        else:
            remedy = "use the Paceline that wrote this ledger"
        raise Conflict(
            f"the ledger {self.path} has format {version}, but this Paceline reads {SCHEMA_VERSION}; {remedy}"
        )

    def _copy_before_upgrade(self, version: int) -> None:
        """Copy the tables to a file beside the ledger; an older Paceline can continue from it and the same segments."""
        path = self.path.with_name(f"{self.path.name}.format-{version}")
        with (
            written_whole(path, durable=True) as partial,
            contextlib.closing(database.connect(partial, self.key)) as copy,
        ):
            self.db.backup(copy)
        log.warning("the ledger has format %d and is upgraded to %d; %s is a copy of it", version, SCHEMA_VERSION, path)

    @property
    def was_restored(self) -> bool:
        """Return whether this ledger was ever restored from a backup; folders and workers may then be ahead of it."""
        return bool(self._meta("restored"))

    def _next_term(self, *, is_backup: bool) -> int:
        with self.transaction():
            self.db.execute(
                "INSERT INTO meta (key, value) VALUES ('term', 1) ON CONFLICT DO UPDATE SET value = value + 1"
            )
            if is_backup:
                self.db.execute("INSERT OR REPLACE INTO meta (key, value) VALUES ('restored', 1)")
        return self._meta("term")

    def _meta(self, key: str) -> int:
        row = self.db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return int(row["value"]) if row else 0


def _once(values: dict[str, Any], key: str, compute: Callable[[], ValueT]) -> ValueT:
    if key not in values:
        if len(values) >= MAX_CACHED:  # a client that lists runs reads each run's row
            values.clear()
        values[key] = compute()
    value: ValueT = values[key]
    return value


def lock_ledger(path: Path) -> list[IO[bytes]]:
    """Lock the ledger at `path` for this process until both files are closed. Raises Conflict if another process has
    locked it. The effective lock is on the ledger itself, on a byte before those that SQLite locks, and belongs to the
    open file, so SQLite neither conflicts with it nor releases it. The lock on the file beside it remains if a backup
    replaces the ledger."""
    beside = os.fdopen(fd_to_append(path.with_name(path.name + ".lock")), "ab")
    ledger = os.fdopen(fd_to_append(path), "ab")
    try:
        fcntl.flock(beside, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, SQLITE_LOCKS_FROM - 1, 1, 0)
        fcntl.fcntl(ledger, fcntl.F_OFD_SETLK, lock)
    except BlockingIOError:
        ledger.close()
        beside.close()
        raise Conflict(
            f"another coordinator has the ledger {path} open; stop it, or give this coordinator another --directory"
        ) from None
    return [beside, ledger]


class WalCheckpointer:
    """Moves the content of the write-ahead log into the ledger's file while transactions go on. By default SQLite does
    this in the commit that brings the log to 1,000 pages; under load, every tenth commit would then wait for the writes
    and two more syncs. Here a thread does it by a separate connection, which blocks no writer. Because writers
    continue, the log never becomes empty. If it has more than `max_pages` pages, a short pass holds `lock`, which
    excludes transactions, and SQLite then writes the log from its start again. Only the log's length depends on this: a
    commit is durable by its own sync."""

    def __init__(self, ledger: LedgerFile, lock: asyncio.Lock, period_s: float = 0.5, max_pages: int = 8192):
        """Move every `period_s` seconds; restart the log when it has more than `max_pages` pages of 4 kB."""
        self._lock, self._period_s, self._max_pages = lock, period_s, max_pages
        self._db = database.connect(ledger.path, ledger.key, busy_s=LOG_READERS_S, any_thread=True)
        ledger.db.execute("PRAGMA wal_autocheckpoint = 0")

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            with ThreadPoolExecutor(1, "ledger-log") as thread:
                while True:
                    await asyncio.sleep(self._period_s)
                    if await loop.run_in_executor(thread, self.move, "PASSIVE") > self._max_pages:
                        async with self._lock:
                            await loop.run_in_executor(thread, self.move, "RESTART")
        finally:
            self._db.close()

    def move(self, how: str) -> int:
        """Move pages into the file; return the log's length in pages. The next transaction reports a disk error."""
        try:
            _, pages, _ = self._db.execute(f"PRAGMA wal_checkpoint({how})").fetchone()
        except sqlite3.OperationalError as error:
            log.warning("the ledger's log cannot be shortened now: %s", error)
            return 0
        return int(pages)
