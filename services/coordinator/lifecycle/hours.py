"""The limit of a run's hours (`max_hours`): the time for which a run trains is counted in the ledger, and a run whose hours are over
ends in good order. Its last step is the newest one whose batch is fixed; the learner hears so when it asks for the step after.
"""

from __future__ import annotations

import logging
import time

from paceline.services.coordinator.exchange import evaluation
from paceline.services.coordinator.exchange.state import ActiveRun
from paceline.services.coordinator.lifecycle.context import RunContext

TRAINED_TIME = "time:running_ms"
"""Counter of the milliseconds for which a run was running, over all lives of the coordinator."""
WRITE_S = 10.0
"""Seconds between two entries of the counter; at most that much is lost in a crash."""

log = logging.getLogger(__name__)


def explain(run: ActiveRun, end_step: int) -> str:
    """Return the reason for which a run ends after `end_step` steps; empty for 0."""
    if not end_step:
        return ""
    return f"max_hours {run.spec.max_hours:g} are over: the run ends after step {end_step} of {run.spec.max_num_steps}"


class Hours:
    """The hours of the active run."""

    def __init__(self, context: RunContext):
        self._context = context
        self._ledger, self._exchange = context.ledger, context.exchange
        self._run_id, self._counted_s = "", 0.0
        """Run whose time is counted, and the monotonic time up to which it is."""

    async def check(self, now_s: float | None = None) -> None:
        """Count the time since the last check, and end the run when its hours are over; at every tick."""
        now_s = time.monotonic() if now_s is None else now_s
        run = self._exchange.active
        if run is None or run.spec.max_hours is None or self._ledger.run(run.run_id)["state"] != "running":
            self._run_id = ""
            return
        if self._run_id != run.run_id:
            self._run_id, self._counted_s = run.run_id, now_s
            return
        is_over = not self._exchange.end_step and self._trained_s(run, now_s) >= run.spec.max_hours * 3600
        if is_over or now_s - self._counted_s >= WRITE_S:
            async with self._context.lock:
                self._count(run, now_s, is_over)
        if is_over:
            self._context.server.wake("lease", "batch")
            await self._context.watchers.notify()

    def _trained_s(self, run: ActiveRun, now_s: float) -> float:
        return self._ledger.counters(run.run_id).get(TRAINED_TIME, 0) / 1000 + now_s - self._counted_s

    def _count(self, run: ActiveRun, now_s: float, is_over: bool) -> None:
        if self._exchange.active is not run:
            return
        elapsed_ms = int((now_s - self._counted_s) * 1000)
        with self._ledger.transaction(synced=is_over):
            self._ledger.count(run.run_id, TRAINED_TIME, elapsed_ms)
            end_step = self._end(run) if is_over else 0
        self._counted_s += elapsed_ms / 1000
        if end_step:
            self._exchange.end_step = end_step

    def _end(self, run: ActiveRun) -> int:
        """Record the run's last step, and return it; 0 where all its batches are fixed already. Inside a transaction."""
        row = self._ledger.run(run.run_id)
        end_step = int(max(row["next_batch"], row["next_step"], 1))
        if end_step >= run.spec.max_num_steps:
            return 0
        message = explain(run, end_step)
        log.info("run %s: %s", run.run_id, message)
        self._ledger.update_run(run.run_id, message=message)
        self._ledger.add_event(
            run.run_id, "state", {"state": "running", "message": message, "end_step": end_step}
        )
        if row["next_step"] == end_step and run.validation is not None and run.spec.grpo.val_at_end:
            evaluation.begin(self._exchange, run, end_step)
        return end_step
