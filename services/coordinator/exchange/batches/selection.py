"""Selection of the scored groups that make the batch of a step.

A batch that is fixed does not change while a session may train it. Before any session has, it can be taken apart
because of some of its groups (damaged ones, or those that a person drops): the batch that is fixed next is its next
revision, under a further link of the chain, and the replaced one stays on record.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection

from paceline.services.coordinator.exchange.admission import must_wait
from paceline.services.coordinator.exchange.batches.batch_metrics import batch_metrics
from paceline.services.coordinator.exchange.group_sources import sources_of
from paceline.services.coordinator.exchange.state import BATCH_DUE, ActiveRun, Exchange
from paceline.services.coordinator.ledger.batch_chain import batch_digest, extend_chain
from paceline.services.coordinator.ledger.groups import State
from paceline.services.coordinator.ledger.tables.batches import NewBatch


def fix_if_due(exchange: Exchange, run: ActiveRun, now_s: float) -> bool:
    """Fix the first batch that is not fixed, if it was asked for and is complete; return False if it has to wait.

    However many ranks ask in a transaction, it is checked once, until a group is scored.
    """
    row = exchange.ledger.run(run.run_id)
    if row["next_batch"] not in exchange.first_requested_s or row["next_batch"] > row["next_step"]:
        return False
    due = exchange.ledger.decided(BATCH_DUE, lambda: fix(exchange, run, now_s))
    if due:
        exchange.ledger.invalidate(BATCH_DUE)
    return due


def fix(exchange: Exchange, run: ActiveRun, now_s: float) -> bool:
    """Fix the first batch that is not fixed, if it is complete; return False if it has to wait."""
    row = exchange.ledger.run(run.run_id)
    step = row["next_batch"]
    chosen: list[sqlite3.Row] | None
    if run.spec.async_grpo.order == "in_order":  # the groups whose slots belong to the step
        chosen = exchange.group_queries.scored_in(
            run.run_id, step * run.batch_size, (step + 1) * run.batch_size
        )
    else:
        chosen = _ready_first(exchange, run, step, now_s)
    if chosen is None or len(chosen) < run.batch_size:
        return False
    replaced = exchange.ledger.batches.last_replaced(run.run_id, step)
    revision, chain = (replaced["revision"] + 1, replaced["chain"]) if replaced else (0, row["chain"])
    digest = batch_digest(chosen)
    wait_s = now_s - exchange.first_requested_s.get(step, now_s)
    metrics = batch_metrics(run.spec, chosen, step, sources_of(exchange, run, chosen)) | {
        "learner_wait_s": wait_s
    }
    batch = NewBatch(digest, extend_chain(chain, step, digest), metrics, revision)
    exchange.ledger.batches.add(run.run_id, step, batch)
    exchange.groups.batch(run.run_id, step, [group["group_id"] for group in chosen])
    exchange.slots_changed()
    exchange.ledger.update_run(run.run_id, next_batch=step + 1, dropped_in_a_row=0)
    exchange.ledger.invalidate(BATCH_DUE)
    for times_s in (exchange.first_requested_s, exchange.first_complete_s):
        for passed in [s for s in times_s if s <= step]:
            del times_s[passed]
    return True


def take_apart(
    exchange: Exchange, run: ActiveRun, step: int, taken_out: Collection[int], reason: str
) -> None:
    """Replace the batch of `step`, which no session has trained: its groups return to `scored`, with their scores, and the next batch
    of the step, without the groups in `taken_out`, is its next revision.
    """
    ledger = exchange.ledger
    batch = ledger.batches.get(run.run_id, step)
    assert batch is not None
    group_ids = [group["group_id"] for group in exchange.group_queries.of_step(run.run_id, step)]
    ledger.batches.replace(batch, group_ids, taken_out, reason)
    ledger.receipts.remove(run.run_id, exchange.sessions(run), step)  # of ranks whose session then ended
    exchange.groups.unbatch(run.run_id, step, group_ids)
    ledger.update_run(run.run_id, next_batch=step)
    ledger.invalidate(BATCH_DUE)
    exchange.slots_changed()


def _ready_first(exchange: Exchange, run: ActiveRun, step: int, now_s: float) -> list[sqlite3.Row] | None:
    """Return the oldest scored groups, when there are enough and no live group has to be waited for."""
    spec = run.spec.async_grpo
    if exchange.group_queries.num_scored(run.run_id) < run.batch_size:
        return None
    scored = exchange.group_queries.scored(run.run_id)
    for group in scored:
        if step - group["oldest_step"] > spec.hard_max_age_steps:
            exchange.drop(run, group, "stale")
    usable = [group for group in scored if step - group["oldest_step"] <= spec.hard_max_age_steps]
    if len(usable) < run.batch_size:
        return None
    ready_s = exchange.first_complete_s.setdefault(step, now_s)
    if now_s - ready_s < spec.late_wait_s and must_wait(_live(exchange, run), step, run.max_age):
        return None
    return usable[: run.batch_size]


def _live(exchange: Exchange, run: ActiveRun) -> list[int]:
    """Return the oldest version that the tokens of each live group can have: groups that are leased, or that have no
    scores yet. Groups that are leased to a worker that may be gone are left out.
    """
    rows, suspected = exchange.group_queries.in_progress(run.run_id), exchange.suspected
    return [
        row["oldest"] for row in rows if row["state"] != State.LEASED or row["member_id"] not in suspected
    ]
