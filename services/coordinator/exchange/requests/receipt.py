"""A rank's receipt, which changes groups from batched to trained. `spot_check.py` judges its comparisons."""

from __future__ import annotations

import json
import sqlite3

from paceline.services.coordinator.exchange.batches import session_faults
from paceline.services.coordinator.exchange.replies import Outcome, committed, refuse, stale
from paceline.services.coordinator.exchange.spot_check import Observation
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange
from paceline.services.coordinator.exchange.uploads.intake import Arrived
from paceline.v1 import exchange_pb2 as pb


def answer(exchange: Exchange, run: ActiveRun, arrived: Arrived, now_s: float) -> Outcome:
    """Record the receipt of a rank. The step is trained when the receipts of all ranks of the session agree with the
    batch. A receipt that does not agree ends its session, not the run."""
    request, receipt, row = arrived.request, arrived.request.receipt, exchange.ledger.run(run.run_id)
    if request.session != row["session"]:
        return stale(request, f"session {request.session} has ended; the newest session is {row['session']}")
    if receipt.rank >= receipt.world_size:
        return refuse(request, f"rank {receipt.rank} of {receipt.world_size} ranks is not possible; ranks begin at 0")
    if receipt.step > row["next_step"] or (run.prompts is not None and receipt.step >= row["next_batch"]):
        return refuse(request, f"step {receipt.step} has no batch")
    parts = exchange.splits.get(run.run_id, receipt.step, receipt.world_size, run.spec.completions_per_prompt)
    if wrong := _disagreement(receipt, parts[receipt.rank] if parts else None):
        message = f"the receipt of step {receipt.step} does not agree with the batch: {wrong}"
        session_faults.record(
            exchange, run, request.session, receipt.step, session_faults.REFUSED, message, rank=receipt.rank
        )
        return refuse(request, message)
    receipts = exchange.ledger.receipts
    receipts.add(run.run_id, request.session, receipt)
    _judge(exchange, run, receipt)
    if receipt.rank == 0:
        exchange.notices.add("metrics", step=receipt.step, session=request.session, metrics=dict(receipt.metrics))
    if receipts.count(run.run_id, request.session, receipt.step, receipt.world_size) == receipt.world_size:
        session_faults.note_trained(exchange, run, request.session, receipt.step)
        if receipt.step == row["next_step"]:
            _trained(exchange, run, receipt.step)
    outcome = committed(request)
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


def _judge(exchange: Exchange, run: ActiveRun, receipt: pb.Receipt) -> None:
    """Judge the comparisons of a receipt. Groups that were not chosen, and repeated comparisons, are ignored."""
    batch = exchange.ledger.batches.get(run.run_id, receipt.step) if receipt.comparisons else None
    if batch is None:
        return
    check = run.state.spot_check
    for each in receipt.comparisons:
        if not (worker := check.take(batch["chain"], each.group_id, each.sampler, each.version_step)):
            continue
        numbers = (each.mean, each.standard_error, each.tokens, each.mean_square)
        finding = check.observe(worker, Observation(*numbers, each.number_format, each.version_step))
        if finding is not None and finding.times & (finding.times - 1) == 0:  # the first, second, fourth …
            facts = {"nats": finding.mean, "spread": finding.spread, "version": finding.version_step}
            exchange.notices.add("warning", message=finding.explain(), spot_check=worker, **facts)
