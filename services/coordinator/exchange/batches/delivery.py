"""Delivers batches to ranks and takes their receipts, which change groups from scored to trained. `selection.py` makes
the batches; `spot_check.py` chooses and judges the groups whose log-probabilities the learner compares."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace

import numpy as np

from paceline.services.coordinator.exchange.active_run import ActiveRun
from paceline.services.coordinator.exchange.batches import selection, session_faults
from paceline.services.coordinator.exchange.batches.selection import fix_if_due
from paceline.services.coordinator.exchange.replies import Outcome
from paceline.services.coordinator.exchange.spot_check import Observation
from paceline.services.coordinator.exchange.state import Exchange
from paceline.services.coordinator.ledger.segments import DamagedRecord, UnopenedSegment
from paceline.tracing import step_traceparent
from paceline.v1 import exchange_pb2 as pb


def get_batch(exchange: Exchange, run: ActiveRun, request: pb.ExchangeRequest, now_s: float) -> Outcome:
    """Return one rank's part of a step's batch, even if it was served before. Fix the batch first if it is due."""
    body, row = request.batch, exchange.ledger.run(run.run_id)
    if request.session != row["session"]:
        return exchange.replies.stale(
            request, f"session {request.session} has ended; the newest session is {row['session']}"
        )
    if body.world_size == 0 or body.rank >= body.world_size:
        return exchange.replies.refuse(
            request, f"rank {body.rank} of {body.world_size} ranks is not possible; ranks begin at 0"
        )
    session_faults.note_session(exchange, run, request.session)
    if 0 < run.state.end_step <= body.step <= row["next_step"]:
        return _answer(exchange, request, pb.BATCH_STATE_LAST)
    fixed = max(row["next_batch"], row["next_step"])  # a pause by a person does not withdraw a served batch
    wait = replace(_answer(exchange, request, pb.BATCH_STATE_WAIT), empty=True)
    if body.step > row["next_step"] or (exchange.takes_no_work(run) and body.step >= fixed):
        return wait
    if exchange.withheld(run):
        return wait
    if run.prompts is not None and body.step == row["next_batch"]:
        run.state.note_request(body.step, now_s)
        if not fix_if_due(exchange, run, now_s):
            return wait
    part = _answer(exchange, request, pb.BATCH_STATE_READY)
    part.reply.batch.traceparent = step_traceparent(run.run_id, body.step)
    try:
        if run.prompts is not None:
            part = _with_groups(exchange, run, request, part)
    except DamagedRecord as damaged:
        selection.handle_damaged(exchange, run, damaged)
        return wait  # later requests get the next revision of the batch
    except UnopenedSegment as fault:
        exchange.notices.warn_of_unopened(fault)
        return wait
    session_faults.note_served(exchange, run, request.session, body.step, body.world_size)
    return part


def fix_and_check_served(exchange: Exchange, now_s: float) -> bool:
    """Fix the batch if it is due. Return whether the waiting ranks may get their parts. Called once for all ranks."""
    if (run := exchange.active) is None:
        return True
    row = exchange.ledger.run(run.run_id)
    if run.prompts is None or row["next_batch"] > row["next_step"] or run.has_last_batch(row):
        return True
    return not exchange.takes_no_work(run) and fix_if_due(exchange, run, now_s)


def end(exchange: Exchange, request: pb.ExchangeRequest) -> Outcome:
    """Answer that there is no further step, because the run is not (or no longer) active."""
    reply = exchange.replies.ok(request)
    reply.batch.state = pb.BATCH_STATE_END
    return Outcome(reply)


def take_receipt(exchange: Exchange, run: ActiveRun, request: pb.ExchangeRequest) -> Outcome:
    """Record the receipt of a rank. The step is trained when the receipts of all ranks of the session agree with the
    batch. A receipt that does not agree ends its session, not the run."""
    receipt, row = request.receipt, exchange.ledger.run(run.run_id)
    if request.session != row["session"]:
        return exchange.replies.stale(
            request, f"session {request.session} has ended; the newest session is {row['session']}"
        )
    if receipt.rank >= receipt.world_size:
        return exchange.replies.refuse(
            request, f"rank {receipt.rank} of {receipt.world_size} ranks is not possible; ranks begin at 0"
        )
    if receipt.step > row["next_step"] or (run.prompts is not None and receipt.step >= row["next_batch"]):
        return exchange.replies.refuse(request, f"step {receipt.step} has no batch")
    parts = exchange.splits.get(run.run_id, receipt.step, receipt.world_size, run.spec.completions_per_prompt)
    if wrong := _disagreement(receipt, parts[receipt.rank] if parts else None):
        message = f"the receipt of step {receipt.step} does not agree with the batch: {wrong}"
        session_faults.record(
            exchange, run, request.session, receipt.step, session_faults.REFUSED, message, rank=receipt.rank
        )
        return exchange.replies.refuse(request, message)
    receipts = exchange.ledger.receipts
    receipts.add(run.run_id, request.session, receipt)
    take(exchange, run, receipt)
    if receipt.rank == 0:
        exchange.notices.add("metrics", step=receipt.step, session=request.session, metrics=dict(receipt.metrics))
    if receipts.count(run.run_id, request.session, receipt.step, receipt.world_size) == receipt.world_size:
        session_faults.note_trained(exchange, run, request.session, receipt.step)
        if receipt.step == row["next_step"]:
            _trained(exchange, run, receipt.step)
    outcome = exchange.replies.committed(request)
    if (head := exchange.ledger.audit_heads.newest()).sequence:
        outcome.reply.receipt.audit_head.CopyFrom(pb.AuditHead(sequence=head.sequence, hash=head.hash))
    return outcome


def _disagreement(receipt: pb.Receipt, part: list[sqlite3.Row] | None) -> str:
    """Return how a receipt differs from its rank's `part` of the batch (None without batches); empty if they agree."""
    rank, consumed = f"rank {receipt.rank}", [group.group_id for group in receipt.groups]
    if part is None:
        return f"{rank} trained groups {consumed}, but the run has no batches" if consumed else ""
    expected = [row["group_id"] for row in part]
    if consumed != expected:
        return f"{rank} trained groups {consumed[:5]}, but its part has {expected[:5]}"
    for row, group in zip(part, receipt.groups, strict=True):
        if group.digest != row["digest"]:
            return f"{rank} trained group {group.group_id} with the digest {group.digest!r}, not {row['digest']!r}"
        if group.scores_digest != row["scores_digest"]:
            return (
                f"{rank} trained group {group.group_id} with scores whose digest is {group.scores_digest!r}, "
                f"not {row['scores_digest']!r}"
            )
    tokens = sum(row["tokens"] for row in part)
    return "" if receipt.tokens == tokens else f"{rank} trained {receipt.tokens} tokens, but its part has {tokens}"


def _with_groups(exchange: Exchange, run: ActiveRun, request: pb.ExchangeRequest, part: Outcome) -> Outcome:
    """Add the groups of a rank's part of the batch to its reply. Raises DamagedRecord, UnopenedSegment."""
    body = request.batch
    batch = exchange.ledger.batches.get(run.run_id, body.step)
    assert batch is not None
    reply, payloads = part.reply, part.payloads
    reply.batch.chain = batch["chain"]
    reply.batch.wait_s = json.loads(batch["metrics_json"])["learner_wait_s"]
    parts = exchange.splits.get(run.run_id, body.step, body.world_size, run.spec.completions_per_prompt)
    for group in parts[body.rank]:
        payload = exchange.ledger.payload(run.run_id, group["group_id"], last=True)
        if payload is None:
            return exchange.replies.refuse(
                request, f"step {body.step} is before the oldest checkpoint, so its samples were removed"
            )
        reply.batch.groups.add(
            group_id=group["group_id"],
            digest=group["digest"],
            rewards=np.frombuffer(group["rewards"], "<f4").tolist(),
            scores_digest=group["scores_digest"],
        )
        payloads.append(payload.arrays)
    mark(exchange, run, body.step, batch["chain"], reply.batch)
    if run.spec.pool_serves_reference:
        for entry in reply.batch.groups:
            reference = exchange.ledger.payload(run.run_id, entry.group_id, "reference", last=True)
            assert reference is not None, "`submit_scores` commits the reference with the rewards"
            payloads.append(reference.arrays)
            entry.reference_frame = len(payloads)
    return part


def _answer(exchange: Exchange, request: pb.ExchangeRequest, state: pb.BatchState.ValueType) -> Outcome:
    reply = exchange.replies.ok(request)
    reply.batch.state, reply.batch.step = state, request.batch.step
    return Outcome(reply)


def _trained(exchange: Exchange, run: ActiveRun, step: int) -> None:
    ledger = exchange.ledger
    batch = ledger.batches.get(run.run_id, step)
    metrics, ends = {}, {"next_step": step + 1}
    if batch is not None:
        num_groups, num_tokens = exchange.groups.train(run.run_id, step)
        ledger.count(run.run_id, "groups:trained", num_groups)
        ledger.count(run.run_id, "tokens:trained", num_tokens)
        ledger.batches.mark_trained(run.run_id, step)
        ends["chain"] = batch["chain"]
        metrics = json.loads(batch["metrics_json"]) | run.state.spot_check.metrics()
    ledger.update_run(run.run_id, **ends)
    exchange.notices.add("step", step=step, metrics=metrics)


def mark(exchange: Exchange, run: ActiveRun, step: int, chain: str, reply: pb.BatchReply) -> None:
    """Mark the groups of a rank's part whose log-probabilities the learner should compare."""
    share = run.spec.logger.verify_share
    # In other runs sampler and learner compute different distributions, or a group has several samplers.
    is_comparable = not (run.spec.environment.is_used or run.spec.policy.generation.allow_biased_sampling)
    if not share or not is_comparable:
        return
    chosen = run.state.spot_check.chosen(chain) or run.state.spot_check.choose(
        chain, step, exchange.group_queries.samplers_of_step(run.run_id, step), share
    )
    for group in reply.groups:
        group.verify = group.group_id in chosen


def take(exchange: Exchange, run: ActiveRun, receipt: pb.Receipt) -> None:
    """Judge the comparisons of a receipt. Groups that were not chosen, and repeated comparisons, are ignored."""
    batch = exchange.ledger.batches.get(run.run_id, receipt.step) if receipt.comparisons else None
    if batch is None:
        return
    chosen = run.state.spot_check.chosen(batch["chain"])
    for compared in receipt.comparisons:
        worker = chosen.pop(compared.group_id, "")
        if not worker:
            continue
        observation = Observation(compared.mean, compared.standard_error, compared.tokens)
        finding = run.state.spot_check.observe(worker, observation)
        if finding is not None and finding.times & (finding.times - 1) == 0:  # the first, second, fourth …
            exchange.notices.add("warning", message=finding.explain(), spot_check=worker, nats=finding.mean)
