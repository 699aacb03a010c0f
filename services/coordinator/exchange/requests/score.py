"""Rewards of a group, which change it from generated to scored. A score that failed is never replaced by zero."""

from __future__ import annotations

import json
import sqlite3

import numpy as np

from paceline.advantages import has_advantage, totals, turn_rewards
from paceline.errors import ALIKE, LedgerFault, WireError
from paceline.groups import FloatArray, held_attempt, scores_digest
from paceline.services.common.worker.score_extras import extra_line
from paceline.services.coordinator.exchange import evaluation, leases
from paceline.services.coordinator.exchange.replies import Outcome, committed, duplicate, refuse, stale
from paceline.services.coordinator.exchange.requests.task import wants_reference
from paceline.services.coordinator.exchange.state import BATCH_DUE, TRAIN, ActiveRun, Exchange, class_of
from paceline.services.coordinator.exchange.uploads.intake import Arrived, check_logprobs
from paceline.services.coordinator.ledger.groups import Scored, State
from paceline.services.coordinator.ledger.segments import Record
from paceline.services.coordinator.text_limits import cut
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import CompletionArrays, decode_reference, decode_rewards


def answer(exchange: Exchange, run: ActiveRun, arrived: Arrived, now_s: float) -> Outcome:
    """Commit the scores of a group if they are for exactly the text that was sent; the first valid scores win."""
    request, score = arrived.request, arrived.request.score
    row = exchange.group_queries.get(run.run_id, score.group_id)
    if row is None:
        return stale(request, f"no group {score.group_id} in run {run.run_id}")
    # A failure that is sent twice must not count twice.
    holds = (row["scorer_id"], row["score_attempt"]) == (request.member_id, score.attempt)
    if not holds and held_attempt(row["scorers"], score.attempt) != request.member_id:
        attempt = f"attempt {score.attempt} at scoring group {score.group_id}"
        return stale(request, f"{attempt} was never assigned to {request.member_id}")
    if row["state"] != State.GENERATED:
        exchange.workers.note_scores(request.member_id, score)
        return duplicate(request, f"group {score.group_id} is {row['state']} already")
    if score.digest != row["digest"]:
        return stale(request, f"the text of group {score.group_id} is not the text that was scored")
    if (score.handed_back or score.error) and not holds:
        return stale(request, f"attempt {score.attempt} does not hold the task of group {score.group_id}")
    if score.handed_back:
        return _take_back(exchange, run, request, row)
    if score.error:
        return _failed(exchange, run, request, row)
    functions, expected = list(score.functions), [reward.label for reward in run.spec.rewards]
    if functions != expected:
        return refuse(request, f"scores are of functions {functions}, but the run has {expected}")
    group_class = class_of(row)
    size = group_class.size(run)
    rewards_CF = decode_rewards(score.rewards, size)
    if rewards_CF.shape[1] != len(functions) or np.isinf(rewards_CF).any():
        shape = rewards_CF.shape
        return refuse(request, f"rewards of shape {shape} do not fit {len(functions)} functions, or are infinite")
    step = exchange.ledger.run(run.run_id)["next_batch"] if group_class.trains else group_class.step
    totals_C = totals(rewards_CF, run.spec.rewards, step)
    valid_C = totals_C[~np.isnan(totals_C)]
    if np.isinf(valid_C).any():
        return refuse(request, f"the weighted rewards of group {score.group_id} are not finite")
    reference: list[FloatArray] = []
    if wants_reference(run, row):
        if fault := _fault_of_reference(arrived, row):
            return refuse(request, fault)
        assert arrived.location is not None
        assert arrived.reference is not None
        reference.append(arrived.reference)
        exchange.ledger.add_payload(run.run_id, score.group_id, "reference", arrived.location)
    leases.clear_deaths(exchange, run, score.group_id)
    exchange.ledger.invalidate(BATCH_DUE)
    scored = Scored(
        rewards=rewards_CF.astype("<f4").tobytes(),
        scores_digest=scores_digest(rewards_CF, reference),
        functions=json.dumps(functions),
        reward=float(valid_C.mean()) if len(valid_C) else None,
    )
    exchange.groups.score(run.run_id, score.group_id, scored)
    exchange.workers.note_scores(request.member_id, score, size / TRAIN.size(run))
    if line := extra_line(score.group_id, row["digest"], score.extra_json, size):
        exchange.notices.add("extra", line=line)
    if not group_class.trains:
        evaluation.finish_if_done(exchange, run, row["class"])
    elif run.spec.grpo.use_dynamic_sampling and not _has_advantage(exchange, run, row, rewards_CF, step):
        exchange.drop(run, row, "no_variance", totals=totals_C.tolist())
    else:
        exchange.end_drops_in_a_row(run)
    return committed(request)


def _has_advantage(exchange: Exchange, run: ActiveRun, row: sqlite3.Row, rewards_CF: FloatArray, step: int) -> bool:
    """Return whether a group's rewards give it an advantage; True if that depends on turns that cannot be read."""
    turns = None
    if run.spec.environment.advantage != "outcome":
        try:
            payload = exchange.ledger.payload(run.run_id, row["group_id"])
            rows = None if payload is None else CompletionArrays.of(payload.read()[1]).rows
        except (LedgerFault, WireError):  # handled when the batch is served
            rows = None
        if rows is None:
            return True
        turns = turn_rewards(rows)
    return has_advantage(rewards_CF, run.spec, step, turns)


def _fault_of_reference(arrived: Arrived, row: sqlite3.Row) -> str:
    """Return why the reference's log-probabilities are refused; empty if they are accepted."""
    if arrived.reference is None:
        return arrived.fault or f"the score of group {row['group_id']} lacks the reference's log-probabilities"
    if len(arrived.reference) != row["tokens"]:
        number = len(arrived.reference)
        return f"group {row['group_id']} has {row['tokens']} tokens, but {number} reference_logprobs"
    return ""


def _take_back(exchange: Exchange, run: ActiveRun, request: pb.ExchangeRequest, row: sqlite3.Row) -> Outcome:
    """End a task without scores. Infrastructure failures are counted separately, because they drop no group."""
    score = request.score
    exchange.groups.end_task(run.run_id, score.group_id, request.member_id, score.attempt)
    if score.crashed:
        leases.on_score_crash(exchange, run, row, request.member_id)
    if score.error and (failures := exchange.count_failure(run, "unavailable")):
        exchange.notices.warn(
            f"group {score.group_id} could not be scored and is tried again ({failures} such failures "
            f"in this run, which drop no group): {cut(score.error)}"
        )
    return committed(request)


def _failed(exchange: Exchange, run: ActiveRun, request: pb.ExchangeRequest, row: sqlite3.Row) -> Outcome:
    score = request.score
    if exchange.scoring_withheld(run):  # after `resume` the corrected function scores the group
        exchange.groups.end_task(run.run_id, score.group_id, request.member_id, score.attempt)
        return committed(request)
    failures, allowed = row["score_failures"] + 1, run.spec.grpo.max_score_failures
    if score.error.endswith(ALIKE):
        allowed = failures
    exchange.groups.fail_scoring(run.run_id, row["group_id"], failures)
    evaluation.fail(exchange, run, row, "scoring", "reward_failed", cut(score.error), failures, allowed)
    return committed(request)


def check(arrived: Arrived) -> Record:
    if len(arrived.frames) != 1:
        raise WireError(f"a score has one payload frame at most, not {len(arrived.frames)}")
    reference = decode_reference(arrived.frames[0])
    check_logprobs("reference_logprobs", reference)
    arrived.reference = reference
    return Record.of(b"", arrived.frames[0])


def is_decided(exchange: Exchange, run: ActiveRun, request: pb.ExchangeRequest, row: sqlite3.Row) -> bool:
    return bool(row["state"] != State.GENERATED)
