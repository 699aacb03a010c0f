"""The start of a run: the active run after a restart, else the queued run that is due. A run that cannot be started now
is retried with back-off. A run whose spec this version cannot read lets other runs go first. A run fails here only
by a fault of its data, and only before its first step. After a restart nothing prevents a run from continuing: a
summary that a kill prevented is written if its rows can be read."""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
import time
from functools import partial

from paceline.calls.backoff import ExponentialBackoff
from paceline.errors import DataError, PacelineError, SpecError
from paceline.rate_limited_log import unforeseen
from paceline.services.coordinator.exchange import evaluation
from paceline.services.coordinator.exchange.state import ActiveRun
from paceline.services.coordinator.exchange.uploads.prompt_check import PromptCheck
from paceline.services.coordinator.ledger.ledger import ACTIVE_STATES
from paceline.services.coordinator.lifecycle.commands import started_facts
from paceline.services.coordinator.lifecycle.run_data import RunBundles, RunData, changed_data_warnings, on_own_thread
from paceline.services.coordinator.lifecycle.run_states import RunContext, RunStates, set_state
from paceline.services.coordinator.lifecycle.worker_faults import RETRIED, Faults
from paceline.services.coordinator.pool.pool import Pool
from paceline.spec import RunSpec
from paceline.spec.reading import spec_of_run, spec_to_yaml


async def recover(context: RunContext) -> None:
    """Write missing summaries, and read from the ledger whether a paused run is retried automatically, or lets other
    runs go first."""
    for row in context.ledger.runs():
        if row["state"] not in ("queued", *ACTIVE_STATES):
            _summarize(context, row["run_id"])
    active = context.ledger.active_run()
    if active is None:
        return
    if active["state"] == "paused" and context.ledger.is_retried(active["run_id"]):
        context.delays.retried = active["run_id"]
    elif active["state"] == "running" or context.ledger.queue():
        paused = (row["run_id"] for row in context.ledger.runs() if row["state"] == "paused")
        context.delays.passed_over.update(paused)


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
        self._opening: tuple[tuple[str, str], asyncio.Task[RunData]] | None = None
        """Run and bundle whose data sets are being opened, and the opening."""

    async def start_next(self) -> None:
        """Start the run that is due, if none is active and the back-off after the last attempt is over. If its data
        sets take long to open, a later call starts it."""
        if self._exchange.active is not None or time.monotonic() < self._delays.start_again_s:
            return
        row = self._ledger.due_run(self._delays.passed_over) or self._ledger.due_run()
        if row is None:
            return
        run_id = row["run_id"]
        try:
            spec, warnings = await asyncio.to_thread(spec_of_run, run_id, row["spec_yaml"])
        except SpecError as error:
            await self._pass_over(row, error)
            return
        try:
            data = await self._opened(run_id, spec)
            if data is None:
                return
            directory = self._ledger.run_directory(run_id)
            self._context.run_log.open(run_id, directory, tensorboard=spec.logger.tensorboard)
        except (PacelineError, OSError) as error:
            await self._postpone(row, error)
            return
        self._backoff.reset()
        worker_yaml = spec_to_yaml(spec) if warnings else row["spec_yaml"]
        warnings += changed_data_warnings(self._ledger.data_fingerprint(run_id), spec, data.prompts)
        run = ActiveRun(run_id, spec, data.prompts, data.validation, worker_yaml)
        if await self._activate(run, warnings):
            await self._announce(run)

    async def _opened(self, run_id: str, spec: RunSpec) -> RunData | None:
        """Return the data sets of a run; None while they are being opened, so that the other duties go on. Raises
        DataError, Unreadable."""
        key = run_id, self._ledger.bundle(run_id)
        if self._opening is None or self._opening[0] != key:
            opening = asyncio.create_task(on_own_thread(partial(self._bundles.open_data, spec, key[1])))
            opening.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may fetch it
            self._opening = key, opening
        opening = self._opening[1]
        await asyncio.wait((opening,), timeout=WAIT_S)
        if not opening.done():
            return None
        self._opening = None
        return opening.result()

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
                self._exchange.active, self._exchange.end_step = run, self._ledger.end_step(run.run_id)
                self._exchange.slots_changed()
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

    async def _pass_over(self, row: sqlite3.Row, error: SpecError) -> None:
        """Pause the run that is due because this version cannot read its spec; the next run goes first. The run keeps
        its open groups. If it is the only run, it is postponed instead, and its workers keep their leases."""
        run_id = row["run_id"]
        if self._ledger.due_run({*self._delays.passed_over, run_id}) is None:
            await self._postpone(row, error)
            return
        message = f"{error}. Other runs go first"
        async with self._context.lock:
            row = self._ledger.run(run_id)
            if row["state"] not in ("queued", *ACTIVE_STATES):
                return
            by_a_person = row["state"] == "paused" and not self._ledger.is_retried(run_id)
            with self._ledger.transaction():
                self._exchange.stop_work(run_id)
                set_state(self._ledger, run_id, "paused", message, retried=not by_a_person)
            self._delays.passed_over.add(run_id)
            if self._delays.retried == run_id:
                self._delays.retried = ""
        log.warning("run %s is paused, and other runs go first: %s", run_id, message)
        await self._context.watchers.notify()

    async def _postpone(self, row: sqlite3.Row, error: Exception) -> None:
        """Postpone the start of the run that is due, or fail the run if only another spec would help."""
        run_id = row["run_id"]
        if isinstance(error, DataError) and row["next_step"] == 0 and row["session"] == 0:
            await self._states.fail(run_id, str(error))
            return
        self._delays.start_again_s = time.monotonic() + self._backoff.next_s()
        if row["session"]:
            # Workers that connect now would learn that their run is not active, and would drop their groups.
            self._delays.waits_for = f"run {run_id} cannot be started yet: {error}"
        await self._states.pause_on_fault(run_id, f"{error}. {RETRIED}", retried=True)
