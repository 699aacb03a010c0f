"""Steps that learner sessions have in hand, and those at which sessions ended by a fault: the table `session_faults`."""

from __future__ import annotations

import sqlite3
from typing import NamedTuple

IN_HAND = "in hand"
"""Kind of a row that is no fault (yet): the session was given its part of the step, the message is its number of ranks."""


class SessionFault(NamedTuple):
    """The end of a session."""

    session: int
    step: int
    kind: str
    """Type of the exception, or a kind of `exchange/batches/session_faults.py`."""
    message: str


class SessionFaults:
    """Key by run and session. Methods that write run inside a transaction of the ledger."""

    def __init__(self, db: sqlite3.Connection):
        self._db = db

    def set_in_hand(self, run_id: str, session: int, step: int, world_size: int) -> None:
        """Record the step that a session trains, unless the session has a fault."""
        self._db.execute(
            "INSERT INTO session_faults (run_id, session, step, kind, message) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT DO UPDATE SET step = excluded.step, message = excluded.message WHERE kind = excluded.kind",
            (run_id, session, step, IN_HAND, str(world_size)),
        )

    def in_hand(self, run_id: str) -> tuple[int, int, int] | None:
        """Return session, step and number of ranks of the newest session that has a step in hand."""
        row = self._db.execute(
            "SELECT session, step, message FROM session_faults WHERE run_id = ? AND kind = ? ORDER BY session DESC LIMIT 1",
            (run_id, IN_HAND),
        ).fetchone()
        return None if row is None else (row["session"], row["step"], int(row["message"]))

    def add(self, run_id: str, fault: SessionFault, *, outranks: str) -> bool:
        """Record a fault. Return False when the session has an earlier one, which a fault of the kind `outranks` replaces."""
        added = self._db.execute(
            "INSERT INTO session_faults (run_id, session, step, kind, message) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT DO UPDATE SET step = excluded.step, kind = excluded.kind, message = excluded.message"
            " WHERE kind = ? OR excluded.kind = ?",
            (run_id, *fault, IN_HAND, outranks),
        ).rowcount
        return added > 0

    def newest(self, run_id: str, limit: int) -> list[SessionFault]:
        """Return the newest faults, the newest first."""
        rows = self._db.execute(
            "SELECT session, step, kind, message FROM session_faults WHERE run_id = ? AND kind != ?"
            " ORDER BY session DESC LIMIT ?",
            (run_id, IN_HAND, limit),
        ).fetchall()
        return [SessionFault(*row[:4]) for row in rows]

    def remove_step(self, run_id: str, step: int) -> None:
        """Remove all rows of a step that is trained."""
        self._db.execute("DELETE FROM session_faults WHERE run_id = ? AND step = ?", (run_id, step))

    def remove_in_hand(self, run_id: str, session: int) -> None:
        """Remove the step that a session has in hand, because the session ended in good order."""
        self._db.execute(
            "DELETE FROM session_faults WHERE run_id = ? AND session = ? AND kind = ?",
            (run_id, session, IN_HAND),
        )

    def remove_run(self, run_id: str) -> None:
        """Remove all rows of a run."""
        self._db.execute("DELETE FROM session_faults WHERE run_id = ?", (run_id,))
