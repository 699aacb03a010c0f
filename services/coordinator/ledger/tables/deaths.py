"""Workers that crashed while they held a group: the table `deaths`."""

from __future__ import annotations

from paceline.services.coordinator.ledger.connection import LedgerFile

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
        row = self._ledger.db.execute(
            "SELECT COUNT(*) AS n FROM deaths WHERE run_id = ? AND group_id = ?", (run_id, group_id)
        ).fetchone()
        return int(row["n"])

    def remove_member(self, member_id: str) -> None:
        """Remove the deaths of a member that is alive after all."""
        self._ledger.db.execute("DELETE FROM deaths WHERE member_id = ?", (member_id,))
        self._ledger.invalidate(KEY)

    def remove_group(self, run_id: str, group_id: int) -> None:
        """Remove the deaths that are recorded for a group."""
        self._ledger.db.execute("DELETE FROM deaths WHERE run_id = ? AND group_id = ?", (run_id, group_id))
        self._ledger.invalidate(KEY)

    def remove_run(self, run_id: str) -> None:
        """Remove the deaths of a run that has ended."""
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
