"""Preemption: a queued run of a higher priority takes the place of the active run.

The active run first yields: nothing new is leased and no batch is fixed, so the learner trains what it has and then writes the
checkpoint that is ordered. Then its open groups stay open, it is queued again, and goes on from that checkpoint when its turn
comes. Where no checkpoint can be written, it goes on from the one before, as after the death of a learner: nothing is lost.
"""

from __future__ import annotations

import logging
import sqlite3
import time

from paceline.services.coordinator.exchange.state import ActiveRun
from paceline.services.coordinator.lifecycle.context import RunContext
from paceline.services.coordinator.lifecycle.run_states import RunStates
from paceline.services.coordinator.pool.assignments import Assignments
from paceline.v1 import worker_pb2

CHECKPOINT_WAIT_S = 600.0
"""Seconds for which the preempting run waits for the checkpoint: a long step and a slow store fit in."""

log = logging.getLogger(__name__)


class Preemption:
    """The yielding of the active run. One owner of `Exchange.yields_to`."""

    def __init__(self, context: RunContext, states: RunStates, assignments: Assignments):
        self._context, self._states, self._assignments = context, states, assignments
        self._ledger, self._exchange = context.ledger, context.exchange
        self._began_s = 0.0
        """Monotonic time at which the active run began to yield."""
        self._ordered = (-1, -1)
        """Session and step for which a checkpoint was ordered last."""

    async def check(self, now_s: float | None = None) -> None:
        """Let the active run yield to a queued run of a higher priority, and end its turn when its checkpoint is written; at
        every tick."""
        now_s = time.monotonic() if now_s is None else now_s
        run = self._exchange.active
        if run is None:
            return
        first = self._ledger.first_queued()
        if first is None or first["priority"] <= self._ledger.priority(run.run_id) or self._ends_soon(run):
            await self._go_on(run)
            return
        if not self._exchange.yields_to:
            self._began_s, self._ordered = now_s, (-1, -1)
            await self._yield(run, first)
        if self._is_ready(run, now_s):
            await self._states.preempt(run.run_id, first["run_id"], first["priority"])

    def _ends_soon(self, run: ActiveRun) -> bool:
        """Return whether all steps of the run are trained: its export is being written."""
        return bool(self._ledger.run(run.run_id)["next_step"] >= self._exchange.num_steps(run))

    async def _go_on(self, run: ActiveRun) -> None:
        """End the yielding, because the run of the higher priority was cancelled or this run is about to end."""
        if self._exchange.yields_to:
            log.info("run %s goes on, %s does not wait any more", run.run_id, self._exchange.yields_to)
            self._exchange.yields_to = ""
            self._context.server.wake("lease", "batch")

    async def _yield(self, run: ActiveRun, first: sqlite3.Row) -> None:
        self._exchange.yields_to = first["run_id"]
        await self._context.watchers.warn(
            [
                f"run {first['run_id']} of priority {first['priority']} goes first: this run, of priority "
                f"{self._ledger.priority(run.run_id)}, writes a checkpoint and goes on later"
            ]
        )

    def _is_ready(self, run: ActiveRun, now_s: float) -> bool:
        """Return whether the run can be taken off the workers; order its checkpoint when the learner has trained its batch."""
        row, learner = self._ledger.run(run.run_id), self._assignments.learner()
        if learner is None or not learner.connected or learner.ready_run != run.run_id:
            return True
        if now_s - self._began_s >= CHECKPOINT_WAIT_S:
            log.warning(
                "run %s has no checkpoint after %.0f s; it goes on from an older one",
                run.run_id,
                CHECKPOINT_WAIT_S,
            )
            return True
        if row["next_batch"] > row["next_step"]:
            return False
        newest = self._ledger.checkpoints.newest(run.run_id)
        if newest is not None and newest.step == row["next_step"]:
            return True
        if self._ordered != (row["session"], row["next_step"]):
            self._ordered = (row["session"], row["next_step"])
            order = worker_pb2.CheckpointDirective(run_id=run.run_id)
            learner.direct(worker_pb2.ConnectResponse(checkpoint=order))
        return False
