"""Commands of a person on runs: cancel, pause, resume, drop groups, checkpoint; and on workers: drain."""

from __future__ import annotations

import time

from paceline.errors import Conflict, InvalidInput, NotFound, Unavailable
from paceline.services.coordinator.exchange.batches import selection, session_faults
from paceline.services.coordinator.ledger.ledger import ACTIVE_STATES
from paceline.services.coordinator.lifecycle.context import RunContext
from paceline.services.coordinator.lifecycle.resumption import Resumption
from paceline.services.coordinator.lifecycle.run_states import RunStates, set_state
from paceline.services.coordinator.lifecycle.worker_faults import Faults
from paceline.services.coordinator.members.registry import Member, Members
from paceline.services.coordinator.pool.assignments import Assignments
from paceline.services.coordinator.sessions import starting_point
from paceline.v1 import worker_pb2

MAX_GRACE_S = 86_400.0


class Commands:
    """Handlers of the commands."""

    def __init__(
        self,
        context: RunContext,
        states: RunStates,
        faults: Faults,
        assignments: Assignments,
        resumption: Resumption,
        members: Members,
    ):
        self._resumption, self._members = resumption, members
        self._context, self._states, self._faults, self._assignments = context, states, faults, assignments
        self._ledger, self._exchange, self._delays = context.ledger, context.exchange, context.delays

    async def cancel(self, run_id: str) -> None:
        """End a run, also one that has failed and may be resumed. Raises NotFound; Conflict when it has ended."""
        row = self._ledger.run(run_id)
        if row["state"] not in ("queued", "failed", *ACTIVE_STATES):
            verb = "was" if row["state"] == "cancelled" else "has"
            raise Conflict(f"run {run_id} {verb} {row['state']} already")
        await self._states.end(run_id, "cancelled", "cancelled by request")

    async def pause(self, run_id: str) -> None:
        """Pause a run until a person resumes it. Raises NotFound, Conflict."""
        async with self._context.lock:
            row = self._ledger.run(run_id)
            if row["state"] != "running" and self._delays.retried != run_id:
                raise Conflict(f"run {run_id} is {row['state']}, not running")
            with self._ledger.transaction():
                set_state(self._ledger, run_id, "paused")
            self._delays.retried = ""
        self._context.server.wake("lease", "batch")
        await self._context.watchers.notify()

    async def resume(self, run_id: str, bundle: str = "") -> None:
        """Go on with a run that is paused, or queue a run that has failed. Files whose faults paused the run are read anew,
        those of a run with a bundle from a new `bundle`. Raises NotFound, Conflict; InvalidInput for a bundle, DataError and
        Unreadable for a data set that cannot be used."""
        changes = await self._resumption.changes(run_id, bundle)
        run = await self._resumption.read(run_id, bundle, changes)
        async with self._context.lock:
            row = self._ledger.run(run_id)
            if row["state"] not in ("paused", "failed"):
                raise Conflict(f"run {run_id} is {row['state']}, neither paused nor failed")
            goes_on = row["state"] == "paused" and run_id not in self._delays.passed_over
            with self._ledger.transaction():
                facts = self._resumption.take(run_id, run, bundle, changes)
                set_state(self._ledger, run_id, "running" if goes_on else "queued", **facts)
                self._ledger.update_run(run_id, dropped_in_a_row=0)
                session_faults.reset(self._exchange, run_id)
                starting_point.clear_marks(self._ledger, run_id)  # a person may have put them back
            self._delays.passed_over.discard(run_id)
            self._delays.start_again_s = 0.0
            if self._delays.retried == run_id:
                self._delays.retried = ""
        self._context.run_log.remove_summary(run_id)
        if self._exchange.active is None or self._exchange.active.run_id == run_id:
            self._faults.clear()  # the person has not seen the faults of another run
        if self._exchange.active is not None:
            await (
                self._assignments.assign_all()
            )  # before work is given out, so that changed functions are loaded first
        self._context.server.wake("lease", "task", "batch")
        await self._context.watchers.notify()

    def checkpoint(self, run_id: str) -> tuple[int, str]:
        """Order a checkpoint of the run that trains; return its newest event's number, and the path of a checkpoint that is
        there already, in place of an order. Raises NotFound; Conflict when no learner has the run now.
        """
        row, sequence = self._ledger.run(run_id), self._ledger.last_sequence(run_id)
        newest = self._ledger.checkpoints.newest(run_id)
        if newest is not None and newest.step == row["next_step"]:
            return sequence, newest.path
        run, learner = self._exchange.active, self._assignments.learner()
        if run is None or run.run_id != run_id or learner is None or not learner.connected:
            raise Conflict(
                f"run {run_id} is {row['state']}, and no learner has it now that could write a checkpoint"
            )
        order = worker_pb2.CheckpointDirective(run_id=run_id)
        learner.direct(worker_pb2.ConnectResponse(checkpoint=order))
        return sequence, ""

    def drain(self, member_id: str, grace_s: float) -> Member:
        """Tell a worker, with all ranks of a learner, to finish or return its work within `grace_s` seconds, and to leave.
        Raises NotFound, InvalidInput; Unavailable for a member whose stream is broken."""
        if not 0.0 <= grace_s <= MAX_GRACE_S:
            raise InvalidInput(f"grace_s is {grace_s:g}; it has to be from 0 to {MAX_GRACE_S:g} seconds")
        member = self._members.get(member_id)
        if member is None:
            raise NotFound(f"no member {member_id[:80]!r}; `paceline members` lists those that are there")
        if not member.connected:
            raise Unavailable(f"{member_id} has no connection now, and leaves by itself unless it comes back")
        order = worker_pb2.DrainDirective(grace_s=grace_s)
        for one in self._members.all():
            if one is member or (member.learner_id and one.learner_id == member.learner_id):
                one.direct(worker_pb2.ConnectResponse(drain=order))
        return member

    async def drop_groups(self, run_id: str, group_ids: list[int]) -> None:
        """Take groups out of the batch that is fixed and not trained; the learner then begins a new session. Raises NotFound,
        Conflict, InvalidInput.
        """
        async with self._context.lock:
            row, run = self._ledger.run(run_id), self._exchange.active
            if row["state"] != "paused" or run is None or run.run_id != run_id:
                raise Conflict(
                    f"run {run_id} is {row['state']}; groups are dropped only while it is paused (`paceline pause`)"
                )
            with self._ledger.transaction():
                selection.drop_from_batch(self._exchange, run, group_ids, time.monotonic())
                notices = self._exchange.take_notices()
                self._context.run_log.write_down(notices)
        self._assignments.end_session()
        self._context.server.wake("lease", "batch")
        await self._context.watchers.notify()
