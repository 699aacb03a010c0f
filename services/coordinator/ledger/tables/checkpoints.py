"""Stores complete checkpoints in the table `checkpoints`, and converts paths between the ledger and the machine. Paths
are stored relative to the ledger's folder, so that the whole folder can be moved. Paths outside of it are stored as
`file://` URLs, which do not move; other URLs are stored unchanged. A copy therefore never reads the original's
files."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from paceline.files.storage import is_url
from paceline.services.coordinator.ledger.database import Queries
from paceline.v1.worker_pb2 import CheckpointReport

FILE_SCHEME = "file://"


def stored(base: Path, path: str) -> str:
    """Return `path` in the ledger's form; `base` is the ledger's folder."""
    if is_url(path) or not os.path.isabs(path):
        return path
    inside = os.path.relpath(path, base)
    if inside == os.pardir or inside.startswith(os.pardir + os.sep):
        return FILE_SCHEME + path
    return inside


def resolved(base: Path, path: str) -> str:
    """Return the current path, an absolute path or a URL; empty if `path` is empty."""
    if not path or is_url(path):
        return path.removeprefix(FILE_SCHEME)
    return str(base / path)


class Checkpoint(NamedTuple):
    session: int
    step: int
    path: str
    """Absolute path or URL of the checkpoint."""
    sha256: str
    """SHA-256 of the checkpoint's manifest."""
    chain: str
    damaged: str
    """Reason why the checkpoint cannot be loaded; empty if it can."""


class Checkpoints(Queries):
    """The registered checkpoints; the key is run, session and step. Call changing methods inside a transaction."""

    def __init__(self, db: sqlite3.Connection, folder: Path):
        super().__init__(db)
        self._folder = folder

    def add(self, report: CheckpointReport) -> bool:
        """Register a complete checkpoint; return False if it was registered before."""
        registered = self.row(
            "SELECT 1 FROM checkpoints WHERE run_id = ? AND session = ? AND step = ? AND sha256 = ?",
            (report.run_id, report.session, report.step, report.sha256),
        )
        if registered:
            return False
        path = stored(self._folder, report.path)
        self.db.execute(
            "INSERT OR REPLACE INTO checkpoints (run_id, session, step, path, sha256, chain) VALUES (?, ?, ?, ?, ?, ?)",
            (report.run_id, report.session, report.step, path, report.sha256, report.chain),
        )
        return True

    def kept(self, run_id: str) -> list[Checkpoint]:
        """Return a run's checkpoints that are not removed, also damaged ones, in the order of session and step."""
        rows = self.db.execute(
            "SELECT * FROM checkpoints WHERE run_id = ? AND removed = 0 ORDER BY session, step", (run_id,)
        )
        return [self.from_row(row) for row in rows]

    def newest(self, run_id: str) -> Checkpoint | None:
        """Return the loadable checkpoint of the highest trained step whose chain agrees with the ledger's; None if
        there is none. A checkpoint that is ahead of the receipts is skipped: the step before it would never get
        receipts."""
        row = self.row(
            "SELECT c.* FROM checkpoints c JOIN runs r ON r.run_id = c.run_id"
            " LEFT JOIN batches b ON b.run_id = c.run_id AND b.step = c.step - 1"
            " WHERE c.run_id = ? AND c.removed = 0 AND c.damaged = '' AND c.step <= r.next_step"
            " AND c.chain = COALESCE(b.chain, '')"
            " ORDER BY c.step DESC, c.session DESC LIMIT 1",
            (run_id,),
        )
        return None if row is None else self.from_row(row)

    def oldest_step(self, run_id: str) -> int:
        """Return the number of steps before the oldest kept, loadable checkpoint; 0 if there is none."""
        return int(
            self.value(
                "SELECT COALESCE(MIN(step), 0) AS step FROM checkpoints WHERE run_id = ? AND removed = 0 AND damaged = ''",
                (run_id,),
            )
        )

    def paths(self, run_id: str) -> set[str]:
        """Return the paths of all checkpoints ever registered for a run, removed ones included."""
        rows = self.db.execute("SELECT * FROM checkpoints WHERE run_id = ?", (run_id,))
        return {self.from_row(row).path for row in rows}

    def mark_removed(self, run_id: str, checkpoints: Iterable[Checkpoint]) -> None:
        """Record that checkpoints are no longer kept; their files may be deleted after the commit."""
        self.db.executemany(
            "UPDATE checkpoints SET removed = 1 WHERE run_id = ? AND session = ? AND step = ?",
            [(run_id, each.session, each.step) for each in checkpoints],
        )

    def mark_damaged(self, run_id: str, checkpoints: Iterable[Checkpoint], reason: str) -> None:
        self.db.executemany(
            "UPDATE checkpoints SET damaged = ? WHERE run_id = ? AND session = ? AND step = ?",
            [(reason, run_id, each.session, each.step) for each in checkpoints],
        )

    def clear_damage(self, run_id: str) -> None:
        self.db.execute("UPDATE checkpoints SET damaged = '' WHERE run_id = ? AND damaged != ''", (run_id,))

    def from_row(self, row: sqlite3.Row) -> Checkpoint:
        path = resolved(self._folder, row["path"])
        return Checkpoint(row["session"], row["step"], path, row["sha256"], row["chain"], row["damaged"])
