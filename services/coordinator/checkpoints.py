"""Which checkpoint a session begins from.

The promise: a checkpoint that cannot be loaded ends no run. It is marked in the ledger with the reason, its files stay, and
the next session begins from the next older one, in the end from step 0. A person who resumes the run clears the marks.
"""

from __future__ import annotations

from typing import NamedTuple

from paceline.errors import NotFound
from services.coordinator.exchange import ActiveRun
from services.coordinator.ledger import Ledger


class Start(NamedTuple):
    """Where a session begins. At step 0 there is no checkpoint: the weights are the model's."""

    step: int = 0
    path: str = ""
    sha256: str = ""
    chain: str = ""


def starting_point(ledger: Ledger, run: ActiveRun) -> Start:
    """The newest checkpoint that can be loaded, or step 0. Raises NotFound when the samples from there on are gone."""
    row = ledger.newest_checkpoint(run.run_id)
    start = Start() if row is None else Start(row["step"], row["path"], row["sha256"], row["chain"])
    gone = None if run.spec.logger.keep_samples else _first_step_without_samples(ledger, run, start.step)
    if gone is None:
        return start
    damaged = ledger.damaged_checkpoints(run.run_id)
    reasons = "; ".join(f"{row['path']}: {row['damaged']}" for row in damaged) or "none is registered"
    raise NotFound(
        f"no checkpoint can be loaded from which training could go on ({reasons}), and the samples of step {gone} were "
        f"not kept (logger.keep_samples is false). Put a checkpoint back, then `paceline resume {run.run_id}`"
    )


def mark_damaged(ledger: Ledger, run_id: str, path: str, reason: str) -> bool:
    """No session begins from this checkpoint until the marks are cleared; False if it is none of the run's. Inside a
    transaction."""
    marked = ledger.db.execute(
        "UPDATE checkpoints SET damaged = ? WHERE run_id = ? AND path = ?", (reason, run_id, path)
    )
    return marked.rowcount > 0


def clear_marks(ledger: Ledger, run_id: str) -> None:
    """Every checkpoint may be tried again. Inside a transaction."""
    ledger.db.execute("UPDATE checkpoints SET damaged = '' WHERE run_id = ? AND damaged != ''", (run_id,))


def _first_step_without_samples(ledger: Ledger, run: ActiveRun, start: int) -> int | None:
    """The first step from `start` that was trained and whose groups are not kept any more."""
    row = ledger.db.execute(
        "SELECT step FROM groups g INDEXED BY step_groups WHERE run_id = ? AND step IS NOT NULL AND step >= ?"
        " AND step < ? AND NOT EXISTS (SELECT 1 FROM payloads p WHERE p.run_id = g.run_id AND p.group_id = g.group_id"
        " AND p.kind = 'result') ORDER BY step LIMIT 1",
        (run.run_id, start, ledger.run(run.run_id)["next_step"]),
    ).fetchone()
    return None if row is None else int(row["step"])
