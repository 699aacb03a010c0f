"""Batches out, receipts in: from scored to trained. A batch, once fixed, never changes."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter

import numpy as np

from paceline.tracing import step_traceparent
from protos.paceline.v1 import exchange_pb2 as pb
from services.coordinator.admission import must_wait
from services.coordinator.balance import balance
from services.coordinator.batch_chain import batch_digest, extend_chain
from services.coordinator.exchange import ActiveRun, Exchange, Outcome
from services.coordinator.payloads import Frame


def give_part(exchange: Exchange, run: ActiveRun, request: pb.ExchangeRequest, now_s: float) -> Outcome:
    """One rank's part of a step's batch, as often as asked; fixes the batch when it is due."""
    asked, row = request.batch, exchange.ledger.run(run.run_id)
    if request.session != row["session"]:
        return exchange.stale(
            request, f"session {request.session} has passed, the newest is {row['session']}"
        )
    if asked.world_size == 0 or asked.rank >= asked.world_size:
        return exchange.refuse(request, f"rank {asked.rank} of {asked.world_size} ranks cannot be")
    fixed = max(row["next_batch"], row["next_step"])  # steps before it are served again whatever the state
    if asked.step > row["next_step"] or (exchange.paused(run) and asked.step >= fixed):
        return _wait(exchange, request)
    if run.prompts is None:
        reply = exchange.reply(request, pb.REPLY_STATUS_OK)
        reply.batch.state, reply.batch.step = pb.BATCH_STATE_READY, asked.step
        reply.batch.traceparent = step_traceparent(run.run_id, asked.step)
        return Outcome(reply)
    if asked.step == row["next_batch"]:
        exchange.first_asked_s.setdefault(asked.step, now_s)
        if not _fix(exchange, run, asked.step, row["chain"], now_s):
            return _wait(exchange, request)
    return _part(exchange, run, request)


def end(exchange: Exchange, request: pb.ExchangeRequest) -> Outcome:
    """There is no further step: the run is not (or no longer) the current one."""
    reply = exchange.reply(request, pb.REPLY_STATUS_OK)
    reply.batch.state = pb.BATCH_STATE_END
    return Outcome(reply)


def take_receipt(exchange: Exchange, run: ActiveRun, request: pb.ExchangeRequest) -> Outcome:
    """What a rank trained. The step is trained when the receipts of all ranks of the session agree with the batch."""
    receipt, row = request.receipt, exchange.ledger.run(run.run_id)
    if request.session != row["session"]:
        return exchange.stale(
            request, f"session {request.session} has passed, the newest is {row['session']}"
        )
    if receipt.rank >= receipt.world_size:
        return exchange.refuse(request, f"rank {receipt.rank} of {receipt.world_size} ranks cannot be")
    if receipt.step > row["next_step"] or (run.prompts is not None and receipt.step >= row["next_batch"]):
        return exchange.refuse(request, f"step {receipt.step} has no batch")
    parts = split_batch(exchange.db, run.run_id, receipt.step, receipt.world_size)
    wrong = _disagreement(receipt, parts[receipt.rank] if parts else None)
    if wrong:
        return exchange.refuse(
            request,
            f"the receipt of step {receipt.step} does not agree with the batch: rank {receipt.rank} {wrong}",
        )
    exchange.db.execute(
        "INSERT OR REPLACE INTO receipts"
        " (run_id, session, step, rank, world_size, group_ids, digests, tokens, scores_digests)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            run.run_id,
            request.session,
            receipt.step,
            receipt.rank,
            receipt.world_size,
            json.dumps([group.group_id for group in receipt.groups]),
            json.dumps([group.digest for group in receipt.groups]),
            receipt.tokens,
            json.dumps([group.scores_digest for group in receipt.groups]),
        ),
    )
    if receipt.rank == 0:
        exchange.notice("metrics", step=receipt.step, session=request.session, metrics=dict(receipt.metrics))
    receipts = exchange.db.execute(
        "SELECT COUNT(*) AS n FROM receipts WHERE run_id = ? AND session = ? AND step = ? AND world_size = ?",
        (run.run_id, request.session, receipt.step, receipt.world_size),
    ).fetchone()["n"]
    if receipts == receipt.world_size and receipt.step == row["next_step"]:
        _trained(exchange, run, receipt.step)
    return exchange.committed(request)


def _disagreement(receipt: pb.Receipt, part: list[sqlite3.Row] | None) -> str:
    """What a rank trained otherwise than its part says; empty when both agree. A run without batches has no part to compare."""
    if part is None:
        return f"trained groups {[group.group_id for group in receipt.groups]}" if receipt.groups else ""
    expected, consumed = (
        [row["group_id"] for row in part],
        [group.group_id for group in receipt.groups],
    )
    if consumed != expected:
        return f"trained groups {consumed[:5]}, its part has {expected[:5]}"
    for row, group in zip(part, receipt.groups, strict=True):
        if group.digest != row["digest"]:
            return f"trained group {group.group_id} with the digest {group.digest!r}, not {row['digest']!r}"
        if row["scores_digest"] and group.scores_digest != row["scores_digest"]:
            return (
                f"trained group {group.group_id} with scores of the digest {group.scores_digest!r}, "
                f"not {row['scores_digest']!r}"
            )
    tokens = sum(row["tokens"] for row in part)
    return "" if receipt.tokens == tokens else f"trained {receipt.tokens} tokens, its part has {tokens}"


def _fix(exchange: Exchange, run: ActiveRun, step: int, chain: str, now_s: float) -> bool:
    """Fixes the batch of `step` if it is complete; False if it has to wait."""
    chosen = _in_order(exchange, run, step) if run.spec.async_grpo.order == "in_order" else None
    if run.spec.async_grpo.order == "ready_first":
        chosen = _ready_first(exchange, run, step, now_s)
    if chosen is None:
        return False
    with_scores = all(group["scores_digest"] for group in chosen)  # not where an older Paceline scored one
    digest = batch_digest(chosen, with_scores=with_scores)
    wait_s = now_s - exchange.first_asked_s.get(step, now_s)
    exchange.db.execute(
        "INSERT INTO batches (run_id, step, digest, chain, metrics_json, with_scores) VALUES (?, ?, ?, ?, ?, ?)",
        (
            run.run_id,
            step,
            digest,
            extend_chain(chain, step, digest),
            json.dumps(_metrics(run, chosen, step, wait_s)),
            with_scores,
        ),
    )
    exchange.db.executemany(
        "UPDATE groups SET state = 'batched', step = ?, rank_order = ? WHERE run_id = ? AND group_id = ?",
        [(step, place, run.run_id, group["group_id"]) for place, group in enumerate(chosen)],
    )
    exchange.places_changed()
    exchange.ledger.update_run(run.run_id, next_batch=step + 1, dropped_in_a_row=0)
    exchange.first_asked_s = {s: t for s, t in exchange.first_asked_s.items() if abs(s) > step}
    return True


def _in_order(exchange: Exchange, run: ActiveRun, step: int) -> list[sqlite3.Row] | None:
    """The groups whose places belong to the step, when all are scored."""
    scored = exchange.db.execute(
        "SELECT * FROM groups WHERE run_id = ? AND class = 'train' AND state = 'scored' AND slot >= ? AND slot < ?"
        " ORDER BY slot",
        (run.run_id, step * run.batch, (step + 1) * run.batch),
    ).fetchall()
    return scored if len(scored) == run.batch else None


def _ready_first(exchange: Exchange, run: ActiveRun, step: int, now_s: float) -> list[sqlite3.Row] | None:
    """The oldest scored groups, when there are enough and no live group has to be waited for."""
    spec = run.spec.async_grpo
    number = exchange.db.execute(
        "SELECT COUNT(*) FROM groups WHERE run_id = ? AND class = 'train' AND state = 'scored'", (run.run_id,)
    ).fetchone()[0]
    if number < run.batch:
        return None
    scored = exchange.db.execute(
        "SELECT * FROM groups WHERE run_id = ? AND class = 'train' AND state = 'scored' ORDER BY slot, group_id",
        (run.run_id,),
    ).fetchall()
    for group in scored:
        if step - group["oldest_step"] > spec.hard_max_age_steps:
            exchange.drop(run, group, "stale")
    usable = [group for group in scored if step - group["oldest_step"] <= spec.hard_max_age_steps]
    if len(usable) < run.batch:
        return None
    live = exchange.db.execute(
        "SELECT COALESCE(oldest_step, lease_step) AS oldest, state, member_id FROM groups INDEXED BY groups_by_state"
        " WHERE run_id = ? AND class = 'train'"
        " AND state IN ('leased', 'generated')",
        (run.run_id,),
    ).fetchall()
    ready_s = exchange.first_asked_s.setdefault(-step - 1, now_s)
    waited_for = [
        row["oldest"]
        for row in live
        if row["state"] != "leased" or row["member_id"] not in exchange.suspected
    ]
    if must_wait(waited_for, step, run.max_age) and now_s - ready_s < spec.late_wait_s:
        return None
    return usable[: run.batch]


def split_batch(db: sqlite3.Connection, run_id: str, step: int, world_size: int) -> list[list[sqlite3.Row]]:
    """The batch of `step` split over the ranks, the same for every asker; empty for a run without batches."""
    groups = db.execute(
        "SELECT * FROM groups WHERE run_id = ? AND step = ? ORDER BY rank_order", (run_id, step)
    ).fetchall()
    if not groups:
        return []
    parts = balance([group["sequence_tokens"] for group in groups], world_size)
    return [[groups[index] for index in part] for part in parts]


def _part(exchange: Exchange, run: ActiveRun, request: pb.ExchangeRequest) -> Outcome:
    asked = request.batch
    batch = exchange.db.execute(
        "SELECT * FROM batches WHERE run_id = ? AND step = ?", (run.run_id, asked.step)
    ).fetchone()
    reply = exchange.reply(request, pb.REPLY_STATUS_OK)
    reply.batch.state, reply.batch.step, reply.batch.chain = pb.BATCH_STATE_READY, asked.step, batch["chain"]
    reply.batch.traceparent = step_traceparent(run.run_id, asked.step)
    reply.batch.wait_s = json.loads(batch["metrics_json"])["learner_wait_s"]
    payloads: list[Frame] = []
    for group in split_batch(exchange.db, run.run_id, asked.step, asked.world_size)[asked.rank]:
        payload = exchange.ledger.payload(run.run_id, group["group_id"], last=True)
        if payload is None:
            return exchange.refuse(
                request, f"step {asked.step} is before the oldest checkpoint, its samples are gone"
            )
        rewards = np.frombuffer(group["rewards"], "<f4").tolist()
        reply.batch.groups.add(
            group_id=group["group_id"],
            digest=group["digest"],
            rewards=rewards,
            scores_digest=group["scores_digest"],
        )
        payloads.append(payload.arrays)
    if run.spec.pool_serves_reference:
        for given in reply.batch.groups:
            reference = exchange.ledger.payload(run.run_id, given.group_id, "reference", last=True)
            assert reference is not None, "scores.take_result commits it with the rewards"
            payloads.append(reference.arrays)
            given.reference_frame = len(payloads)
    return Outcome(reply, payloads)


def _wait(exchange: Exchange, request: pb.ExchangeRequest) -> Outcome:
    reply = exchange.reply(request, pb.REPLY_STATUS_OK)
    reply.batch.state, reply.batch.step = pb.BATCH_STATE_WAIT, request.batch.step
    return Outcome(reply, empty=True)


def _trained(exchange: Exchange, run: ActiveRun, step: int) -> None:
    """All receipts agree: the groups end as trained, the chain grows, the step is over."""
    ledger = exchange.ledger
    batch = exchange.db.execute(
        "SELECT * FROM batches WHERE run_id = ? AND step = ?", (run.run_id, step)
    ).fetchone()
    metrics = {}
    if batch is not None:
        totals = exchange.db.execute(
            "SELECT COUNT(*) AS n, SUM(tokens) AS tokens FROM groups INDEXED BY step_groups WHERE run_id = ? AND step = ?",
            (run.run_id, step),
        ).fetchone()
        exchange.db.execute(
            "UPDATE groups INDEXED BY step_groups SET state = 'trained' WHERE run_id = ? AND step = ?",
            (run.run_id, step),
        )
        if not run.spec.logger.keep_samples:
            _prune(exchange, run)
        ledger.count(run.run_id, "groups:trained", totals["n"])
        ledger.count(run.run_id, "tokens:trained", totals["tokens"])
        exchange.db.execute(
            "UPDATE batches SET trained = 1 WHERE run_id = ? AND step = ?", (run.run_id, step)
        )
        ledger.update_run(run.run_id, chain=batch["chain"])
        metrics = json.loads(batch["metrics_json"])
    ledger.update_run(run.run_id, next_step=step + 1)
    exchange.notice("step", step=step, metrics=metrics)


def _prune(exchange: Exchange, run: ActiveRun) -> None:
    """Forgets the text of groups that every kept checkpoint already holds."""
    oldest = exchange.db.execute(
        "SELECT MIN(step) AS step FROM checkpoints WHERE run_id = ? AND removed = 0 AND damaged = ''",
        (run.run_id,),
    ).fetchone()["step"]
    if oldest is not None:
        exchange.db.execute(
            "DELETE FROM payloads WHERE run_id = ? AND"
            " (SELECT step FROM groups g WHERE g.run_id = payloads.run_id AND g.group_id = payloads.group_id) < ?",
            (run.run_id, oldest),
        )


def _metrics(run: ActiveRun, groups: list[sqlite3.Row], step: int, wait_s: float) -> dict[str, float]:
    """What a batch says of itself: rewards, lengths, ages, and how long the learner waited for it."""
    completions = run.spec.grpo.num_generations_per_prompt
    rewards_GCF = np.stack([np.frombuffer(g["rewards"], "<f4").reshape(completions, -1) for g in groups])
    known = [g["reward"] for g in groups if g["reward"] is not None]
    ages = Counter(step - g["oldest_step"] for g in groups)
    metrics = {
        "reward": float(np.mean(known)) if known else float("nan"),
        "completion_length": sum(g["tokens"] for g in groups) / (len(groups) * completions),
        "trained_tokens": float(sum(g["tokens"] for g in groups)),
        "learner_wait_s": wait_s,
    }
    for index, reward in enumerate(run.spec.rewards):
        values = rewards_GCF[:, :, index]
        metrics[f"reward/{reward.label}"] = (
            float(np.nanmean(values)) if (~np.isnan(values)).any() else float("nan")
        )
    return metrics | {f"age/{age}": float(number) for age, number in sorted(ages.items())}
