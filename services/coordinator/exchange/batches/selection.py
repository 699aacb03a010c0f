"""Selects the scored groups of a step's batch, and takes batches apart.

A fixed batch does not change while a session may train it. Before that it can be taken apart because groups are
damaged, or because a person drops groups. The next batch of the step is its next revision, with a further link of the
chain, and the ledger keeps the replaced batch. If the bytes of a group are lost before a session trained it, the group
returns to `admitted`; a lost prefix is removed, and a sample with a lost turn begins again. If a session has trained
the lost bytes, the run is paused, because another session would have to train the same bytes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence

from paceline.errors import Conflict, InvalidInput
from paceline.services.coordinator.exchange.admission import must_wait
from paceline.services.coordinator.exchange.batch_metrics import batch_metrics, sources_of
from paceline.services.coordinator.exchange.batches import session_faults
from paceline.services.coordinator.exchange.state import BATCH_DUE, ActiveRun, Exchange, class_of
from paceline.services.coordinator.exchange.turn_logs import end_life
from paceline.services.coordinator.ledger.groups import State
from paceline.services.coordinator.ledger.segments import DamagedRecord
from paceline.services.coordinator.ledger.tables.batches import NewBatch, batch_digest, extend_chain
from paceline.services.coordinator.ledger.tables.episodes import RESTARTED
from paceline.v1 import exchange_pb2 as pb

WRONG_WEIGHTS = "wrong_weights"
"""Drop reason if a group's tokens were not sampled with the weights of their versions."""


def fix_if_due(exchange: Exchange, run: ActiveRun, now_s: float) -> bool:
    """Fix the next batch, if it was requested and is complete; return whether it was fixed. In one transaction the
    check runs once for all ranks that ask, and again only after a group was scored."""
    row = exchange.ledger.run(run.run_id)
    if row["next_batch"] not in run.state.first_requested_s or row["next_batch"] > row["next_step"]:
        return False
    due = exchange.ledger.decided(BATCH_DUE, lambda: fix(exchange, run, now_s))
    if due:
        exchange.ledger.invalidate(BATCH_DUE)
    return due


def fix(exchange: Exchange, run: ActiveRun, now_s: float) -> bool:
    """Fix the next batch, if it is complete; return whether it was fixed."""
    _drop_wrong(exchange, run)
    row = exchange.ledger.run(run.run_id)
    step = row["next_batch"]
    chosen: list[sqlite3.Row] | None
    if run.spec.async_grpo.order == "in_order":  # the groups whose slots belong to the step
        chosen = exchange.group_queries.scored_in(run.run_id, step * run.batch_size, (step + 1) * run.batch_size)
    else:
        chosen = _ready_first(exchange, run, step, now_s)
    if chosen is None or len(chosen) < run.batch_size:
        return False
    replaced = exchange.ledger.batches.last_replaced(run.run_id, step)
    revision, chain = (replaced["revision"] + 1, replaced["chain"]) if replaced else (0, row["chain"])
    digest = batch_digest(chosen)
    wait_s = now_s - run.state.first_requested_s.get(step, now_s)
    metrics = batch_metrics(run.spec, chosen, step, sources_of(exchange, run, chosen)) | {"learner_wait_s": wait_s}
    batch = NewBatch(digest, extend_chain(chain, step, digest), metrics, revision)
    exchange.ledger.batches.add(run.run_id, step, batch)
    exchange.groups.batch(run.run_id, step, [group["group_id"] for group in chosen])
    run.state.slots_changed()
    exchange.ledger.update_run(run.run_id, next_batch=step + 1, dropped_in_a_row=0)
    exchange.ledger.invalidate(BATCH_DUE)
    run.state.end_requests(step)
    return True


def take_apart(exchange: Exchange, run: ActiveRun, step: int, taken_out: Collection[int], reason: str) -> None:
    """Take apart the batch of `step`, which no session has trained: its groups return to `scored` with their scores.
    The step's next batch is the next revision, without the groups in `taken_out`."""
    ledger = exchange.ledger
    batch = ledger.batches.get(run.run_id, step)
    assert batch is not None
    group_ids = [group["group_id"] for group in exchange.group_queries.of_step(run.run_id, step)]
    ledger.batches.replace(batch, group_ids, taken_out, reason)
    ledger.receipts.remove(run.run_id, exchange.sessions(run), step)  # from ranks of ended sessions
    exchange.groups.unbatch(run.run_id, step, group_ids)
    ledger.update_run(run.run_id, next_batch=step)
    ledger.invalidate(BATCH_DUE)
    run.state.slots_changed()


def _drop_wrong(exchange: Exchange, run: ActiveRun) -> None:
    """With `logger.verify_drops`, drop the scored groups that workers with wrong weights have sampled."""
    check = run.state.spot_check
    if not (run.spec.logger.verify_drops and check.test.wrong_versions):
        return
    for group in exchange.group_queries.scored(run.run_id):
        if check.is_wrong(group["group_id"]):
            exchange.drop(run, group, WRONG_WEIGHTS)


def _ready_first(exchange: Exchange, run: ActiveRun, step: int, now_s: float) -> list[sqlite3.Row] | None:
    """Return the oldest scored groups for a batch; None for too few, or if the batch must wait for a live group."""
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
    ready_s = run.state.note_complete(step, now_s)
    if now_s - ready_s < spec.late_wait_s and must_wait(_live(exchange, run), step, run.max_age):
        return None
    return usable[: run.batch_size]


def _live(exchange: Exchange, run: ActiveRun) -> list[int]:
    """Return, for each live group, the step of the oldest version that its tokens can have. Live groups are leased, or
    wait for scores; those leased to suspected workers are left out."""
    rows, suspected = exchange.group_queries.in_progress(run.run_id), exchange.workers.suspected
    return [row["oldest"] for row in rows if row["state"] != State.LEASED or row["member_id"] not in suspected]


REASON = "by_request"


def drop_from_batch(exchange: Exchange, run: ActiveRun, group_ids: Sequence[int], now_s: float) -> None:
    """Drop groups of the fixed, untrained batch for the reason `by_request`. The next revision is fixed as soon as
    enough groups are scored and the run has the workers. Runs inside a transaction. Raises Conflict, InvalidInput."""
    if len(group_ids) > run.batch_size:
        raise InvalidInput(
            f"{len(group_ids)} groups are named, but a batch has only {run.batch_size} (grpo.num_prompts_per_step)"
        )
    row = exchange.ledger.run(run.run_id)
    step, dropped = row["next_step"], sorted(set(group_ids))
    if not dropped:
        raise InvalidInput("name at least one group to drop")
    if row["next_batch"] <= step or not run.spec.samples:
        raise Conflict(f"run {run.run_id} has no batch that is fixed and not trained; its next step is {step}")
    in_batch = {group["group_id"]: group for group in exchange.group_queries.of_step(run.run_id, step)}
    missing = [group_id for group_id in dropped if group_id not in in_batch]
    if missing:
        raise InvalidInput(
            f"groups {missing} are not in the batch of step {step}, which has {sorted(in_batch)}; only groups of a batch that "
            "is fixed and not trained can be dropped"
        )
    take_apart(exchange, run, step, dropped, REASON)
    for group_id in dropped:
        exchange.drop(run, in_batch[group_id], REASON)
    session_faults.reset(exchange, run.run_id)
    message = f"groups {dropped} of step {step} were dropped by request; the batch is fixed again"
    if not exchange.is_active(run.run_id):
        then = f"{message} when the run has workers"
        exchange.ledger.add_event(run.run_id, "warning", {"message": then})
    elif fix(exchange, run, now_s):
        exchange.notices.warn(f"{message} without these groups")
    else:
        exchange.notices.warn(f"{message} when enough groups are scored")


def handle_damaged(exchange: Exchange, run: ActiveRun, damaged: DamagedRecord) -> None:
    """Handle a damaged record, or do nothing if the ledger no longer refers to it."""
    if _end_damaged_life(exchange, run, damaged):
        return
    payload = exchange.ledger.damaged_payload(run.run_id, damaged)
    row = exchange.group_queries.get(run.run_id, payload["group_id"]) if payload else None
    if payload is None or row is None:
        return
    if payload["kind"] == "prefix":
        exchange.ledger.remove_prefix(run.run_id, row["group_id"])
        exchange.groups.set_prefix_step(run.run_id, row["group_id"], None)
        _count(
            exchange,
            run,
            f"the prefix of group {row['group_id']} is lost; the next attempt starts from the prompt: {damaged}",
        )
        return
    if row["state"] == State.TRAINED or (
        row["state"] == State.BATCHED
        and exchange.ledger.receipts.has_any(run.run_id, exchange.sessions(run), row["step"])
    ):
        exchange.pause(
            run,
            f"group {row['group_id']} of step {row['step']} cannot be read, and a session has trained it already: {damaged}. "
            "Restore the file, then `paceline resume`",
        )
        return
    if row["state"] == State.BATCHED:
        take_apart(exchange, run, row["step"], [row["group_id"]], f"damaged: {damaged}")
    if not class_of(row).trains and exchange.ledger.evaluations.has_ended(run.run_id, row["class"]):
        exchange.drop(run, row, "damaged")  # its evaluation has ended, so nobody would generate it again
        return
    if row["state"] in (State.GENERATED, State.SCORED, State.BATCHED):
        _generate_again(exchange, run, row)
        _count(exchange, run, f"group {row['group_id']} is generated again: {damaged}")


def _end_damaged_life(exchange: Exchange, run: ActiveRun, damaged: DamagedRecord) -> bool:
    """End the life of the sample whose turn cannot be read; return whether the damaged record is a turn. The answer to
    the next turn tells the holder of the lease that the life has ended."""
    turn = exchange.ledger.episodes.damaged(run.run_id, damaged)
    row = exchange.group_queries.get(run.run_id, turn["group_id"]) if turn is not None else None
    if turn is None or row is None:
        return False
    end_life(exchange, run, row, turn["sample"], RESTARTED, str(damaged))
    name = f"sample {turn['sample']} of group {row['group_id']}"
    _count(exchange, run, f"{name} begins again, because its turn {turn['turn']} cannot be read: {damaged}")
    return True


def release_unsent(exchange: Exchange, run: ActiveRun, reply: pb.ExchangeReply, member_id: str) -> None:
    """Revoke the leases or tasks of a reply that could not be sent, so that other work can answer the request."""
    for task in reply.task.tasks:
        exchange.groups.end_task(run.run_id, task.group_id, member_id, task.attempt)
    for lease in reply.lease.leases:
        exchange.groups.end_lease(run.run_id, lease.group_id, member_id, lease.attempt)


def _generate_again(exchange: Exchange, run: ActiveRun, row: sqlite3.Row) -> None:
    class_of(row).count(exchange, run, "tokens:generated", -row["tokens"])
    class_of(row).count(exchange, run, "tokens:wasted", row["tokens"])
    exchange.ledger.remove_payloads(run.run_id, row["group_id"])
    exchange.groups.generate_again(run.run_id, row["group_id"])
    run.state.slots_changed()


def _count(exchange: Exchange, run: ActiveRun, message: str) -> None:
    if number := exchange.count_failure(run, "damaged"):
        exchange.notices.warn(f"{message} ({number} damaged payloads in this run)")
