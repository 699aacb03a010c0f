"""With `logger.keep_samples: false`: forgets texts and arrays of trained groups that no session will train again.

Some at a time, between the exchange's transactions, from the first step on; how far that has come is a durable counter.
"""

from __future__ import annotations

from services.coordinator.ledger.ledger import Ledger

GROUPS_AT_ONCE = 512
COUNTER = "pruned:groups"


def is_due(ledger: Ledger, run_id: str, batch: int) -> bool:
    """Whether there is anything to forget: steps of `batch` groups each that every kept checkpoint has behind it."""
    return ledger.counters(run_id).get(COUNTER, 0) < ledger.checkpoints.oldest_step(run_id) * batch


def prune(ledger: Ledger, run_id: str, batch: int) -> None:
    """Forgets what up to GROUPS_AT_ONCE groups hold, when it is due. Inside a transaction."""
    pruned = ledger.counters(run_id).get(COUNTER, 0)
    step, place = divmod(pruned, batch)
    number = min(GROUPS_AT_ONCE, batch - place)
    removed = ledger.db.execute(
        "DELETE FROM payloads WHERE run_id = ? AND group_id IN (SELECT group_id FROM groups INDEXED BY step_groups"
        " WHERE run_id = ? AND step = ? AND rank_order >= ? AND rank_order < ?) RETURNING segment, start",
        (run_id, run_id, step, place, place + number),
    )
    ledger.note_removed_records(removed)
    ledger.count(run_id, COUNTER, number)
