"""The ledger: the durable record of every group from admission to its end, in one SQLite file and its segments.

Promises: what a transaction wrote is on the disk before it returns, so an acknowledgement sent after it survives a
power cut; a second process that opens the same file is refused; every opening is a new term. Nobody but the
coordinator's one event loop writes, one transaction at a time; a thread waits for the disk in its place where it
would wait long (`transaction_off_loop`).
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from paceline.errors import Conflict, LedgerFault, NotFound
from protos.paceline.v1.common_pb2 import ROLE_REWARD, ROLE_ROLLOUT, Role
from protos.paceline.v1.worker_pb2 import CheckpointReport
from services.coordinator.payloads import Payload, PayloadStore
from services.coordinator.schema import SCHEMA, SCHEMA_VERSION, UPGRADES

OPEN_STATES = ("admitted", "leased", "generated", "scored", "batched")
ACTIVE_STATES = ("running", "paused")

KnownT = TypeVar("KnownT")


class Ledger:
    """Tables as in schema.py, with the few operations that more than one module needs."""

    def __init__(self, path: Path, *, read_only: bool = False):
        path = path.resolve()  # the lock is beside the file itself, whatever links to it
        self.path = path
        self.payloads = PayloadStore(path)
        self.on_fault: Callable[[LedgerFault], None] = lambda fault: None
        """Told of every transaction that the disk refused: the ledger's owner has to end."""
        self._lock: IO[str] | None = None
        self._known: dict[str, Any] | None = None
        """What the transaction under way has read and nobody has changed since; None outside of one."""
        self._uncounted: dict[tuple[str, str], int] = {}
        """What the transaction under way adds to counters, by run and name; written before its commit."""
        self._committer = ThreadPoolExecutor(1, "ledger-commit")
        if read_only:
            if not path.is_file():
                raise NotFound(f"no ledger at {path}")
            self.db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(path)
            self.db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self.db.row_factory = sqlite3.Row
        try:
            self._open_schema(read_only)
            self.term = self._meta("term") if read_only else self._next_term()
        except sqlite3.DatabaseError as error:
            self.close()
            raise Conflict(f"{path} is no ledger, or a damaged one: {error}; restore a backup") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file; the next opener may take the lock."""
        self._committer.shutdown()
        self.db.close()
        self.payloads.close()
        if self._lock is not None:
            self._lock.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing; durable when it returns. Raises LedgerFault when the disk refuses."""
        with self._faults_named(), self._rolled_back():
            self._begin()
            yield
            self._write_counters()
            self.db.execute("COMMIT")

    @asynccontextmanager
    async def transaction_off_loop(self) -> AsyncIterator[None]:
        """As `transaction`, but other tasks go on while the disk is waited for. A commit that has begun ends, whoever
        cancels it.
        """
        with self._faults_named(), self._rolled_back():
            self._begin()
            yield
            self._write_counters()
            loop = asyncio.get_running_loop()
            commit = loop.run_in_executor(self._committer, self.db.execute, "COMMIT")
            try:
                await asyncio.shield(commit)
            finally:
                await asyncio.wait([commit])

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """A part of a transaction that is undone by itself when an exception leaves it."""
        self.db.execute("SAVEPOINT part")
        uncounted = dict(self._uncounted)
        try:
            yield
        except BaseException:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK TO part")
                self.db.execute("RELEASE part")
            self._uncounted = uncounted
            self.forget()
            raise
        self.db.execute("RELEASE part")

    def known(self, key: str, read: Callable[[], KnownT]) -> KnownT:
        """What `read` gives, read once in a transaction; whoever changes it says so with `forget`."""
        if self._known is None:
            return read()
        if key not in self._known:
            self._known[key] = read()
        value: KnownT = self._known[key]
        return value

    def forget(self, key: str | None = None) -> None:
        """What was known under this key (or at all) has changed."""
        if self._known is not None:
            if key is None:
                self._known.clear()
            else:
                self._known.pop(key, None)

    def _begin(self) -> None:
        self.db.execute("BEGIN IMMEDIATE")
        self._known, self._uncounted = {}, {}

    def _write_counters(self) -> None:
        self.db.executemany(
            "INSERT INTO counters VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET value = value + excluded.value",
            [(*key, amount) for key, amount in self._uncounted.items()],
        )
        self._known, self._uncounted = None, {}

    @contextmanager
    def _rolled_back(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self.db.in_transaction:  # SQLite itself ends it after some errors
                self.db.execute("ROLLBACK")
            self._known, self._uncounted = None, {}
            raise

    @contextmanager
    def _faults_named(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            fault = LedgerFault(
                f"the ledger {self.path} cannot be written: {error}; make room, or repair the disk, then start the "
                "coordinator again"
            )
            self.on_fault(fault)
            raise fault from error

    # Runs

    def run(self, run_id: str) -> sqlite3.Row:
        """The row of a run. Raises NotFound."""
        row = self.known(f"run {run_id}", lambda: self._run(run_id))
        if row is None:
            known = [
                r["run_id"] for r in self.db.execute("SELECT run_id FROM runs ORDER BY sequence DESC LIMIT 5")
            ]
            raise NotFound(f"no run {run_id!r}; the newest are: {', '.join(known) or 'none'}")
        return row

    def _run(self, run_id: str) -> sqlite3.Row | None:
        row: sqlite3.Row | None = self.db.execute("SELECT * FROM runs WHERE run_id = ?", (run_id,)).fetchone()
        return row

    def runs(self) -> list[sqlite3.Row]:
        """All runs, oldest first."""
        return self.db.execute("SELECT * FROM runs ORDER BY sequence").fetchall()

    def active_run(self) -> sqlite3.Row | None:
        """The one run that trains (or is paused), if any."""
        return self._first("SELECT * FROM runs WHERE state IN ('running', 'paused') ORDER BY sequence")

    def next_queued(self) -> sqlite3.Row | None:
        """The oldest run that waits."""
        return self._first("SELECT * FROM runs WHERE state = 'queued' ORDER BY sequence")

    def add_run(self, run_id: str, spec_yaml: str, directory: str) -> None:
        """A new run at the end of the queue."""
        self.db.execute(
            "INSERT INTO runs (run_id, sequence, spec_yaml, state, directory, submitted_s)"
            " SELECT ?, COALESCE(MAX(sequence), 0) + 1, ?, 'queued', ?, ? FROM runs",
            (run_id, spec_yaml, directory, time.time()),
        )

    def run_of_submission(self, submission: str) -> str | None:
        """The run that was queued under this name of a submission; it is in the run's first event."""
        row = self.db.execute(
            "SELECT run_id FROM events WHERE run_id IN (SELECT run_id FROM runs) AND sequence = 1"
            " AND json_extract(json, '$.submission') = ?",
            (submission,),
        ).fetchone()
        return None if row is None else str(row["run_id"])

    def update_run(self, run_id: str, **columns: Any) -> None:
        """Sets columns of a run."""
        assignments = ", ".join(f"{name} = ?" for name in columns)
        self.db.execute(f"UPDATE runs SET {assignments} WHERE run_id = ?", (*columns.values(), run_id))
        self.forget(f"run {run_id}")

    # Counters and events

    def count(self, run_id: str, name: str, amount: int = 1) -> None:
        """Adds to a durable counter, in a transaction."""
        if self._known is None:
            raise RuntimeError(f"{name} of {run_id} was counted outside of a transaction")
        key = run_id, name
        self._uncounted[key] = self._uncounted.get(key, 0) + amount

    def counters(self, run_id: str) -> dict[str, int]:
        """All counters of a run."""
        counters = dict(self.known(f"counters {run_id}", lambda: self._counters(run_id)))
        for (counted, name), amount in self._uncounted.items():
            if counted == run_id:
                counters[name] = counters.get(name, 0) + amount
        return counters

    def _counters(self, run_id: str) -> dict[str, int]:
        rows = self.db.execute("SELECT name, value FROM counters WHERE run_id = ?", (run_id,))
        return {row["name"]: row["value"] for row in rows}

    def add_event(self, run_id: str, kind: str, content: dict[str, Any]) -> None:
        """Appends to the run's events, which Watch streams."""
        self.db.execute(
            "INSERT INTO events SELECT ?, COALESCE(MAX(sequence), 0) + 1, ?, ? FROM events WHERE run_id = ?",
            (run_id, kind, json.dumps(content), run_id),
        )

    def events(self, run_id: str, after: int, limit: int = 1000) -> list[sqlite3.Row]:
        """Events after a sequence number, oldest first."""
        return self.db.execute(
            "SELECT * FROM events WHERE run_id = ? AND sequence > ? ORDER BY sequence LIMIT ?",
            (run_id, after, limit),
        ).fetchall()

    # Payloads

    def payload(self, run_id: str, group_id: int, kind: str = "result") -> Payload | None:
        """A group's texts and arrays, or what an earlier attempt left as `prefix`, if they are kept."""
        row = self.db.execute(
            "SELECT * FROM payloads WHERE run_id = ? AND group_id = ? AND kind = ?", (run_id, group_id, kind)
        ).fetchone()
        return self.payloads.payload(row) if row else None

    def remove_unused_segments(self) -> None:
        """Gives back the space of the segments that nothing refers to any more, after the commit that made it so."""
        self.payloads.remove(
            number
            for number in self.payloads.old_segments()
            if self._first(f"SELECT 1 FROM payloads WHERE segment = {number}") is None
        )

    # Books

    def groups_by_state(self, run_id: str) -> dict[str, int]:
        """Training groups by state; the ended ones from durable counters."""
        rows = self.db.execute(
            "SELECT state, COUNT(*) AS n FROM groups INDEXED BY groups_by_state WHERE run_id = ? AND class = 'train'"
            f" AND state IN {OPEN_STATES} GROUP BY state",
            (run_id,),
        )
        counts = dict.fromkeys(OPEN_STATES, 0) | {row["state"]: row["n"] for row in rows}
        ended = self.counters(run_id)
        counts |= {name.removeprefix("groups:"): n for name, n in ended.items() if name.startswith("groups:")}
        counts.pop("ever_admitted", None)
        return counts

    def live_tokens(self, run_id: str) -> int:
        """Committed tokens of groups that are neither trained nor dropped."""
        row = self.db.execute(
            "SELECT COALESCE(SUM(tokens), 0) AS n FROM groups INDEXED BY groups_by_state WHERE run_id = ? AND class = 'train'"
            f" AND state IN {OPEN_STATES}",
            (run_id,),
        ).fetchone()
        return int(row["n"])

    def token_books(self, run_id: str) -> dict[str, int]:
        """generated = trained + dropped + live; `wasted` are tokens that no commit took; drops also by reason."""
        counters = self.counters(run_id)
        books = {
            name.removeprefix("tokens:"): n for name, n in counters.items() if name.startswith("tokens:")
        }
        dropped = sum(n for name, n in books.items() if name.startswith("dropped:"))
        defaults = {"generated": 0, "trained": 0, "wasted": 0}
        return defaults | books | {"dropped": dropped, "live": self.live_tokens(run_id)}

    def open_groups(self, run_id: str) -> int:
        """Groups admitted and neither trained nor dropped, from durable counters."""
        counters = self.counters(run_id)
        dropped = sum(n for name, n in counters.items() if name.startswith("groups:dropped:"))
        return counters.get("groups:ever_admitted", 0) - counters.get("groups:trained", 0) - dropped

    def trained_samples(self, run_id: str) -> int:
        """Completions in trained groups (for a supervised run: 0)."""
        row = self.db.execute(
            "SELECT COALESCE(SUM(LENGTH(rewards) / 4 / json_array_length(functions)), 0) AS n FROM groups"
            " WHERE run_id = ? AND state = 'trained'",
            (run_id,),
        ).fetchone()
        return int(row["n"])

    def evaluations(self, run_id: str) -> list[dict[str, Any]]:
        """Results of the finished evaluations, in the order of their steps."""
        rows = self.db.execute(
            "SELECT result_json FROM evaluations WHERE run_id = ? AND done = 1 ORDER BY step", (run_id,)
        )
        return [json.loads(row["result_json"]) for row in rows]

    def add_evaluation(self, run_id: str, step: int, result: dict[str, Any]) -> None:
        """Records a measurement that the learner made of the version of a step."""
        self.db.execute(
            "INSERT OR REPLACE INTO evaluations (run_id, step, done, result_json) VALUES (?, ?, 1, ?)",
            (run_id, step, json.dumps(result)),
        )

    # Checkpoints and members

    def add_checkpoint(self, report: CheckpointReport) -> bool:
        """Registers a complete checkpoint; False for one that was known."""
        known = self.db.execute(
            "SELECT 1 FROM checkpoints WHERE run_id = ? AND path = ? AND sha256 = ?",
            (report.run_id, report.path, report.sha256),
        ).fetchone()
        if known:
            return False
        self.db.execute(
            "INSERT OR REPLACE INTO checkpoints (run_id, session, step, path, sha256, chain) VALUES (?, ?, ?, ?, ?, ?)",
            (report.run_id, report.session, report.step, report.path, report.sha256, report.chain),
        )
        return True

    def newest_checkpoint(self, run_id: str) -> sqlite3.Row | None:
        """The complete checkpoint of the highest trained step whose chain is the ledger's own.

        One that is ahead of the receipts is left out for now: the step before it would never get any.
        """
        row: sqlite3.Row | None = self.db.execute(
            "SELECT c.* FROM checkpoints c JOIN runs r ON r.run_id = c.run_id"
            " LEFT JOIN batches b ON b.run_id = c.run_id AND b.step = c.step - 1"
            " WHERE c.run_id = ? AND c.removed = 0 AND c.step <= r.next_step AND c.chain = COALESCE(b.chain, '')"
            " ORDER BY c.step DESC, c.session DESC LIMIT 1",
            (run_id,),
        ).fetchone()
        return row

    def held(self) -> dict[str, int]:
        """Leases and score tasks by who holds them."""
        rows = self.db.execute(
            "SELECT member_id AS id, COUNT(*) AS n FROM groups WHERE state = 'leased' GROUP BY member_id UNION ALL"
            " SELECT scorer_id, COUNT(*) FROM groups WHERE state = 'generated' AND scorer_id IS NOT NULL"
            " GROUP BY scorer_id"
        )
        return {row["id"]: row["n"] for row in rows}

    def holders(self) -> list[tuple[str, Role.ValueType]]:
        """Members that hold leases, score tasks or a pending evaluation, by the record."""
        leases = self.db.execute(
            "SELECT member_id AS id FROM groups WHERE state = 'leased' UNION"
            " SELECT member_id FROM evaluations WHERE done = 0 AND member_id IS NOT NULL"
        ).fetchall()
        tasks = self.db.execute(
            "SELECT DISTINCT scorer_id AS id FROM groups WHERE state = 'generated' AND scorer_id IS NOT NULL"
        ).fetchall()
        return [(row["id"], ROLE_ROLLOUT) for row in leases] + [(row["id"], ROLE_REWARD) for row in tasks]

    # Opening

    def _open_schema(self, read_only: bool) -> None:
        version = self.db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, SCHEMA_VERSION, *UPGRADES) or (version != SCHEMA_VERSION and read_only):
            remedy = "start its coordinator once" if version in UPGRADES else "use the Paceline that wrote it"
            raise Conflict(
                f"the ledger {self.path} has format {version}, this Paceline reads {SCHEMA_VERSION}; {remedy}"
            )
        if read_only:
            return
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute("PRAGMA synchronous = FULL")
        while version != SCHEMA_VERSION:
            script, version = (UPGRADES[version], version + 1) if version else (SCHEMA, SCHEMA_VERSION)
            self.db.executescript(f"BEGIN; {script} PRAGMA user_version = {version}; COMMIT;")

    def _next_term(self) -> int:
        with self.transaction():
            self.db.execute("INSERT INTO meta VALUES ('term', 1) ON CONFLICT DO UPDATE SET value = value + 1")
        return self._meta("term")

    def _meta(self, key: str) -> int:
        row = self.db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return int(row["value"]) if row else 0

    def _first(self, query: str) -> sqlite3.Row | None:
        row: sqlite3.Row | None = self.db.execute(query + " LIMIT 1").fetchone()
        return row


def _lock(path: Path) -> IO[str]:
    """Holds the ledger at `path` for this process until closed. Raises Conflict when another one does."""
    lock = path.with_name(path.name + ".lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise Conflict(
            f"another coordinator has the ledger {path} open; stop it, or give this one another --directory"
        ) from None
    return lock
