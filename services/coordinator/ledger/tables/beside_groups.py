"""Tables beside `groups`: crashes of workers that held a group, and slots of dropped groups, which the next admitted ones inherit."""

from __future__ import annotations

from paceline.services.coordinator.ledger.connection import LedgerFile
from paceline.services.coordinator.ledger.database import Queries

KEY = "deaths"
"""Key of the counts that the ledger keeps in memory until one changes."""


class Deaths:
    """Each method that writes runs inside a transaction of the ledger."""

    def __init__(self, ledger: LedgerFile):
        self._ledger = ledger

    def add(self, run_id: str, group_id: int, name: str) -> int:
        """Record a death for a group; the same name counts once. Return the group's deaths."""
        self._ledger.db.execute(
            "INSERT OR IGNORE INTO deaths (run_id, group_id, member_id) VALUES (?, ?, ?)",
            (run_id, group_id, name),
        )
        self._ledger.invalidate(KEY)
        return int(
            self._ledger.value("SELECT COUNT(*) AS n FROM deaths WHERE run_id = ? AND group_id = ?", (run_id, group_id))
        )

    def remove_member(self, member_id: str) -> None:
        """Remove the deaths of a member that is alive after all."""
        self._ledger.db.execute("DELETE FROM deaths WHERE member_id = ?", (member_id,))
        self._ledger.invalidate(KEY)

    def remove_group(self, run_id: str, group_id: int) -> None:
        self._ledger.db.execute("DELETE FROM deaths WHERE run_id = ? AND group_id = ?", (run_id, group_id))
        self._ledger.invalidate(KEY)

    def remove_run(self, run_id: str) -> None:
        self._ledger.db.execute("DELETE FROM deaths WHERE run_id = ?", (run_id,))
        self._ledger.invalidate(KEY)

    def of_run(self, run_id: str) -> dict[int, int]:
        """Return the number of deaths of each group that has any; read once, until one changes."""

        def read() -> dict[str, dict[int, int]]:
            deaths: dict[str, dict[int, int]] = {}
            for run, group_id, number in self._ledger.db.execute(
                "SELECT run_id, group_id, COUNT(*) FROM deaths GROUP BY run_id, group_id"
            ):
                deaths.setdefault(run, {})[group_id] = number
            return deaths

        return self._ledger.cached(KEY, read).get(run_id, {})


class FreeSlots(Queries):
    """Methods that write run inside a transaction of the ledger."""

    def exist(self, run_id: str) -> bool:
        """Return whether the run has a free slot."""
        return self.row("SELECT 1 FROM free_slots WHERE run_id = ? LIMIT 1", (run_id,)) is not None

    def first(self, run_id: str, limit: int) -> list[int]:
        """Return the lowest free slots, in order."""
        rows = self.rows("SELECT slot FROM free_slots WHERE run_id = ? ORDER BY slot LIMIT ?", (run_id, limit))
        return [row["slot"] for row in rows]

    def add(self, run_id: str, slot: int) -> None:
        """Free a slot."""
        self.db.execute("INSERT OR IGNORE INTO free_slots VALUES (?, ?)", (run_id, slot))

    def remove(self, run_id: str, slot: int) -> None:
        self.db.execute("DELETE FROM free_slots WHERE run_id = ? AND slot = ?", (run_id, slot))
