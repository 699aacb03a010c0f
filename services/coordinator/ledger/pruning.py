"""With `logger.keep_samples: false`: removal of texts and arrays of trained groups that no session will train again.

Some groups at a time, between the exchange's transactions, from the first step on; a durable counter has the progress.
"""

from __future__ import annotations

from paceline.services.coordinator.ledger.ledger import Ledger

GROUPS_AT_ONCE = 512
COUNTER = "pruned:groups"


def is_due(ledger: Ledger, run_id: str, batch: int) -> bool:
    """Return whether there is anything to remove: groups of steps that every kept checkpoint has behind it. `batch`
    groups make a step.
    """
    return ledger.counters(run_id).get(COUNTER, 0) < ledger.checkpoints.oldest_step(run_id) * batch


def prune(ledger: Ledger, run_id: str, batch: int) -> None:
    """Remove the payloads of up to GROUPS_AT_ONCE groups, when it is due. Inside a transaction."""
    pruned = ledger.counters(run_id).get(COUNTER, 0)
    step, index = divmod(pruned, batch)
    number = min(GROUPS_AT_ONCE, batch - index)
    removed = ledger.db.execute(
        "DELETE FROM payloads WHERE run_id = ? AND group_id IN (SELECT group_id FROM groups INDEXED BY step_groups"
        " WHERE run_id = ? AND step = ? AND rank_order >= ? AND rank_order < ?) RETURNING segment, start",
        (run_id, run_id, step, index, index + number),
    )
    ledger.note_removed_records(removed)
    ledger.count(run_id, COUNTER, number)
