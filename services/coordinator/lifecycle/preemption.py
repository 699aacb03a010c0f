"""Two reasons for which a run stops training early: a queued run preempts it, or its hours are over. A queued run
preempts the active one if it has a higher priority, or if only a person can resume the active one.

The preempted run first yields: no group is leased and no batch is fixed, so the learner trains the batch that it has
and writes an ordered checkpoint. Then the run is queued again with its open groups, and later continues from that
checkpoint. If none can be written, the run continues from the previous checkpoint, as after a learner's death: nothing
is lost. A run that a person must resume stays paused instead, until `resume` queues it; if its batch is withheld, the
checkpoint is written at once. With `max_hours` the ledger counts the time for which a run trains. After that time the
run ends at the newest step whose batch is fixed; the learner is notified when it requests the next step.
"""

from __future__ import annotations

import logging
import sqlite3
import time

from paceline.services.coordinator.exchange import evaluation
from paceline.services.coordinator.exchange.state import ActiveRun
from paceline.services.coordinator.lifecycle.run_states import RunStates
from paceline.services.coordinator.pool.assignments import Assignments
from paceline.services.coordinator.pool.run_context import RunContext
from paceline.v1 import worker_pb2

TRAINED_TIME = "time:running_ms"
"""Name of the counter of the milliseconds for which a run was running, over all restarts of the coordinator."""
WRITE_S = 10.0
"""Seconds between two writes of the counter; at most that much is lost in a crash."""


def explain(run: ActiveRun, end_step: int) -> str:
    """Return why a run ends after `end_step` steps; empty for 0."""
    if not end_step:
        return ""
    return f"the max_hours of {run.spec.max_hours:g} are over: the run ends after step {end_step} of {run.spec.max_num_steps}"


class Hours:
    """Counts the hours of the active run, and ends it after `max_hours`."""

    def __init__(self, context: RunContext):
        self._context = context
        self._ledger, self._exchange = context.ledger, context.exchange
        self._run_id, self._counted_s = "", 0.0
        """Run whose time is counted, and the monotonic time up to which it is counted."""

    async def check(self, now_s: float | None = None) -> None:
        """Count the time since the last check, and end the run if its hours are over. Called at every tick."""
        now_s = time.monotonic() if now_s is None else now_s
        run = self._exchange.active
        if run is None or run.spec.max_hours is None or self._ledger.run(run.run_id)["state"] != "running":
            self._run_id = ""
            return
        if self._run_id != run.run_id:
            self._run_id, self._counted_s = run.run_id, now_s
            return
        trained_s = self._ledger.counters(run.run_id).get(TRAINED_TIME, 0) / 1000 + now_s - self._counted_s
        is_over = not run.state.end_step and trained_s >= run.spec.max_hours * 3600
        if is_over or now_s - self._counted_s >= WRITE_S:
            async with self._context.lock:
                self._count(run, now_s, is_over)
        if is_over:
            await self._context.watchers.notify("lease", "batch")

    def _count(self, run: ActiveRun, now_s: float, is_over: bool) -> None:
        if self._exchange.active is not run:
            return
        elapsed_ms = int((now_s - self._counted_s) * 1000)
        with self._ledger.transaction(synced=is_over):
            self._ledger.count(run.run_id, TRAINED_TIME, elapsed_ms)
            end_step = self._end(run) if is_over else 0
        self._counted_s += elapsed_ms / 1000
        if end_step:
            run.state.end_early(end_step)

    def _end(self, run: ActiveRun) -> int:
        """Record the run's last step, and return it; 0 if all its batches are fixed already. Call it in a transaction."""
        row = self._ledger.run(run.run_id)
        end_step = int(max(row["next_batch"], row["next_step"], 1))
        if end_step >= run.spec.max_num_steps:
            return 0
        message = explain(run, end_step)
        log.info("run %s: %s", run.run_id, message)
        self._ledger.update_run(run.run_id, message=message)
        self._ledger.add_event(run.run_id, "state", {"state": "running", "message": message, "end_step": end_step})
        if row["next_step"] == end_step and run.validation is not None and run.spec.grpo.val_at_end:
            evaluation.begin(self._exchange, run, end_step)
        return end_step


CHECKPOINT_WAIT_S = 600.0
"""Seconds for which the preempting run waits for the checkpoint: enough for a long step and a slow object store."""
PAUSED_WAIT_S = 60.0
"""The same for a run that is paused on a fault: its learner gets no batch, so no step can delay the checkpoint."""

log = logging.getLogger(__name__)


class Preemption:
    """Lets the active run yield to another. Only this class calls `RunState.yield_to`."""

    def __init__(self, context: RunContext, states: RunStates, assignments: Assignments):
        self._context, self._states, self._assignments = context, states, assignments
        self._ledger, self._exchange = context.ledger, context.exchange
        self._began_s = 0.0
        """Monotonic time at which the active run began to yield."""
        self._ordered = (-1, -1)
        """Session and step of the newest checkpoint that was ordered."""

    async def check(self, now_s: float | None = None) -> None:
        """Let the active run yield to a queued run of a higher priority, or to any queued run if a person must resume
        the active one; then queue the active run again after its checkpoint. Called at every tick."""
        now_s = time.monotonic() if now_s is None else now_s
        run = self._exchange.active
        if run is None:
            return
        first = next(iter(self._ledger.queue()), None)
        if first is None or not (self._is_held(run) or self._is_less(run, first)):
            await self._go_on(run)
            return
        if not run.state.yields_to:
            self._began_s, self._ordered = now_s, (-1, -1)
        if run.state.yields_to != first["run_id"]:
            await self._yield(run, first)
        if self._is_ready(run, now_s):
            await self._states.preempt(run.run_id, self._reason(run, first))

    def _is_held(self, run: ActiveRun) -> bool:
        """Return whether a run is paused until a person resumes it."""
        return self._ledger.run(run.run_id)["state"] == "paused" and self._context.delays.retried != run.run_id

    def _is_less(self, run: ActiveRun, first: sqlite3.Row) -> bool:
        """Return whether `first` has a higher priority than a run that does not end soon anyway."""
        ends_soon = self._ledger.run(run.run_id)["next_step"] >= run.num_steps
        return bool(first["priority"] > self._ledger.priority(run.run_id) and not ends_soon)

    async def _go_on(self, run: ActiveRun) -> None:
        """Stop yielding, because no waiting run goes first, this run is about to end, or a person resumed it."""
        if run.state.yields_to:
            log.info("run %s does not yield to run %s any more", run.run_id, run.state.yields_to)
            run.state.yield_to("")
            self._context.server.wake("lease", "batch")

    async def _yield(self, run: ActiveRun, first: sqlite3.Row) -> None:
        run.state.yield_to(first["run_id"])
        then = (
            "this run writes a checkpoint, and `paceline resume` queues this run again"
            if self._is_held(run)
            else f"this run, of priority {self._ledger.priority(run.run_id)}, writes a checkpoint and continues later"
        )
        await self._context.watchers.warn([f"{self._reason(run, first)}: {then}"])

    def _reason(self, run: ActiveRun, first: sqlite3.Row) -> str:
        if self._is_held(run):
            return f"run {first['run_id']} goes first, because run {run.run_id} is paused"
        return f"run {first['run_id']} of priority {first['priority']} goes first"

    def _is_ready(self, run: ActiveRun, now_s: float) -> bool:
        """Return whether the workers can leave the run; order its checkpoint after the learner has trained its
        batch."""
        row, learner = self._ledger.run(run.run_id), self._assignments.learner()
        if learner is None or not learner.connected or learner.ready_run != run.run_id:
            return True
        is_withheld = self._exchange.withheld(run)
        limit_s = PAUSED_WAIT_S if is_withheld else CHECKPOINT_WAIT_S
        if now_s - self._began_s >= limit_s:
            log.warning("run %s has no checkpoint after %.0f s; an older checkpoint will be used", run.run_id, limit_s)
            return True
        if row["next_batch"] > row["next_step"] and not is_withheld:
            return False
        newest = self._ledger.checkpoints.newest(run.run_id)
        if newest is not None and newest.step == row["next_step"]:
            return True
        if self._ordered != (row["session"], row["next_step"]):
            self._ordered = (row["session"], row["next_step"])
            order = worker_pb2.CheckpointDirective(run_id=run.run_id)
            learner.direct(worker_pb2.ConnectResponse(checkpoint=order))
        return False
