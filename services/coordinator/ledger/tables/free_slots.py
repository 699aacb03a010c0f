"""Slots of dropped groups, which the next admitted groups inherit: the table `free_slots`."""

from __future__ import annotations

import sqlite3


class FreeSlots:
    """Methods that write run inside a transaction of the ledger."""

    def __init__(self, db: sqlite3.Connection):
        self._db = db

    def exist(self, run_id: str) -> bool:
        """Return whether the run has a free slot."""
        row = self._db.execute("SELECT 1 FROM free_slots WHERE run_id = ? LIMIT 1", (run_id,)).fetchone()
        return row is not None

    def first(self, run_id: str, limit: int) -> list[int]:
        """Return the lowest free slots, in order."""
        rows = self._db.execute(
            "SELECT slot FROM free_slots WHERE run_id = ? ORDER BY slot LIMIT ?", (run_id, limit)
        ).fetchall()
        return [row["slot"] for row in rows]

    def add(self, run_id: str, slot: int) -> None:
        """Free a slot."""
        self._db.execute("INSERT OR IGNORE INTO free_slots VALUES (?, ?)", (run_id, slot))

    def remove(self, run_id: str, slot: int) -> None:
        """Take a free slot."""
        self._db.execute("DELETE FROM free_slots WHERE run_id = ? AND slot = ?", (run_id, slot))
