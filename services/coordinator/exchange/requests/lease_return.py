"""A lease that a worker returns because it drains (perhaps with unfinished samples), or because the prompt is bad."""

from __future__ import annotations

import sqlite3

from paceline.errors import WireError
from paceline.groups import Group
from paceline.services.coordinator.exchange import evaluation
from paceline.services.coordinator.exchange.replies import Outcome, committed, refuse, stale
from paceline.services.coordinator.exchange.result_checks import fault_of_result
from paceline.services.coordinator.exchange.state import TRAIN, ActiveRun, Exchange, class_of
from paceline.services.coordinator.exchange.uploads.intake import (
    ABORTED,
    FINISHED,
    Arrived,
    UploadedGroup,
    check_arrays,
    check_texts,
)
from paceline.services.coordinator.ledger.groups import State
from paceline.services.coordinator.ledger.segments import Record
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import CompletionArrays, split_completions

FINAL_DATA_ERRORS = frozenset({"bad_prompt", "prompt_too_long"})
"""Reasons for which every other attempt would fail too, so that the group is dropped at once."""

DATA_ERRORS = FINAL_DATA_ERRORS | {"", "invalid_result"}
"""Reasons that a worker may give for a failed attempt. With an empty reason other attempts follow, and the last failure
drops the group as `bad_prompt`."""

MAX_ERROR_CHARS = 4096
"""Largest number of characters that are kept of a worker's message."""


def answer(exchange: Exchange, run: ActiveRun, arrived: Arrived, now_s: float) -> Outcome:
    request, returned = arrived.request, arrived.request.lease_return
    row = exchange.group_queries.get(run.run_id, returned.group_id)
    if row is not None and row["state"] == State.ADMITTED and row["member_id"] == request.member_id:
        # The lease was revoked already, and `restore_leases` must not give it to this worker again.
        exchange.groups.clear_holder(run.run_id, returned.group_id)
    held = (returned.attempt, request.member_id)
    if row is None or row["state"] != State.LEASED or (row["attempt"], row["member_id"]) != held:
        attempt = f"attempt {returned.attempt} of group {returned.group_id}"
        return stale(request, f"{attempt} is not leased to {request.member_id}")
    if returned.data_error_reason not in DATA_ERRORS:
        allowed = ", ".join(sorted(DATA_ERRORS - {""}))
        reason = returned.data_error_reason[:64]
        return refuse(request, f"data_error_reason is {reason!r}, but must be one of {allowed}")
    if returned.data_error:
        return _failed(exchange, run, request, row)
    if arrived.frames and run.spec.environment.is_used:
        return refuse(
            request,
            f"group {returned.group_id} was returned with samples, but a run with an environment submits them turn by turn",
        )
    if arrived.frames and class_of(row).trains:
        uploaded = arrived.uploaded
        if uploaded is None or arrived.location is None:
            return refuse(request, arrived.fault)
        prefix = uploaded.group
        expected = TRAIN.size(run)
        if prefix.rows is not None or len(prefix.completions) != expected:
            number = len(prefix.completions)
            return refuse(request, f"group {returned.group_id} was returned with {number} samples, not {expected}")
        if fault := fault_of_result(exchange, run, row, returned.attempt, request.member_id, uploaded):
            return refuse(request, f"the prefix of group {returned.group_id}: {fault}")
        exchange.ledger.add_payload(run.run_id, returned.group_id, "prefix", arrived.location)
        oldest = prefix.oldest_step if prefix.oldest_step >= 0 else row["lease_step"]
        exchange.groups.set_prefix_step(run.run_id, returned.group_id, oldest)
    exchange.groups.end_lease(run.run_id, returned.group_id, request.member_id, returned.attempt)
    return committed(request)


def _failed(exchange: Exchange, run: ActiveRun, request: pb.ExchangeRequest, row: sqlite3.Row) -> Outcome:
    """Count an attempt that failed because of the group's data; other attempts may follow, up to the limit."""
    returned, reason = request.lease_return, request.lease_return.data_error_reason or "bad_prompt"
    is_final = returned.data_error_reason in FINAL_DATA_ERRORS
    allowed = 1 if is_final else run.spec.grpo.max_generation_failures
    failures, error = row["generation_failures"] + 1, returned.data_error[:MAX_ERROR_CHARS]
    exchange.groups.fail_generation(run.run_id, row["group_id"], failures)
    evaluation.fail(exchange, run, row, "generating", reason, error, failures, allowed)
    return committed(request)


def check(arrived: Arrived) -> Record:
    returned, frames = arrived.request.lease_return, arrived.frames
    if len(frames) != 1:
        raise WireError(f"a lease is returned with one payload frame at most, not {len(frames)}")
    arrays, reasons = CompletionArrays.of(frames[0]), returned.finish_reasons
    max_id = check_arrays(arrays, arrived.limits)
    size_bytes = sum(map(len, returned.texts))
    check_texts(size_bytes, len(arrays.token_ids), reasons, FINISHED + ABORTED)
    group = Group(returned.group_id, *split_completions(arrays, reasons, [""] * len(reasons)))
    arrived.uploaded = UploadedGroup(group, max_id)
    header = pb.LeaseReturn(group_id=returned.group_id, attempt=returned.attempt, finish_reasons=reasons)
    return Record.of(header.SerializeToString(), frames[0])


def is_decided(exchange: Exchange, run: ActiveRun, request: pb.ExchangeRequest, row: sqlite3.Row) -> bool:
    return bool(row["state"] != State.LEASED or row["attempt"] != request.lease_return.attempt)
