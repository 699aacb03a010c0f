"""Payloads that cannot be read: a group that was not trained yet is generated again, and the run goes on.

A group whose bytes are lost before any session trained it goes back to admitted. If it is in a fixed batch, that is
fixed anew. A lost prefix, which an earlier worker returned, is removed. A sample with a lost turn begins again. Only bytes that a session has trained are
irreplaceable: the run is paused, because another session would have to train them again.
"""

from __future__ import annotations

import sqlite3

from paceline.services.coordinator.exchange.batches.selection import take_apart
from paceline.services.coordinator.exchange.journals import end_life
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange
from paceline.services.coordinator.ledger.groups import State
from paceline.services.coordinator.ledger.segments import DamagedRecord
from paceline.services.coordinator.ledger.tables.episodes import RESTARTED
from paceline.v1 import exchange_pb2 as pb


def handle_damaged(exchange: Exchange, run: ActiveRun, damaged: DamagedRecord) -> None:
    """Handle a damaged record; do nothing when the ledger does not refer to it any more."""
    if _end_damaged_life(exchange, run, damaged):
        return
    found = exchange.ledger.damaged_payload(run.run_id, damaged)
    row = exchange.group(run, found["group_id"]) if found else None
    if found is None or row is None:
        return
    if found["kind"] == "prefix":
        exchange.ledger.remove_prefix(run.run_id, row["group_id"])
        exchange.groups.set_prefix_step(run.run_id, row["group_id"], None)
        _count(exchange, run, f"what an earlier worker began of group {row['group_id']} is lost: {damaged}")
        return
    if row["state"] == State.TRAINED or (
        row["state"] == State.BATCHED
        and exchange.ledger.receipts.has_any(run.run_id, exchange.sessions(run), row["step"])
    ):
        exchange.pause(
            run,
            f"group {row['group_id']} of step {row['step']} cannot be read, and a session has trained it already: {damaged}. "
            "`paceline resume` goes on once the file is as it was",
        )
        return
    if row["state"] == State.BATCHED:
        take_apart(exchange, run, row["step"], [row["group_id"]], f"damaged: {damaged}")
    if row["class"] != "train" and exchange.ledger.evaluations.has_ended(run.run_id, row["class"]):
        exchange.drop(run, row, "damaged")  # its result is on record, and nobody would generate it again
        return
    if row["state"] in (State.GENERATED, State.SCORED, State.BATCHED):
        _generate_again(exchange, run, row)
        _count(exchange, run, f"group {row['group_id']} is generated again: {damaged}")


def _end_damaged_life(exchange: Exchange, run: ActiveRun, damaged: DamagedRecord) -> bool:
    """End the life of a sample with a turn that cannot be read; return whether the record is a turn. Its holder is answered
    that the life has ended."""
    turn = exchange.ledger.episodes.damaged(run.run_id, damaged)
    row = exchange.group(run, turn["group_id"]) if turn is not None else None
    if turn is None or row is None:
        return False
    end_life(exchange, run, row, turn["sample"], RESTARTED, str(damaged))
    name = f"sample {turn['sample']} of group {row['group_id']}"
    _count(exchange, run, f"{name} begins again, because its turn {turn['turn']} is lost: {damaged}")
    return True


def release_unsent(exchange: Exchange, run: ActiveRun, reply: pb.ExchangeReply, member_id: str) -> None:
    """Revoke the leases or tasks of a reply that could not be sent, so that its request gets others."""
    for task in reply.task.tasks:
        exchange.groups.end_task(run.run_id, task.group_id, member_id, task.attempt)
    for lease in reply.lease.leases:
        exchange.groups.end_lease(run.run_id, lease.group_id, member_id, lease.attempt)


def _generate_again(exchange: Exchange, run: ActiveRun, row: sqlite3.Row) -> None:
    """Admit a group again as before its generation; its tokens are wasted."""
    if row["class"] == "train":
        exchange.ledger.count(run.run_id, "tokens:generated", -row["tokens"])
        exchange.ledger.count(run.run_id, "tokens:wasted", row["tokens"])
    exchange.ledger.remove_payloads(run.run_id, row["group_id"])
    exchange.groups.generate_again(run.run_id, row["group_id"])
    exchange.slots_changed()


def _count(exchange: Exchange, run: ActiveRun, message: str) -> None:
    if number := exchange.count_failure(run, "damaged"):
        exchange.warn(f"{message} ({number} damaged payloads in this run)")
