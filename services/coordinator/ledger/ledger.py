"""The ledger: the durable record of every group from admission to its end, in one SQLite file and its segments.
`connection.py` has the promises of the file and of its transactions; this file has operations that several modules
need."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from paceline.errors import NotFound
from paceline.services.coordinator.ledger.connection import LedgerFile
from paceline.services.coordinator.ledger.group_queries import Deaths, FreeSlots, GroupQueries
from paceline.services.coordinator.ledger.groups import Groups
from paceline.services.coordinator.ledger.segments import DamagedRecord, Location, Payload
from paceline.services.coordinator.ledger.tables.audit_heads import AuditHeads
from paceline.services.coordinator.ledger.tables.batches import Batches, Receipts, SessionFaults
from paceline.services.coordinator.ledger.tables.checkpoints import Checkpoints, resolved, stored
from paceline.services.coordinator.ledger.tables.episodes import Episodes
from paceline.services.coordinator.ledger.tables.evaluations import Evaluations
from paceline.services.coordinator.ledger.tables.models import RegisteredModels
from paceline.services.coordinator.text_limits import event_json
from paceline.v1.common_pb2 import ROLE_REWARD, ROLE_ROLLOUT, Role

ACTIVE_STATES = ("running", "paused")
PRIORITY = (
    "COALESCE((SELECT json_extract(json, '$.priority') FROM events WHERE events.run_id = runs.run_id AND sequence = 1), 0)"
    " AS priority"
)
"""SQL for a run's priority, which is in the run's first event."""
MAX_SEQUENCE = 1 << 62
"""A sequence number above that of any event, within SQLite's range."""
MAX_EVENTS = {"member": 100_000, "warning": 100_000}
"""Largest number of events of a run, for kinds that workers can cause without limit. The key is the kind."""
GROUPS_AT_ONCE = 512
"""Largest number of groups whose payloads are pruned in one transaction."""
PRUNED = "pruned:groups"
RECENT_RESULTS = 64
"""Number of newest results whose mean size predicts the size of later ones."""


class Ledger(LedgerFile):
    """All tables: those of runs, events, counters and payloads in this file, the others in the folder `tables`."""

    def __init__(self, path: Path, *, read_only: bool = False, store: str = ""):
        """`store` is the deployment's root for large files: a URL, an absolute path, or empty for the ledger's
        folder."""
        super().__init__(path, read_only=read_only)
        self.store = store.rstrip("/")
        self.groups = Groups(self.db)
        self.group_queries = GroupQueries(self.db)
        self.free_slots = FreeSlots(self.db)
        self.batches = Batches(self.db)
        self.receipts = Receipts(self.db)
        self.session_faults = SessionFaults(self.db)
        self.checkpoints = Checkpoints(self.db, self.path.parent)
        self.evaluations = Evaluations(self.db)
        self.episodes = Episodes(self.db)
        self.audit_heads = AuditHeads(self.db)
        self.models = RegisteredModels(self.db, self.path.parent)

    @property
    def deaths(self) -> Deaths:
        """Crashes by group. Not an attribute, because a reference cycle would keep the files open."""
        return Deaths(self)

    # Runs

    def run(self, run_id: str) -> sqlite3.Row:
        """Return the row of a run. Raises NotFound."""
        return self.cached(f"run {run_id}", lambda: self._run(run_id))

    def _run(self, run_id: str) -> sqlite3.Row:
        row = self.row("SELECT * FROM runs WHERE run_id = ?", (run_id,))
        if row is None:
            newest = [r["run_id"] for r in self.rows("SELECT run_id FROM runs ORDER BY sequence DESC LIMIT 5")]
            raise NotFound(f"no run {run_id!r}; the newest are: {', '.join(newest) or 'none'}")
        return row

    def runs(self) -> list[sqlite3.Row]:
        """Return all runs, oldest first."""
        return self.rows("SELECT * FROM runs ORDER BY sequence")

    def runs_after(self, sequence: int, limit: int) -> list[sqlite3.Row]:
        """Return the runs submitted after run number `sequence`, oldest first, without their specs."""
        return self.rows(
            "SELECT run_id, sequence, state, message, next_step, max_num_steps, directory, submitted_s, warnings_json"
            " FROM runs WHERE sequence > ? ORDER BY sequence LIMIT ?",
            (sequence, limit),
        )

    def runs_by_state(self) -> dict[str, int]:
        """Return the number of runs by state; states without runs are left out."""
        rows = self.db.execute("SELECT state, COUNT(*) AS n FROM runs GROUP BY state")
        return {row["state"]: int(row["n"]) for row in rows}

    def num_runs(self) -> int:
        return int(self.value("SELECT COUNT(*) FROM runs"))

    def active_run(self) -> sqlite3.Row | None:
        """Return the running run, else the paused one; None without either."""
        return self.row("SELECT * FROM runs WHERE state IN ('running', 'paused') ORDER BY state DESC, sequence LIMIT 1")

    def due_run(self, passed_over: Collection[str] = ()) -> sqlite3.Row | None:
        """Return the active run, else the first of the queue; runs in `passed_over` are left out."""
        return self.row(
            f"SELECT runs.*, {PRIORITY} FROM runs WHERE state IN ('running', 'paused', 'queued')"
            f" AND run_id NOT IN ({', '.join('?' * len(passed_over))})"
            " ORDER BY CASE state WHEN 'running' THEN 0 WHEN 'paused' THEN 1 ELSE 2 END, priority DESC, sequence LIMIT 1",
            tuple(passed_over),
        )

    def queue(self) -> list[sqlite3.Row]:
        """Return id and `priority` of the queued runs, the first to start first."""
        return self.rows(f"SELECT run_id, {PRIORITY} FROM runs WHERE state = 'queued' ORDER BY priority DESC, sequence")

    def priority(self, run_id: str) -> int:
        return int(self.value(f"SELECT {PRIORITY} FROM runs WHERE run_id = ?", (run_id,)) or 0)

    def submitter(self, run_id: str) -> str:
        """Return the caller that submitted a run, from its first event; empty if not recorded. Raises NotFound."""
        self.run(run_id)
        query = "SELECT json_extract(json, '$.submitter') FROM events WHERE run_id = ? AND sequence = 1"
        return str(self.value(query, (run_id,)) or "")

    def add_run(
        self, run_id: str, spec_yaml: str, directory: str, max_num_steps: int = 0, warnings: Sequence[str] = ()
    ) -> None:
        """Add a run at the end of the queue; a `directory` in the ledger's folder is stored relative to it."""
        self.db.execute(
            "INSERT INTO runs (run_id, sequence, spec_yaml, state, directory, submitted_s, max_num_steps, warnings_json)"
            " SELECT ?, COALESCE(MAX(sequence), 0) + 1, ?, 'queued', ?, ?, ?, ? FROM runs",
            (
                run_id,
                spec_yaml,
                stored(self.path.parent, directory),
                time.time(),
                max_num_steps,
                json.dumps(list(warnings)),
            ),
        )

    def run_directory(self, run_id: str) -> Path:
        """Return the folder of a run. Raises NotFound."""
        return Path(resolved(self.path.parent, self.run(run_id)["directory"]))

    def run_store(self, run_id: str) -> str:
        """Return the folder or URL of a run's large files: checkpoints, exports, weights. Raises NotFound."""
        return f"{self.store}/{run_id}" if self.store else str(self.run_directory(run_id))

    def export_path(self, run_id: str) -> str:
        """Return the folder of a run's final export; empty if there is none. Raises NotFound."""
        return resolved(self.path.parent, self.run(run_id)["export_path"])

    def run_of_submission(self, submission: str) -> str | None:
        """Return the id of the run with this submission name, from the run's first event; None if there is none."""
        row = self.row(
            "SELECT run_id FROM events WHERE run_id IN (SELECT run_id FROM runs) AND sequence = 1"
            " AND json_extract(json, '$.submission') = ?",
            (submission,),
        )
        return None if row is None else str(row["run_id"])

    def update_run(self, run_id: str, **columns: Any) -> None:
        assignments = ", ".join(f"{name} = ?" for name in columns)
        self.db.execute(f"UPDATE runs SET {assignments} WHERE run_id = ?", (*columns.values(), run_id))
        self.invalidate(f"run {run_id}")

    def session_holder(self, run_id: str) -> str:
        """Return the id of the learner with the newest session; empty if it is not recorded."""
        return str(self._newest_event(run_id, "session").get("member_id", ""))

    def sessions(self, run_id: str) -> dict[int, int]:
        """Return, for each session that has begun, the step from which it publishes."""
        query = "SELECT json FROM events WHERE run_id = ? AND kind = 'session' ORDER BY sequence"

        def read() -> dict[int, int]:
            events = [json.loads(row["json"]) for row in self.rows(query, (run_id,))]
            return {int(event["session"]): int(event.get("publish_from_step", 0)) for event in events}

        return self.cached(f"sessions {run_id}", read)

    def newest_of_member(self, run_id: str, member_id: str) -> str:
        """Return the text of a run's newest event about a member (`joined`, `left: …`); empty if there is none."""
        query = (
            "SELECT json FROM events WHERE run_id = ? AND kind = 'member' AND json_extract(json, '$.member_id') = ?"
            " ORDER BY sequence DESC LIMIT 1"
        )
        return str(json.loads(self.value(query, (run_id, member_id)) or "{}").get("what", ""))

    # Counters and events

    def count(self, run_id: str, name: str, amount: int = 1) -> None:
        """Add to a durable counter, inside a transaction."""
        if not self.db.in_transaction:
            raise RuntimeError(f"{name} of {run_id} was counted outside of a transaction")
        key = run_id, name
        self._uncounted[key] = self._uncounted.get(key, 0) + amount

    def counters(self, run_id: str) -> dict[str, int]:
        counters = dict(self.written_counters(run_id))
        for (counted, name), amount in self._uncounted.items():
            if counted == run_id:
                counters[name] = counters.get(name, 0) + amount
        return counters

    def add_event(self, run_id: str, kind: str, content: dict[str, Any]) -> None:
        """Append an event for Watch. For a kind in MAX_EVENTS, the last allowed event says that no further one
        follows."""
        if kind in MAX_EVENTS:
            number = self.counters(run_id).get(f"events:{kind}", 0) + 1
            if number > MAX_EVENTS[kind]:
                return
            if number == MAX_EVENTS[kind]:
                content = {
                    "message": f"this run has {number} events of the kind {kind!r}; further ones are only in the log"
                }
            self.count(run_id, f"events:{kind}")
        self.db.execute(
            "INSERT INTO events (run_id, sequence, kind, json)"
            " SELECT ?, COALESCE(MAX(sequence), 0) + 1, ?, ? FROM events WHERE run_id = ?",
            (run_id, kind, event_json(content), run_id),
        )

    def last_sequence(self, run_id: str) -> int:
        """Return the sequence number of a run's newest event; 0 if there is none."""
        return int(self.value("SELECT MAX(sequence) FROM events WHERE run_id = ?", (run_id,)) or 0)

    def events(self, run_id: str, after: int, limit: int = 1000) -> list[sqlite3.Row]:
        """Return the events after a sequence number, oldest first."""
        return self.rows(
            "SELECT * FROM events WHERE run_id = ? AND sequence > ? ORDER BY sequence LIMIT ?",
            (run_id, min(after, MAX_SEQUENCE), limit),
        )

    def step_metrics(self, run_id: str, before: int, number: int) -> list[dict[str, Any]]:
        """Return the events of the newest `number` steps before a step, oldest first."""
        rows = self.rows(
            "SELECT json FROM events WHERE run_id = ? AND kind = 'step' AND json_extract(json, '$.step') < ?"
            " ORDER BY sequence DESC LIMIT ?",
            (run_id, before, number),
        )
        return [json.loads(row["json"]) for row in reversed(rows)]

    def metrics_of_step(self, run_id: str, step: int) -> dict[str, Any] | None:
        """Return the event of a trained step; None if there is none."""
        row = self.row(
            "SELECT json FROM events WHERE run_id = ? AND kind = 'step' AND json_extract(json, '$.step') = ?",
            (run_id, step),
        )
        return None if row is None else dict(json.loads(row["json"]))

    def is_retried(self, run_id: str) -> bool:
        """Return whether a paused run is resumed automatically when the cause of the pause is gone."""
        return bool(self._newest_event(run_id, "state").get("retried"))

    def drop_reason_of_pause(self, run_id: str) -> str:
        """Return the drop reason of the groups that paused a run; empty if none did."""
        return str(self._newest_event(run_id, "state").get("drop_reason", ""))

    def _newest_event(self, run_id: str, kind: str) -> dict[str, Any]:
        """Return the content of the newest event of a kind; empty if there is none."""
        query = "SELECT json FROM events WHERE run_id = ? AND kind = ? ORDER BY sequence DESC LIMIT 1"
        return dict(json.loads(self.value(query, (run_id, kind)) or "{}"))

    def data_fingerprint(self, run_id: str) -> str:
        """Return the data set's fingerprint at the run's last start or resume; empty if it is not recorded."""
        return self._newest_fact(run_id, "data")

    def function_digests(self, run_id: str) -> str:
        """Return the digests of the reward functions at the last start or resume, as JSON; empty if not recorded."""
        return self._newest_fact(run_id, "functions")

    def bundle(self, run_id: str) -> str:
        """Return the digest of the newest bundle that the run was submitted or resumed with; empty if there is none."""
        return self._newest_fact(run_id, "bundle")

    def end_step(self, run_id: str) -> int:
        """Return the number of steps after which the run ends because its hours are over; 0 without an early end."""
        return int(self._newest_fact(run_id, "end_step") or 0)

    def bundles(self) -> list[str]:
        rows = self.db.execute(
            "SELECT DISTINCT json_extract(json, '$.bundle') AS bundle FROM events WHERE kind = 'state'"
            " AND json_extract(json, '$.bundle') IS NOT NULL"
        )
        return [str(row["bundle"]) for row in rows]

    def _newest_fact(self, run_id: str, name: str) -> str:
        """Return a value from the run's newest state event that has it; empty if none has."""
        fact = self.value(
            f"SELECT json_extract(json, '$.{name}') FROM events WHERE run_id = ? AND kind = 'state'"
            f" AND json_extract(json, '$.{name}') IS NOT NULL ORDER BY sequence DESC LIMIT 1",
            (run_id,),
        )
        return "" if fact is None else str(fact)

    # Payloads

    def payload(self, run_id: str, group_id: int, kind: str = "result", *, last: bool = False) -> Payload | None:
        """Return a group's texts and arrays, or the `prefix` that an earlier attempt returned; None if they were
        removed. With `last`, they are removed from memory, and later calls read them from the disk."""
        row = self.row(
            "SELECT * FROM payloads WHERE run_id = ? AND group_id = ? AND kind = ?", (run_id, group_id, kind)
        )
        return self.payloads.payload(row, last=last) if row else None

    def add_payload(self, run_id: str, group_id: int, kind: str, location: Location) -> None:
        """Record the location of a group's payload. A result must be new; other kinds replace earlier ones."""
        insert = "INSERT" if kind == "result" else "INSERT OR REPLACE"
        self.db.execute(
            f"{insert} INTO payloads VALUES (?, ?, ?, x'', x'', ?, ?, ?, ?, ?, ?)", (run_id, group_id, kind, *location)
        )

    def damaged_payload(self, run_id: str, damaged: DamagedRecord) -> sqlite3.Row | None:
        """Return group and kind of the payload with a damaged record; None if nothing refers to the record."""
        return self.row(
            "SELECT group_id, kind FROM payloads WHERE segment = ? AND run_id = ? AND (start = ? OR start + header_size = ?)",
            (damaged.segment, run_id, damaged.start, damaged.start),
        )

    def remove_prefix(self, run_id: str, group_id: int) -> None:
        self.db.execute(
            "DELETE FROM payloads WHERE run_id = ? AND group_id = ? AND kind = 'prefix'", (run_id, group_id)
        )

    def mean_result_bytes(self, run_id: str) -> float:
        """Return the mean size in bytes of the newest kept results; 0 if there are none."""
        query = (
            "SELECT AVG(COALESCE(header_size, LENGTH(header)) + COALESCE(arrays_size, LENGTH(arrays))) FROM"
            " (SELECT * FROM payloads WHERE run_id = ? AND kind = 'result' ORDER BY group_id DESC LIMIT ?)"
        )
        return float(self.value(query, (run_id, RECENT_RESULTS)) or 0.0)

    def remove_payloads(self, run_id: str, group_id: int) -> None:
        self.note_removed_records(
            self.db.execute(
                "DELETE FROM payloads WHERE run_id = ? AND group_id = ? RETURNING segment, start", (run_id, group_id)
            )
        )
        self.note_removed_records(self.episodes.remove(run_id, group_id))

    def is_pruning_due(self, run_id: str, batch: int) -> bool:
        """Return whether steps before the oldest kept checkpoint have payloads to prune; `batch` is groups per step."""
        return self.counters(run_id).get(PRUNED, 0) < self.checkpoints.oldest_step(run_id) * batch

    def prune(self, run_id: str, batch: int, at_once: int = GROUPS_AT_ONCE) -> None:
        """Remove payloads of up to `at_once` groups that no session will train again, in a transaction."""
        step, index = divmod(self.counters(run_id).get(PRUNED, 0), batch)
        number = min(at_once, batch - index)
        removed = self.rows(
            "DELETE FROM payloads WHERE run_id = ? AND group_id IN (SELECT group_id FROM groups INDEXED BY step_groups"
            " WHERE run_id = ? AND step = ? AND rank_order >= ? AND rank_order < ?) RETURNING segment, start",
            (run_id, run_id, step, index, index + number),
        )
        self.note_removed_records(removed)
        self.count(run_id, PRUNED, number)

    def note_removed_records(self, removed: Iterable[sqlite3.Row]) -> None:
        """Evict removed records, (segment, start), from memory; mark their segments as candidates for removal."""
        for segment, start in list(removed):
            if segment is not None:
                self.payloads.recent.evict(segment, start)
                self.payloads.mark_candidate(segment)

    def remove_unused_segments(self) -> Future[None] | None:
        """Remove some segments without payloads: on a thread, after the sync of the commit that made them unused."""
        unused = [number for number in self.payloads.removal_candidates() if not self._is_used(number)]
        return self.payloads.remove(unused, after=self.sync) if unused else None

    def _is_used(self, segment: int) -> bool:
        return bool(
            self.value(
                "SELECT EXISTS (SELECT 1 FROM payloads INDEXED BY segment_payloads WHERE segment = ?1)"
                " OR EXISTS (SELECT 1 FROM episodes INDEXED BY segment_episodes WHERE segment = ?1)",
                (segment,),
            )
        )

    # Books

    def groups_by_state(self, run_id: str) -> dict[str, int]:
        """Return the number of training groups by state; ended groups are counted durably."""
        counts = self.group_queries.num_open(run_id)
        ended = self.counters(run_id)
        counts |= {name.removeprefix("groups:"): n for name, n in ended.items() if name.startswith("groups:")}
        counts.pop("ever_admitted", None)
        return counts

    def token_books(self, run_id: str) -> dict[str, int]:
        """Return the token accounting: generated = trained + dropped + live; `wasted` are tokens that no commit took,
        or whose stored bytes were lost. Dropped tokens are given by reason too."""
        counters = self.counters(run_id)
        books = {name.removeprefix("tokens:"): n for name, n in counters.items() if name.startswith("tokens:")}
        dropped = sum(n for name, n in books.items() if name.startswith("dropped:"))
        defaults = {"generated": 0, "trained": 0, "wasted": 0}
        return defaults | books | {"dropped": dropped, "live": self.group_queries.open_tokens(run_id)}

    def failures(self, run_id: str) -> dict[str, int]:
        """Return the number of failed attempts by reason, also those of groups that succeeded later."""
        counters = self.counters(run_id).items()
        return {name.removeprefix("failures:"): n for name, n in counters if name.startswith("failures:")}

    def trained_samples(self, run_id: str) -> int:
        """Return the number of completions in trained groups (for a supervised run: 0)."""
        return self.counters(run_id).get("groups:trained", 0) * self.group_queries.completions_per_group(run_id)

    # Members

    def holders(self, lease_role: Role.ValueType = ROLE_ROLLOUT) -> list[tuple[str, Role.ValueType]]:
        """Return the members that hold leases (all of `lease_role`), score tasks or a pending evaluation."""
        queries = {
            "SELECT DISTINCT member_id FROM groups WHERE state = 'leased'": lease_role,
            "SELECT DISTINCT member_id FROM evaluations WHERE done = 0 AND member_id IS NOT NULL": ROLE_ROLLOUT,
            "SELECT DISTINCT scorer_id FROM groups WHERE state = 'generated' AND scorer_id IS NOT NULL": ROLE_REWARD,
        }
        roles = {member_id: role for query, role in queries.items() for (member_id,) in self.rows(query)}
        return list(roles.items())
