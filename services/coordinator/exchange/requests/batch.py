"""A rank's request for its part of a step's batch. `batches/selection.py` makes the batches; `spot_check.py` chooses the
groups whose log-probabilities the learner compares."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from paceline.services.coordinator.exchange.batches import selection, session_faults
from paceline.services.coordinator.exchange.batches.selection import fix_if_due
from paceline.services.coordinator.exchange.replies import Outcome, ok, refuse, stale
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange
from paceline.services.coordinator.exchange.uploads.intake import Arrived
from paceline.services.coordinator.ledger.segments import DamagedRecord, UnopenedSegment
from paceline.tracing import step_traceparent
from paceline.v1 import exchange_pb2 as pb


def answer(exchange: Exchange, run: ActiveRun, arrived: Arrived, now_s: float) -> Outcome:
    """Return one rank's part of a step's batch, even if it was served before. Fix the batch first if it is due."""
    request, body, row = arrived.request, arrived.request.batch, exchange.ledger.run(run.run_id)
    if request.session != row["session"]:
        return stale(request, f"session {request.session} has ended; the newest session is {row['session']}")
    if body.world_size == 0 or body.rank >= body.world_size:
        return refuse(request, f"rank {body.rank} of {body.world_size} ranks is not possible; ranks begin at 0")
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
    reply = ok(request)
    reply.batch.state = pb.BATCH_STATE_END
    return Outcome(reply)


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
            return refuse(request, f"step {body.step} is before the oldest checkpoint, so its samples were removed")
        reply.batch.groups.add(
            group_id=group["group_id"],
            digest=group["digest"],
            rewards=np.frombuffer(group["rewards"], "<f4").tolist(),
            scores_digest=group["scores_digest"],
        )
        payloads.append(payload.arrays)
    _mark(run, body, reply.batch)
    if run.spec.pool_serves_reference:
        for entry in reply.batch.groups:
            reference = exchange.ledger.payload(run.run_id, entry.group_id, "reference", last=True)
            assert reference is not None, "the reference is committed with the rewards"
            payloads.append(reference.arrays)
            entry.reference_frame = len(payloads)
    return part


def _answer(exchange: Exchange, request: pb.ExchangeRequest, state: pb.BatchState.ValueType) -> Outcome:
    reply = ok(request)
    reply.batch.state, reply.batch.step = state, request.batch.step
    return Outcome(reply)


def _mark(run: ActiveRun, body: pb.BatchRequest, reply: pb.BatchReply) -> None:
    """Mark the groups of a rank's part whose log-probabilities the learner should compare."""
    if not run.spec.compares_samplers:
        return
    part, group_ids = (body.rank, body.world_size), [group.group_id for group in reply.groups]
    share = run.spec.logger.verify_share
    chosen = run.state.spot_check.choose(reply.chain, part, group_ids, share, run.batch_size)
    for group in reply.groups:
        group.verify = group.group_id in chosen
