"""Combines the modules that change the states of runs, and handles the pool's and the exchange's events about runs.
The states of a run:

  queued    `run_queue.py`, after its spec and data sets were checked
  running   `run_start.py`, when no run is active and its data sets could be opened
            A run of a higher priority preempts it: `preemption.py` queues it again, or ends it before its last step
  paused    `commands.py` by a person; `run_states.py` on a fault, with the reason, and retried automatically if waiting
            may help (`worker_faults.py`). A run that a person must resume, or that cannot be started now, lets other
            runs go first
  failed    `run_states.py`, by a fault of its spec, before its first step. It keeps its open groups, and `resume` queues it
  ended     here, after all steps are trained, the learner has exported, no evaluation is pending, and the workers
            have the last version (LAST_VERSION_S at most)
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from paceline.services.coordinator.exchange import evaluation
from paceline.services.coordinator.exchange.notices import Notice
from paceline.services.coordinator.exchange.state import ActiveRun
from paceline.services.coordinator.exchange.uploads.prompt_check import PromptCheck
from paceline.services.coordinator.lifecycle import run_start
from paceline.services.coordinator.lifecycle.commands import Commands, Resumption
from paceline.services.coordinator.lifecycle.preemption import Hours, Preemption, explain
from paceline.services.coordinator.lifecycle.run_data import RunBundles
from paceline.services.coordinator.lifecycle.run_queue import RunQueue
from paceline.services.coordinator.lifecycle.run_start import RunStarter
from paceline.services.coordinator.lifecycle.run_states import RunStates
from paceline.services.coordinator.lifecycle.worker_faults import Faults
from paceline.services.coordinator.members.registry import Members
from paceline.services.coordinator.pool.pool import Pool
from paceline.services.coordinator.pool.run_context import RunContext
from paceline.services.coordinator.scaling.scaler import Scaler
from paceline.services.coordinator.text_limits import one_line

LAST_VERSION_S = 30.0
"""Seconds for which a trained and exported run waits until its workers have the last version."""

log = logging.getLogger(__name__)


class Runs:
    """The runs of one ledger; `pool` assigns the workers to the active run."""

    def __init__(
        self,
        context: RunContext,
        members: Members,
        directory: Path,
        prompts: PromptCheck,
        bundles: RunBundles,
        scaler: Scaler,
    ):
        self.context, self._scaler = context, scaler
        self.pool = Pool(self, members)
        assignments = self.pool.assignments
        self.states = RunStates(context, assignments)
        self.faults = Faults(context, members, self.states, assignments)
        resumption = Resumption(context, prompts, bundles)
        self.commands = Commands(context, self.states, self.faults, assignments, resumption, members)
        self.queue = RunQueue(context.ledger, directory, context.lock, context.watchers, bundles)
        self.starter = RunStarter(context, self.states, self.faults, self.pool, prompts, bundles)
        self.preemption = Preemption(context, self.states, assignments)
        self.hours = Hours(context)
        self._finished: tuple[ActiveRun | None, int] = (None, 0)
        """The run and the session whose learner has finished."""
        self._finished_s = 0.0
        """Monotonic time at which the learner in `_finished` first reported that it has finished."""

    async def recover(self) -> None:
        """Restore the active run. Call this before anyone may connect, else workers are told that their run is over."""
        await run_start.recover(self.context)
        await self.starter.start_next()
        await run_start.warn_of_backup(self.context)

    async def act_on(self, notices: list[Notice]) -> None:
        """Process a commit: summarize a run that was paused, end a finished run, update the roster, notify watchers."""
        run = self.context.exchange.active
        if run is None:
            return
        self._scaler.note(notices)
        for notice in notices:
            if notice.kind == "paused" and notice.run_id == run.run_id:
                log.warning("run %s is paused: %s", run.run_id, one_line(notice.content["message"]))
                self.context.run_log.summarize(run.run_id)
        self.pool.assignments.update_lists()
        await self.context.watchers.notify()
        await self.end_if_done()

    async def pause_on_fault(self, run_id: str, message: str, *, retried: bool = False) -> None:
        """Pause a run that cannot continue."""
        await self.states.pause_on_fault(run_id, message, retried=retried)

    async def learner_finished(self, session: int) -> None:
        """End the exported run, unless an evaluation is pending or workers still wait for the last version."""
        if self._finished != (self.context.exchange.active, session):
            self._finished, self._finished_s = (self.context.exchange.active, session), time.monotonic()
        await self.end_if_done()

    async def end_if_done(self) -> None:
        exchange = self.context.exchange
        run = exchange.active
        if run is None:
            return
        row = self.context.ledger.run(run.run_id)
        finished_run, session = self._finished
        exported = finished_run is run and session == row["session"]
        if (
            exported
            and row["next_step"] >= run.num_steps
            and evaluation.pending(exchange, run) is None
            and not self._awaits_last_version(run)
        ):
            await self.states.end(run.run_id, "succeeded", explain(run, run.state.end_step))

    def _awaits_last_version(self, run: ActiveRun) -> bool:
        """Return whether a worker of the roster still lacks the last version. Workers serve the last version to
        callers after the run's end. The wait is bounded, because the run is trained and exported."""
        if time.monotonic() - self._finished_s >= LAST_VERSION_S:
            return False
        members = map(self.pool.members.get, self.pool.assignments.roster.member_ids)
        versions = [member.weights.version for member in members if member is not None]
        last_step = run.num_steps
        return any(version is not None and version.step < last_step for version in versions)
