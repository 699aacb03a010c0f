"""Receipts, by which each rank reports the part of a batch that it trained: the table `receipts`."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable

from paceline.v1 import exchange_pb2 as pb


class Receipts:
    """Key by run, session, step and rank. Methods that write run inside a transaction of the ledger."""

    def __init__(self, db: sqlite3.Connection):
        self._db = db

    def add(self, run_id: str, session: int, receipt: pb.Receipt) -> None:
        """Record a receipt, in the place of an earlier one of the same rank."""
        self._db.execute(
            "INSERT OR REPLACE INTO receipts"
            " (run_id, session, step, rank, world_size, group_ids, digests, tokens, scores_digests)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                run_id,
                session,
                receipt.step,
                receipt.rank,
                receipt.world_size,
                json.dumps([group.group_id for group in receipt.groups]),
                json.dumps([group.digest for group in receipt.groups]),
                receipt.tokens,
                json.dumps([group.scores_digest for group in receipt.groups]),
            ),
        )

    def count(self, run_id: str, session: int, step: int, world_size: int) -> int:
        """Return the number of ranks, of `world_size`, that have a receipt of the step in the session."""
        row = self._db.execute(
            "SELECT COUNT(*) AS n FROM receipts WHERE run_id = ? AND session = ? AND step = ? AND world_size = ?",
            (run_id, session, step, world_size),
        ).fetchone()
        return int(row["n"])

    def has_rank_0(self, run_id: str, session: int, step: int) -> bool:
        """Return whether rank 0 of the session has trained the step."""
        row = self._db.execute(
            "SELECT 1 FROM receipts WHERE run_id = ? AND session = ? AND step = ? AND rank = 0",
            (run_id, session, step),
        ).fetchone()
        return row is not None

    def has_any(self, run_id: str, sessions: Iterable[int], step: int) -> bool:
        """Return whether any rank of these sessions has trained its part of the step."""
        query = "SELECT 1 FROM receipts WHERE run_id = ? AND session = ? AND step = ? LIMIT 1"
        return any(self._db.execute(query, (run_id, session, step)).fetchone() for session in sessions)

    def remove(self, run_id: str, sessions: Iterable[int], step: int) -> None:
        """Remove the receipts of these sessions for the step."""
        self._db.executemany(
            "DELETE FROM receipts WHERE run_id = ? AND session = ? AND step = ?",
            [(run_id, session, step) for session in sessions],
        )
