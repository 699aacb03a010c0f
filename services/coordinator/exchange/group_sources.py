"""The sources of groups: their values of the data set's column `data.source_key`."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from paceline.services.coordinator.exchange.state import ActiveRun, Exchange


def sources_of(exchange: Exchange, run: ActiveRun, rows: Sequence[sqlite3.Row]) -> list[object] | None:
    """Return the source of each group; None where the run names no such column."""
    key = run.spec.data.source_key
    if key is None:
        return None
    values = exchange.group_queries.column_values(run.run_id, [row["group_id"] for row in rows], key)
    return [values.get(row["group_id"]) for row in rows]
