"""A request for tasks: generated groups are assigned to reward workers."""

from __future__ import annotations

import sqlite3

from paceline.groups import with_holder
from paceline.services.common.worker.score_extras import trainer_state, with_trainer_state
from paceline.services.coordinator.exchange import leases
from paceline.services.coordinator.exchange.batches import selection
from paceline.services.coordinator.exchange.replies import Outcome, ok
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange, class_of
from paceline.services.coordinator.exchange.uploads.intake import Arrived
from paceline.services.coordinator.ledger.segments import DamagedRecord, Frame, UnopenedSegment, frame_size
from paceline.tracing import group_traceparent
from paceline.v1 import common_pb2

MAX_ROOM = 1024
"""Largest number of tasks in one answer, even if a worker states more room."""

MAX_TASK_BYTES = 32 << 20
"""Largest number of bytes of an answer with several tasks: the first task waits until the last one has arrived."""


def answer(exchange: Exchange, run: ActiveRun, arrived: Arrived, now_s: float) -> Outcome:
    """Assign generated groups to a reward worker, lowest slot first."""
    request = arrived.request
    reply = ok(request)
    reply.task.SetInParent()
    if request.task.HasField("held"):  # the worker does not know tasks whose reply was lost
        held = list(request.task.held.group_ids)
        exchange.groups.revoke_unknown_tasks(run.run_id, request.member_id, held)
    if request.member_id in exchange.workers.overdue or exchange.scoring_withheld(run):
        return Outcome(reply, empty=True)
    payloads: list[Frame] = []
    room = min(request.task.room, MAX_ROOM)
    rows = exchange.group_queries.free_to_score(run.run_id, room + len(run.state.reserved))
    chosen, size_bytes = leases.choose_groups(exchange, run, request.member_id, rows, room), 0
    workers = len(exchange.senders.of_role(common_pb2.ROLE_REWARD))
    trained = exchange.ledger.run(run.run_id)["next_step"]
    state = trainer_state(run.spec, trained, len(run.prompts or ()), workers)
    for row in chosen:
        try:
            payload = exchange.ledger.payload(run.run_id, row["group_id"])
        except DamagedRecord as damaged:
            selection.handle_damaged(exchange, run, damaged)
            continue
        except UnopenedSegment as fault:
            exchange.notices.warn_of_unopened(fault)
            continue
        assert payload is not None
        size_bytes += frame_size(payload.arrays) + frame_size(payload.header)
        if size_bytes > MAX_TASK_BYTES and reply.task.tasks:
            break  # the next request gets it
        reply.task.tasks.add(
            group_id=row["group_id"],
            attempt=row["score_attempt"] + 1,
            prompt_json=row["prompt_json"],
            columns_json=with_trainer_state(row["columns_json"], state),
            digest=row["digest"],
            traceparent=group_traceparent(run.run_id, row["group_id"]),
            wants_reference=wants_reference(run, row),
        )
        payloads += (payload.arrays, payload.header)
        attempt = row["score_attempt"] + 1
        scorers = with_holder(row["scorers"], attempt, request.member_id)
        exchange.groups.assign_scorer(run.run_id, row["group_id"], request.member_id, attempt, scorers)
    return Outcome(reply, payloads, empty=not reply.task.tasks)


def wants_reference(run: ActiveRun, row: sqlite3.Row) -> bool:
    """Return whether scores must include the reference's log-probabilities: only groups to train need them."""
    return run.spec.pool_serves_reference and class_of(row).trains
