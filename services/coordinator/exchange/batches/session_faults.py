"""Counts learner sessions that ended at a step, and pauses the run if several in a row end at the same untrained step:
the learner cannot train something in the batch, so every further session would end there too.

A reported fault is recorded at once. A session that ended without a report (by a signal, or by the kernel when memory
is short) is detected when the next session asks for its first part. The step that a session trains is in the ledger, so
this also works after a crash of the coordinator. Sessions that left normally, ended at other steps, or were followed by
a trained step are not counted; `paceline resume` resets the count.
"""

from __future__ import annotations

import sqlite3
from itertools import takewhile

from paceline.services.coordinator.exchange.run_state import Training
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange
from paceline.services.coordinator.ledger.tables.batches import SessionFault
from paceline.v1 import worker_pb2

SAME_FAULTS = 3
"""Number of consecutive sessions that ended at one step with one kind of fault, after which the run is paused."""

ANY_FAULTS = 5
"""Number of consecutive sessions that ended at one step with any faults, after which the run is paused. The rank that
reports first can vary, and with it the kind of fault."""

MEMORY, REFUSED, SILENT = "memory", "refused", "silent"
"""Kinds of faults that are not exception types."""

MAX_SHOWN_GROUPS = 8
"""Largest number of groups that a message lists as possible causes."""

ENDED_SILENTLY = "the learner's process ended without a report; the kernel may have killed it for lack of memory"


def note_session(exchange: Exchange, run: ActiveRun, session: int) -> None:
    """Note a session's request for its part: the first one shows that the previous session ended at its step."""
    last = run.state.training
    if last is None and (in_hand := exchange.ledger.session_faults.in_hand(run.run_id)) is not None:
        last = Training(*in_hand)  # recorded in an earlier term
    if last is not None and last.session < session:
        run.state.note_training(None)
        record(exchange, run, last.session, last.step, SILENT, ENDED_SILENTLY, world_size=last.world_size)


def note_served(exchange: Exchange, run: ActiveRun, session: int, step: int, world_size: int) -> None:
    served = Training(session, step, world_size)
    if run.state.training == served:
        return
    run.state.note_training(served)
    exchange.ledger.session_faults.set_in_hand(run.run_id, *served)


def note_trained(exchange: Exchange, run: ActiveRun, session: int, step: int) -> None:
    """Note that all ranks of a session trained the step, so it was not the cause of earlier ends."""
    if run.state.training is not None and run.state.training[:2] == (session, step):
        run.state.note_training(None)
    exchange.ledger.session_faults.remove_step(run.run_id, step)


def note_left(exchange: Exchange, run: ActiveRun, session: int) -> None:
    """Note that the session left normally. Runs inside a transaction."""
    if run.state.training is not None and run.state.training.session == session:
        run.state.note_training(None)
    exchange.ledger.session_faults.remove_in_hand(run.run_id, session)


def reset(exchange: Exchange, run_id: str) -> None:
    """Reset the count of ended sessions, because a person resumes the run or has changed the batch."""
    if (run := exchange.active) is not None and run.run_id == run_id:
        run.state.note_training(None)
    exchange.ledger.session_faults.remove_run(run_id)


def on_report(exchange: Exchange, run: ActiveRun, report: worker_pb2.RunReport, rank: int) -> None:
    kind = MEMORY if report.fault == worker_pb2.FAULT_MEMORY else report.error.partition(":")[0][:64]
    record(exchange, run, report.session, report.step, kind, report.error, rank=rank)


def record(
    exchange: Exchange,
    run: ActiveRun,
    session: int,
    step: int,
    kind: str,
    message: str,
    *,
    rank: int | None = None,
    world_size: int = 0,
) -> None:
    """Record that a session ended at `step`; pause the run if too many sessions ended at it. Only the session's first
    report counts, because other ranks fail as a consequence; a lack of memory, however, counts from any rank."""
    fault = SessionFault(session, step, kind, message)
    added = exchange.ledger.session_faults.add(run.run_id, fault, outranks=MEMORY)
    last = run.state.training
    if last is not None and last.session == session:
        world_size = last.world_size
        run.state.note_training(None)
    if not added:
        return
    exchange.notices.warn(f"session {session} of the learner ended at step {step}: {message}")
    faults = _in_a_row(exchange, run)
    if len(faults) >= ANY_FAULTS or (
        len({fault.kind for fault in faults[:SAME_FAULTS]}) == 1 and len(faults) >= SAME_FAULTS
    ):
        exchange.pause(run, _explain(faults, _possible_causes(exchange, run, faults[0], rank, world_size)))


def _in_a_row(exchange: Exchange, run: ActiveRun) -> list[SessionFault]:
    """Return the newest consecutive faults that have the same step, the newest first."""
    faults = exchange.ledger.session_faults.newest(run.run_id, ANY_FAULTS)
    return list(takewhile(lambda fault: fault.step == faults[0].step, faults))


def _possible_causes(
    exchange: Exchange, run: ActiveRun, fault: SessionFault, rank: int | None, world_size: int
) -> list[int]:
    """Return the ids of the groups that may be the cause: those in the part of the rank that reported; if that part is
    unknown, all groups of the batch. The longest come first if memory may be the cause."""
    groups: list[sqlite3.Row] = []
    if rank is not None and world_size > rank:
        parts = exchange.splits.get(run.run_id, fault.step, world_size, run.spec.completions_per_prompt)
        groups = parts[rank] if parts else []
    groups = groups or exchange.group_queries.of_step(run.run_id, fault.step)
    if fault.kind in (MEMORY, SILENT):
        groups = sorted(groups, key=lambda group: -group["sequence_tokens"])
    return [group["group_id"] for group in groups]


def _explain(faults: list[SessionFault], group_ids: list[int]) -> str:
    last = faults[0]
    text = f"{len(faults)} sessions of the learner in a row ended at step {last.step}; the last error: {last.message}"
    if group_ids:
        shown = " ".join(map(str, group_ids[:MAX_SHOWN_GROUPS]))
        more = f" and {len(group_ids) - MAX_SHOWN_GROUPS} more" if len(group_ids) > MAX_SHOWN_GROUPS else ""
        order = " (the longest first)" if last.kind in (MEMORY, SILENT) else ""
        text += f". The cause may be in groups {shown}{more}{order}: `paceline drop RUN GROUP...` drops groups from the batch"
    if last.kind in (MEMORY, SILENT):
        text += ". Lower policy.train_mb_tokens or set policy.activation_checkpointing to full if memory is short"
    return text + ". `paceline resume` tries the step again"
