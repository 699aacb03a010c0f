"""Changes the state of a run on the coordinator's decision: pause on a fault, continue, preempt, fail, end. A run that
is paused on a fault is retried automatically if waiting may help; only a person ends a pause that a person began
(`commands.py`). A failed run keeps its open groups, because `resume` queues it again."""

from __future__ import annotations

import logging

from paceline.services.coordinator.ledger.ledger import ACTIVE_STATES, Ledger
from paceline.services.coordinator.pool.assignments import Assignments
from paceline.services.coordinator.pool.run_context import RunContext
from paceline.services.coordinator.text_limits import one_line

log = logging.getLogger(__name__)


def set_state(ledger: Ledger, run_id: str, state: str, message: str = "", **facts: bool | str) -> None:
    """Change state and message of a run and add the event about it. Call it inside a transaction."""
    ledger.update_run(run_id, state=state, message=message)
    content = {"state": state} | ({"message": message} if message else {})
    ledger.add_event(run_id, "state", content | {name: fact for name, fact in facts.items() if fact})


class RunStates:
    def __init__(self, context: RunContext, assignments: Assignments):
        self._context, self._assignments = context, assignments
        self._ledger, self._exchange, self._delays = context.ledger, context.exchange, context.delays

    async def pause_on_fault(self, run_id: str, message: str, *, retried: bool = False) -> None:
        """Pause a run that cannot continue; nothing is lost. A person resumes it, unless it is `retried` automatically.
        Does nothing if a person has paused the run, or if the run is already paused with the same message."""
        async with self._context.lock:
            row = self._ledger.run(run_id)
            retrying = self._delays.retried == run_id
            if row["state"] not in ("queued", "running") and not (row["state"] == "paused" and retrying):
                return
            if retrying and retried and row["message"] == message:
                return
            with self._ledger.transaction():
                set_state(self._ledger, run_id, "paused", message, retried=retried)
            self._delays.retried = run_id if retried else ""
        log.warning("run %s is paused: %s", run_id, one_line(message))
        if not retried:
            self._context.run_log.summarize(run_id)
        await self._context.watchers.notify("lease", "batch")

    async def continue_run(self, run_id: str) -> None:
        """Continue a run whose fault is over, unless a person has paused it."""
        async with self._context.lock:
            if self._delays.retried != run_id or self._ledger.run(run_id)["state"] != "paused":
                return
            with self._ledger.transaction():
                set_state(self._ledger, run_id, "running")
            self._delays.retried = ""
        log.info("run %s continues", run_id)
        self._context.run_log.resume(run_id)
        await self._context.watchers.notify("lease", "batch")

    async def preempt(self, run_id: str, message: str) -> None:
        """Give the workers to another run, for the reason `message`, and queue the active run again; a run that a
        person must resume stays paused. The open groups of the active run stay open."""
        async with self._context.lock:
            run, row = self._exchange.active, self._ledger.run(run_id)
            if run is None or run.run_id != run_id or row["state"] not in ACTIVE_STATES:
                return
            is_paused = row["state"] == "paused" and self._delays.retried != run_id
            with self._ledger.transaction():
                self._exchange.stop_work(run_id)
                if not is_paused:
                    set_state(self._ledger, run_id, "queued", message)
            if is_paused:
                self._delays.passed_over.add(run_id)
            if self._delays.retried == run_id:
                self._delays.retried, self._delays.start_again_s = "", 0.0
        log.info("run %s is preempted: %s", run_id, message)
        self._context.run_log.close()
        self._assignments.unassign_all(message)
        await self._context.watchers.notify("lease", "task", "batch")

    async def fail(self, run_id: str, message: str) -> None:
        """Fail a run that cannot continue with its spec. Its open groups stay for `resume`; the next run may start."""
        await self.end(run_id, "failed", message)

    async def end(self, run_id: str, state: str, message: str) -> None:
        """End a run in `state`, permanently; the workers become idle and the next run may start."""
        async with self._context.lock:
            before = self._ledger.run(run_id)["state"]
            if before not in ("queued", *ACTIVE_STATES) and (before, state) != ("failed", "cancelled"):
                return
            run = self._exchange.active
            active = run is not None and run.run_id == run_id
            with self._ledger.transaction():
                if state == "failed":
                    self._exchange.stop_work(run_id)
                else:
                    self._exchange.end_run(run_id)
                self._ledger.update_run(run_id, state=state, message=message)
                self._ledger.add_event(run_id, "state", {"state": state, "message": message})
        level = logging.INFO if state == "succeeded" else logging.WARNING
        log.log(level, "run %s %s%s", run_id, state, f": {one_line(message)}" if message else "")
        if active:
            self._context.run_log.close(self._context.run_log.summary(run_id))
            self._assignments.unassign_all(f"run {run_id} {state}")
            self._context.server.wake("lease", "task", "batch")
        if self._delays.retried == run_id:
            self._delays.retried, self._delays.start_again_s = "", 0.0
        if self._delays.waits_for.startswith(f"run {run_id} "):
            self._delays.waits_for = ""
        await self._context.watchers.notify()
