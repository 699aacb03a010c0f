"""Runs of which only other tables have rows: their specs are nowhere else in the ledger."""

from __future__ import annotations

import sqlite3

LOST = "its row with the spec is lost, and no command finds the run; only a backup has it"
TABLES = ("groups", "batches", "events")


def lost_runs(db: sqlite3.Connection) -> list[str]:
    """Return the ids of these runs."""
    others = " UNION ".join(f"SELECT run_id FROM {table}" for table in TABLES)
    rows = db.execute(f"SELECT run_id FROM ({others}) EXCEPT SELECT run_id FROM runs ORDER BY run_id")
    return [row[0] for row in rows.fetchall()]
