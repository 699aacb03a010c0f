"""Stores requested evaluations and their results: the table `evaluations`."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from paceline.services.coordinator.ledger.database import Queries


class Evaluations(Queries):
    """The evaluations; the key is run and step, the smallest version to evaluate. Change them in a transaction."""

    def add(self, run_id: str, step: int) -> None:
        """Add an evaluation by rollout workers."""
        self.db.execute("INSERT INTO evaluations (run_id, step) VALUES (?, ?)", (run_id, step))

    def exists(self, run_id: str, step: int) -> bool:
        return self.row("SELECT 1 FROM evaluations WHERE run_id = ? AND step = ?", (run_id, step)) is not None

    def get(self, run_id: str, step: int) -> sqlite3.Row | None:
        return self.row("SELECT * FROM evaluations WHERE run_id = ? AND step = ?", (run_id, step))

    def has_ended(self, run_id: str, group_class: str) -> bool:
        """Return whether the evaluation of a class of groups has its result."""
        row = self.get(run_id, int(group_class.split(":")[1]))
        return row is not None and bool(row["done"])

    # Pending ones

    def first_pending(self, run_id: str) -> sqlite3.Row | None:
        return self.row("SELECT * FROM evaluations WHERE run_id = ? AND done = 0 ORDER BY step LIMIT 1", (run_id,))

    def pending_steps(self, run_id: str) -> list[int]:
        rows = self.rows("SELECT step FROM evaluations WHERE run_id = ? AND done = 0", (run_id,))
        return [row["step"] for row in rows]

    def pin(self, run_id: str, step: int, member_id: str, session: int, pinned_step: int) -> None:
        self.db.execute(
            "UPDATE evaluations SET member_id = ?, pinned_session = ?, pinned_step = ? WHERE run_id = ? AND step = ?",
            (member_id, session, pinned_step, run_id, step),
        )

    def unpin_member(self, run_id: str, member_id: str) -> None:
        self.db.execute(
            "UPDATE evaluations SET member_id = NULL WHERE run_id = ? AND member_id = ? AND done = 0",
            (run_id, member_id),
        )

    def unpin_all(self, run_id: str) -> None:
        self.db.execute("UPDATE evaluations SET member_id = NULL WHERE run_id = ? AND done = 0", (run_id,))

    # Results

    def finish(self, run_id: str, step: int, result: dict[str, Any]) -> None:
        self.db.execute(
            "UPDATE evaluations SET done = 1, result_json = ? WHERE run_id = ? AND step = ?",
            (json.dumps(result), run_id, step),
        )

    def add_result(self, run_id: str, step: int, result: dict[str, Any]) -> None:
        """Record the learner's evaluation of the version of `step`."""
        self.db.execute(
            "INSERT OR REPLACE INTO evaluations (run_id, step, done, result_json) VALUES (?, ?, 1, ?)",
            (run_id, step, json.dumps(result)),
        )

    def results(self, run_id: str) -> list[dict[str, Any]]:
        """Return the results of the finished evaluations, in the order of their steps."""
        rows = self.db.execute(
            "SELECT result_json FROM evaluations WHERE run_id = ? AND done = 1 ORDER BY step", (run_id,)
        )
        return [json.loads(row["result_json"]) for row in rows]

    def ended_steps(self, run_id: str) -> list[int]:
        """Return the steps of finished evaluations by rollout workers, ascending."""
        rows = self.rows(
            "SELECT step FROM evaluations WHERE run_id = ? AND done = 1 AND pinned_step IS NOT NULL ORDER BY step",
            (run_id,),
        )
        return [row["step"] for row in rows]

    def finished_steps(self, run_id: str) -> set[int]:
        """Return the steps for which finished evaluations were requested, and those of the evaluated versions."""
        rows = self.rows("SELECT step, pinned_step FROM evaluations WHERE run_id = ? AND done = 1", (run_id,))
        return {step for row in rows for step in row}
