"""Fixed batches, and those that were fixed anew: the tables `batches` and `replaced_batches`."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class NewBatch(NamedTuple):
    """A batch that is fixed."""

    digest: str
    """Digest over the digests of its groups, in order."""
    chain: str
    """Hash chain over this batch and all before it."""
    metrics: Mapping[str, float]
    revision: int
    """Number of batches of the step that it replaces."""


class Batches:
    """Key by run and step. Methods that write run inside a transaction of the ledger."""

    def __init__(self, db: sqlite3.Connection):
        self._db = db

    def get(self, run_id: str, step: int) -> sqlite3.Row | None:
        """Return the fixed batch of a step; None also for a run without batches."""
        row: sqlite3.Row | None = self._db.execute(
            "SELECT * FROM batches WHERE run_id = ? AND step = ?", (run_id, step)
        ).fetchone()
        return row

    def add(self, run_id: str, step: int, batch: NewBatch) -> None:
        """Record the batch of a step that has none."""
        self._db.execute(
            "INSERT INTO batches (run_id, step, digest, chain, metrics_json, revision, with_scores)"
            " VALUES (?, ?, ?, ?, ?, ?, 1)",
            (
                run_id,
                step,
                batch.digest,
                batch.chain,
                json.dumps(batch.metrics),
                batch.revision,
            ),
        )

    def mark_trained(self, run_id: str, step: int) -> None:
        """Record that all ranks have trained the batch."""
        self._db.execute("UPDATE batches SET trained = 1 WHERE run_id = ? AND step = ?", (run_id, step))

    def replace(
        self, batch: sqlite3.Row, group_ids: Sequence[int], dropped_ids: Collection[int], reason: str
    ) -> None:
        """Move a batch to the replaced ones. `group_ids` are in its order, `dropped_ids` those that the next one lacks."""
        key = (batch["run_id"], batch["step"])
        self._db.execute(
            "INSERT INTO replaced_batches (run_id, step, revision, digest, chain, group_ids, dropped_ids, reason)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *key,
                batch["revision"],
                batch["digest"],
                batch["chain"],
                json.dumps(group_ids),
                json.dumps(sorted(dropped_ids)),
                reason,
            ),
        )
        self._db.execute("DELETE FROM batches WHERE run_id = ? AND step = ?", key)

    def last_replaced(self, run_id: str, step: int) -> sqlite3.Row | None:
        """Return revision and chain of the newest batch of the step that was replaced."""
        row: sqlite3.Row | None = self._db.execute(
            "SELECT revision, chain FROM replaced_batches WHERE run_id = ? AND step = ? ORDER BY revision DESC LIMIT 1",
            (run_id, step),
        ).fetchone()
        return row
