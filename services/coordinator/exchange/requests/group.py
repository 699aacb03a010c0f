"""A generated group, committed after checks against the ledger, in its transaction. Faults are answered INVALID, with
the field, its value and the bound."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import numpy as np

from paceline.array_frames import RowArrays
from paceline.errors import WireError
from paceline.groups import Group, held_attempt
from paceline.services.coordinator.exchange import evaluation, leases, turn_logs
from paceline.services.coordinator.exchange.replies import Outcome, committed, duplicate, refuse, stale
from paceline.services.coordinator.exchange.result_checks import fault_of_result
from paceline.services.coordinator.exchange.state import TRAIN, ActiveRun, Exchange, class_of
from paceline.services.coordinator.exchange.uploads.intake import (
    ENDINGS,
    FINISHED,
    Arrived,
    GroupTurn,
    Limits,
    UploadedGroup,
    check_arrays,
    check_number,
    check_text_size,
    check_texts,
    context_digest,
    turn_digest,
)
from paceline.services.coordinator.ledger.groups import Generated, State
from paceline.services.coordinator.ledger.segments import Record
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import CompletionArrays, parse_message, split_completions, split_rows


def answer(exchange: Exchange, run: ActiveRun, arrived: Arrived, now_s: float) -> Outcome:
    """Commit a checked and stored group. The first valid result of any attempt wins while the group is admitted or
    leased."""
    request, result, uploaded = arrived.request, arrived.request.group, arrived.uploaded
    row = exchange.group_queries.get(run.run_id, result.group_id)
    if row is None:
        return stale(request, f"no group {result.group_id} in run {run.run_id}")
    if held_attempt(row["holders"], result.attempt) != request.member_id:
        attempt = f"attempt {result.attempt} of group {result.group_id}"
        return stale(request, f"{attempt} was never leased to {request.member_id}")
    if row["state"] not in (State.ADMITTED, State.LEASED) and (arrived.is_decided or uploaded is not None):
        if uploaded is not None and result.digest != row["digest"]:  # else it is the accepted result, sent again
            exchange.ledger.count(run.run_id, "tokens:wasted", uploaded.group.num_tokens)
            exchange.workers.note_group(request.member_id, result)
        return duplicate(request, f"group {result.group_id} is {row['state']} already")
    # It was decided when the result arrived; since then its record was found damaged, and the group is generated again.
    if arrived.is_decided:
        return stale(request, f"group {result.group_id} is {row['state']} again")
    if uploaded is None or arrived.location is None:
        exchange.workers.lease_durations.note_refusal(request.member_id)
        return refuse(request, arrived.fault)
    group, group_class = uploaded.group, class_of(row)
    size = group_class.size(run)
    if fault := _fault_of_form(run, group, size):
        return refuse(request, fault)
    if not group_class.trains:
        pinned = evaluation.pinned_version(exchange, run, row)
        if any(span[:2] != pinned for completion in group.completions for span in completion.spans):
            if row["lease_step"] == pinned.step:  # else the evaluation was pinned to another version since
                exchange.workers.lease_durations.note_refusal(request.member_id)
            # Else another worker has the group's episodes.
            if group.rows is None or result.attempt == row["attempt"]:
                exchange.groups.readmit(run.run_id, result.group_id)
            return stale(request, f"group {result.group_id} has tokens of another version than its evaluation")
    fault, turn_log = fault_of_result(exchange, run, row, result.attempt, request.member_id, uploaded), None
    if not fault and group.rows is not None:
        turn_log = turn_logs.of_group(exchange, run, result.group_id)
        fault = turn_logs.fault_of_turns(turn_log, group, uploaded.turns)
        if fault and result.attempt < row["attempt"]:
            return stale(request, f"a later attempt has changed group {result.group_id}: {fault}")
    if fault:
        exchange.workers.lease_durations.note_refusal(request.member_id)
        return refuse(request, f"group {result.group_id}: {fault}")
    if turn_log is not None:  # its tokens were counted turn by turn
        turn_logs.end_left_out(exchange, run, row, turn_log)
    else:
        exchange.workers.throughput.add_tokens(group.num_tokens)
        group_class.count(exchange, run, "tokens:generated", group.num_tokens)
    if row["attempt"] > 1 or turn_log is not None:  # prefix or turns of earlier attempts
        exchange.ledger.remove_payloads(run.run_id, result.group_id)
    exchange.ledger.add_payload(run.run_id, result.group_id, "result", arrived.location)
    leases.clear_deaths(exchange, run, result.group_id)
    generated = Generated(group.num_tokens, group.num_sequence_tokens, group.oldest_step, result.digest)
    exchange.groups.commit(run.run_id, result.group_id, generated)
    exchange.workers.note_group(request.member_id, result, size / TRAIN.size(run))
    if group_class.trains:
        run.state.drops_in_a_row.end_of_generation()
        is_whole = result.attempt == 1 and group.rows is None
        run.state.spot_check.note_group(group, sender=request.member_id if is_whole else "")
    else:
        evaluation.unpin_if_generated(exchange, run, row["class"])
    return committed(request)


def _fault_of_form(run: ActiveRun, group: Group, expected: int) -> str:
    """Return how a group deviates from the form that the run's leases require; empty if it does not."""
    if run.spec.environment.is_used != (group.rows is not None):
        has, needs = ("rows", "no") if group.rows is not None else ("no rows", "an")
        return f"group {group.group_id} has {has}, but the run has {needs} environment"
    if group.num_samples != expected:
        unit = "completions" if group.rows is None else "samples"
        return f"group {group.group_id} has {group.num_samples} {unit}, not {expected}"
    return ""


def check(arrived: Arrived) -> Record:
    """Set the group of a result and return its record. Raises WireError if it is invalid in every state of the
    ledger."""
    result, frames = arrived.request.group, arrived.frames
    if len(frames) != 2:
        raise WireError(f"a group result has two payload frames, not {len(frames)}")
    texts, arrays = parse_message(pb.Texts, frames[1]), CompletionArrays.of(frames[0])
    max_id = check_arrays(arrays, arrived.limits)
    if arrays.rows is None:
        check_texts(len(frames[1]), len(arrays.token_ids), texts.finish_reasons, FINISHED)
    else:
        check_rows(arrays.rows, arrays.lengths.tolist(), len(arrays.prompt_ids), arrived.limits)
        num_tokens = len(arrays.prompt_ids) + len(arrays.token_ids)
        check_texts(0, num_tokens, texts.finish_reasons, FINISHED)
        check_samples(texts, arrays.rows.num_samples, num_tokens, len(frames[1]))
    unread = [""] * len(texts.texts)  # no check here needs the texts
    prompt_ids, completions = split_completions(arrays, texts.finish_reasons, unread)
    group = Group(result.group_id, prompt_ids, completions, rows=split_rows(arrays, completions))
    turns = () if group.rows is None else turns_of(group)
    if group.digest(like=result.digest) != result.digest:
        raise WireError(f"the digest of group {result.group_id} does not match its arrays")
    if group.num_tokens == 0:
        raise WireError(f"group {result.group_id} has no tokens")
    arrived.uploaded = UploadedGroup(group, max_id, turns)
    return Record.of(frames[1], frames[0])


MAX_SAMPLE_BYTES = 1 << 20
"""Limit for the tool schemas and the programs' texts of one sample; texts of tokens have their own limit."""


def check_rows(rows: RowArrays, lengths: Sequence[int], num_prompt: int, limits: Limits | None) -> None:
    """Check the sizes of a group's rows against the spec's limits. Raises WireError."""
    rows.check(num_prompt, lengths)
    if limits is None:
        return
    turns_UI = rows.turns
    longest_turn = int((turns_UI[:, 2] - turns_UI[:, 1]).max(initial=0))
    if longest_turn > limits.max_new_tokens:
        raise WireError(
            f"a turn of {longest_turn} tokens is longer than policy.generation.max_new_tokens {limits.max_new_tokens}"
        )
    longest = int((rows.prompt_lengths + np.array(lengths, np.int64)).max())
    if longest > limits.max_total_tokens:
        raise WireError(
            f"a row of {longest} tokens is longer than policy.max_total_sequence_length {limits.max_total_tokens}"
        )


def check_samples(texts: pb.Texts, num_samples: int, num_tokens: int, size_bytes: int) -> None:
    """Check the texts of a group's samples. Raises WireError."""
    if len(texts.samples) != num_samples:
        raise WireError(f"the header has texts of {len(texts.samples)} samples, but the arrays have {num_samples}")
    check_text_size(size_bytes - num_samples * MAX_SAMPLE_BYTES, num_tokens, len(texts.finish_reasons))
    for sample in texts.samples:
        if sample.ending not in (*ENDINGS, "failed"):
            raise WireError(f"ending is {sample.ending[:64]!r}, but must be one of {', '.join((*ENDINGS, 'failed'))}")
        check_number("sample.reward", sample.reward)
        check_number("sample.turn_rewards", sample.turn_rewards)


def turns_of(group: Group) -> list[GroupTurn]:
    """Return a group's turns in the order of samples, rows and tokens. Raises WireError if a token belongs to no
    turn."""
    assert group.rows is not None
    samples, turns = group.rows.samples, []
    first_rows = {sample: row for row, sample in reversed(list(enumerate(samples)))}
    ends = [0] * len(samples)
    """For each row, the index of the token at which the row's last turn so far ends."""
    for row, start, end, _ in group.rows.turns:
        completion = group.completions[row]
        context_ids = completion.token_ids[ends[row] : start]
        if ends[row] == 0:
            prompt_ids = group.prompt_ids if completion.prompt_ids is None else completion.prompt_ids
            context_ids = np.concatenate([prompt_ids, context_ids])
        spans = [
            span._replace(start=max(span.start, start) - start, end=min(span.end, end) - start)
            for span in completion.spans
            if span.start < end and span.end > start
        ]
        part = slice(start, end)
        digest = turn_digest(completion.token_ids[part], completion.logprobs[part], spans)
        sample = samples[row]
        turns.append(GroupTurn(sample, row - first_rows[sample], digest, context_digest(context_ids)))
        ends[row] = end
    for row, completion in enumerate(group.completions):
        if ends[row] != len(completion.token_ids):
            raise WireError(
                f"row {row} ends at token {len(completion.token_ids)}, but its last turn ends at {ends[row]}"
            )
    return turns


def is_decided(exchange: Exchange, run: ActiveRun, request: pb.ExchangeRequest, row: sqlite3.Row) -> bool:
    return row["state"] not in (State.ADMITTED, State.LEASED) and bool(row["digest"] == request.group.digest)
