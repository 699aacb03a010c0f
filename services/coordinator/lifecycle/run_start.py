"""Starts a run: after a restart the active run, else the queued run that is due. A run that cannot be started now lets
other runs go first and is retried with back-off; while another run is active, it is queued again when its data sets can
be opened. After a restart, a run keeps its place if workers hold its leases. If the coordinator was killed before it
wrote a run's summary, the summary is written after the restart if the run's rows can be read. A run fails here only by
a fault of its data, before its first step."""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
import time
from collections import Counter
from functools import partial

from paceline.calls.backoff import ExponentialBackoff
from paceline.errors import DataError, PacelineError, SpecError
from paceline.rate_limited_log import unforeseen
from paceline.services.coordinator.exchange import evaluation
from paceline.services.coordinator.exchange.state import ActiveRun
from paceline.services.coordinator.exchange.uploads.prompt_check import PromptCheck
from paceline.services.coordinator.ledger.ledger import ACTIVE_STATES
from paceline.services.coordinator.lifecycle.commands import started_facts
from paceline.services.coordinator.lifecycle.run_data import (
    OPENING_S,
    Openings,
    RunBundles,
    RunData,
    StillOpening,
    changed_data_warnings,
)
from paceline.services.coordinator.lifecycle.run_states import RunStates, set_state
from paceline.services.coordinator.lifecycle.worker_faults import RETRIED, Faults
from paceline.services.coordinator.pool.pool import Pool
from paceline.services.coordinator.pool.run_context import RunContext
from paceline.spec import RunSpec
from paceline.spec.reading import spec_of_run, spec_to_yaml


async def recover(context: RunContext) -> None:
    """Write missing summaries, and read from the ledger which run has the workers, which paused run is retried
    automatically, and which runs let other runs go first. Workers must connect after the run has been opened."""
    for row in context.ledger.runs():
        if row["state"] not in ("queued", *ACTIVE_STATES):
            _summarize(context, row["run_id"])
    active, delays = context.ledger.active_run(), context.delays
    if active is None:
        return
    paused = [row for row in context.ledger.runs() if row["state"] == "paused"]
    retried = [row for row in paused if context.ledger.is_retried(row["run_id"])]
    if active["state"] == "paused" and retried:
        active = retried[0]
        delays.retried = active["run_id"]
    if active["state"] == "running" or retried or context.ledger.queue():
        delays.passed_over.update(row["run_id"] for row in paused if row["run_id"] != delays.retried)
    if active["session"] and active["run_id"] not in delays.passed_over:
        delays.waits_for = f"run {active['run_id']} opens its data sets"


async def warn_of_backup(context: RunContext) -> None:
    """Warn the active run if the ledger was restored from a backup."""
    if context.ledger.set_aside is not None:
        message = (
            f"the ledger was restored from a backup; the newer files beside it were moved to "
            f"{context.ledger.set_aside}. Files that the run has written since the backup stay, and nothing loads them"
        )
        log.warning("%s", message)
        await context.watchers.warn([message])


def _summarize(context: RunContext, run_id: str) -> None:
    try:
        context.run_log.summarize_if_missing(run_id)
    except sqlite3.Error:
        raise
    except Exception as error:  # a damaged row of this run may raise anything, and must not stop the other runs
        unforeseen.note(f"the summary of run {run_id}", error)


log = logging.getLogger(__name__)
WAIT_S = 1.0
"""Seconds in which most data sets open; the coordinator's other duties wait no longer."""
PATIENCE_S = 10.0
"""Seconds after which a run whose data sets are still being opened lets other runs go first."""


class RunStarter:
    def __init__(
        self,
        context: RunContext,
        states: RunStates,
        faults: Faults,
        pool: Pool,
        prompts: PromptCheck,
        bundles: RunBundles,
    ):
        self._context, self._states, self._faults, self._pool = context, states, faults, pool
        self._ledger, self._exchange, self._delays = context.ledger, context.exchange, context.delays
        self._prompts, self._bundles = prompts, bundles
        self._backoff = ExponentialBackoff()
        self._openings = Openings()
        self._opening, self._began_s = "", 0.0
        """Run that waits for its data sets, and the monotonic time since which it waits."""
        self._attempts: Counter[str] = Counter()
        """Number of failed attempts to start each run, so that runs that are retried take turns."""

    async def start_next(self) -> None:
        """Start the run that is due, if no run is active; else queue a run again if it let other runs go first and can
        be opened now. If the data sets of a run take long to open, a later call starts it."""
        self._openings.drop(lambda name: self._ledger.run(name[0])["state"] in ("queued", *ACTIVE_STATES))
        row = self._due()
        if row is None:
            return
        run_id = row["run_id"]
        try:
            spec, warnings = await asyncio.to_thread(spec_of_run, run_id, row["spec_yaml"])
            data = await self._opened(run_id, spec)
            if data is None:
                return
            if self._exchange.active is not None:
                await self._queue_again(run_id)
                return
            directory = self._ledger.run_directory(run_id)
            self._context.run_log.open(run_id, directory, tensorboard=spec.logger.tensorboard)
        except (PacelineError, OSError) as error:
            await self._postpone(row, error)
            return
        self._attempts.pop(run_id, None)
        self._backoff.reset()
        worker_yaml = spec_to_yaml(spec) if warnings else row["spec_yaml"]
        warnings += changed_data_warnings(self._ledger.data_fingerprint(run_id), spec, data.prompts)
        run = ActiveRun(run_id, spec, data.prompts, data.validation, worker_yaml)
        if await self._activate(run, warnings):
            await self._announce(run)

    def _due(self) -> sqlite3.Row | None:
        """Return the run to start; while a run is active, a run that let other runs go first and is retried now."""
        is_active = self._exchange.active is not None
        row = None if is_active else self._ledger.due_run(self._delays.passed_over)
        if row is not None and not self._delays.waits_for:
            return row
        if time.monotonic() < self._delays.start_again_s:
            return None
        if row is None:
            rows = (self._ledger.run(run_id) for run_id in sorted(self._delays.passed_over))
            retried = [row for row in rows if row["state"] == "paused" and self._ledger.is_retried(row["run_id"])]
            row = min(retried, key=lambda row: (self._attempts[row["run_id"]], row["sequence"]), default=None)
        return row if row is not None or is_active else self._ledger.due_run()

    def _others_go_first(self, run_id: str) -> bool:
        """Return whether another run has the workers, or can be started instead of this one."""
        passed_over = {*self._delays.passed_over, run_id}
        return self._exchange.active is not None or self._ledger.due_run(passed_over) is not None

    async def _opened(self, run_id: str, spec: RunSpec) -> RunData | None:
        """Return the data sets of a run; None while they are being opened, so that the other duties go on. Raises
        DataError, Busy; Unreadable, also if they take long and other runs can go first."""
        if self._opening != run_id:
            self._opening, self._began_s = run_id, time.monotonic()
        bundle = self._ledger.bundle(run_id)
        limit_s = 0.0 if self._exchange.active is not None else WAIT_S
        work = partial(self._bundles.open_data, spec, bundle)
        try:
            data = await self._openings.open((run_id, bundle), work, limit_s)
        except StillOpening:
            others = not self._delays.waits_for and self._others_go_first(run_id)
            if time.monotonic() - self._began_s < (PATIENCE_S if others else OPENING_S):
                return None
            self._opening = ""
            raise
        self._opening = ""
        return data

    async def _queue_again(self, run_id: str) -> None:
        """Queue a run that let others go first, because it can be started now."""
        async with self._context.lock:
            if self._ledger.run(run_id)["state"] == "paused" and self._ledger.is_retried(run_id):
                with self._ledger.transaction():
                    set_state(self._ledger, run_id, "queued")
                self._delays.passed_over.discard(run_id)
        await self._context.watchers.notify()

    async def _activate(self, run: ActiveRun, warnings: list[str]) -> bool:
        """Make a run the active run; return False if it was cancelled while its data were opened."""
        async with self._context.lock:
            row = self._ledger.run(run.run_id)
            if row["state"] not in ("queued", *ACTIVE_STATES):
                self._context.run_log.close()
                return False
            with self._ledger.transaction():
                if row["state"] == "queued" or (row["state"] == "paused" and self._ledger.is_retried(run.run_id)):
                    set_state(
                        self._ledger, run.run_id, "running", **started_facts(run, self._ledger.bundle(run.run_id))
                    )
                self._delays.retried = ""
                self._delays.passed_over.discard(run.run_id)
                for warning in warnings:
                    self._ledger.add_event(run.run_id, "warning", {"message": warning})
                run.state.end_early(self._ledger.end_step(run.run_id))
                self._exchange.activate(run)
                if run.validation is not None and run.spec.grpo.val_at_start:
                    evaluation.begin(self._exchange, run, 0)
        return True

    async def _announce(self, run: ActiveRun) -> None:
        self._faults.clear()
        if self._delays.waits_for:
            self._delays.waits_for = ""
            self._pool.members.ignore_silence(math.inf, time.monotonic())
            self._pool.expect_holders()
        if run.prompts is not None:
            self._prompts.begin(run.run_id, run.spec)
        next_step = self._ledger.run(run.run_id)["next_step"]
        log.info("run %s starts at step %d of %d", run.run_id, next_step, run.spec.max_num_steps)
        await self._pool.assignments.assign_all()
        await self._context.watchers.notify()

    async def _postpone(self, row: sqlite3.Row, error: Exception) -> None:
        """Pause the run until a retry, unless a person has paused it, and let other runs go first; it keeps its open
        groups. Fail it if only another spec would help. A run keeps its place if workers hold its leases, and if
        this version can read its spec or there is no other run."""
        run_id = row["run_id"]
        if isinstance(error, DataError) and row["next_step"] == 0 and row["session"] == 0:
            await self._states.fail(run_id, str(error))
            return
        self._attempts[run_id] += 1
        others = self._others_go_first(run_id)
        self._delays.start_again_s = time.monotonic() + self._backoff.next_s()
        keeps_leases = not isinstance(error, SpecError) and (row["state"] == "running" or self._ledger.holders())
        if self._delays.waits_for and (keeps_leases or not others):
            # Workers that connect now would learn that their run is not active, and would drop their groups.
            self._delays.waits_for = f"run {run_id} cannot be started yet: {error}"
            await self._states.pause_on_fault(run_id, f"{error}. {RETRIED}", retried=True)
            return
        self._delays.waits_for = ""
        message = str(error) if others and isinstance(error, SpecError) else f"{error}. {RETRIED}"
        message += ". Other runs go first" * others
        async with self._context.lock:
            row = self._ledger.run(run_id)
            if row["state"] not in ("queued", *ACTIVE_STATES):
                return
            self._delays.passed_over.add(run_id)
            if self._delays.retried == run_id:
                self._delays.retried = ""
            by_a_person = row["state"] == "paused" and not self._ledger.is_retried(run_id)
            if by_a_person or (row["state"], row["message"]) == ("paused", message):
                return
            with self._ledger.transaction():
                self._exchange.stop_work(run_id)
                set_state(self._ledger, run_id, "paused", message, retried=True)
        log.warning("run %s is paused: %s", run_id, message)
        await self._context.watchers.notify()
