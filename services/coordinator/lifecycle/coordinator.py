"""The coordinator: its parts, its periodic duties and its end.

Each piece of state has one owner: the ledger has runs and groups, `Pool` the members and their assignments, the modules
of this folder the runs. Everything runs on one event loop; `lock` serialises transactions with the exchange's. The
states of a run:

  queued    `run_queue.py`, after its spec and data sets were checked
  running   `run_start.py`, when no run is active and its data sets could be opened
            A run of a higher priority preempts it: `preemption.py` queues it again, or ends it before its last step
  paused    `commands.py` by a person; `run_states.py` on a fault, with the reason, and retried automatically if waiting may
            help (`worker_faults.py`). A run that a person must resume, or that cannot be started
            now, lets other runs go first
  failed    `run_states.py`, by a fault of its spec, before its first step. It keeps its open groups, and `resume` queues it
  ended     here, after all steps are trained, the learner has exported, no evaluation is pending, and the workers
            have the last version (LAST_VERSION_S at most)
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.errors import LedgerFault
from paceline.files.names import BLOBS_NAME
from paceline.rate_limited_log import unforeseen
from paceline.services.common.access.insecure import insecurity
from paceline.services.common.access.rights import Caller
from paceline.services.coordinator.blobs import BlobStore
from paceline.services.coordinator.exchange import evaluation
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange, Notice
from paceline.services.coordinator.exchange.transport.server import ExchangeServer
from paceline.services.coordinator.exchange.uploads.prompt_check import PromptCheck
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.lifecycle import run_start
from paceline.services.coordinator.lifecycle.commands import Commands, Resumption
from paceline.services.coordinator.lifecycle.preemption import Hours, Preemption, explain
from paceline.services.coordinator.lifecycle.run_data import RunBundles
from paceline.services.coordinator.lifecycle.run_queue import RunQueue
from paceline.services.coordinator.lifecycle.run_start import RunStarter
from paceline.services.coordinator.lifecycle.run_states import RunContext, RunStates, Watchers
from paceline.services.coordinator.lifecycle.worker_faults import Faults
from paceline.services.coordinator.members.registry import Members
from paceline.services.coordinator.pool.pool import Pool
from paceline.services.coordinator.reporting.member_files import GaugeHistory
from paceline.services.coordinator.reporting.otel import StateMeters
from paceline.services.coordinator.reporting.run_log import RunLog
from paceline.services.coordinator.reporting.watchdog import Watchdog
from paceline.services.coordinator.scaling.policy import PoolConfig
from paceline.services.coordinator.scaling.scaler import PERIOD_S, Scaler
from paceline.services.coordinator.text_limits import one_line
from paceline.tls.folder import tls_folder

TICK_S = 0.5
LAST_VERSION_S = 30.0
"""Seconds for which a trained and exported run waits until its workers have the last version."""
DRAIN_NOTICE_S = 5.0
"""Seconds for which a stopping coordinator waits for workers to report their own stop; they report every second."""

log = logging.getLogger(__name__)


class Coordinator:
    """The runs of one ledger; `pool` assigns the workers to the active run."""

    def __init__(
        self,
        ledger: Ledger,
        directory: Path,
        members: Members,
        host: str,
        exchange_port: int,
        min_free_bytes: int = 0,
        functions_from: Sequence[Path] = (),
        blobs: BlobStore | None = None,
        scaling_period_s: float = PERIOD_S,
        refusal: Callable[[Caller], str] = lambda caller: "",
        pools: Sequence[PoolConfig] = (),
        tick_s: float = TICK_S,
    ):
        """`blobs` has the files of the runs; by default those below `directory`. `scaling_period_s` is the time between
        two decisions on the sizes of pools; `pools` are the pools with bounds. `refusal` returns why a member's
        caller is not valid any more, or an empty text."""
        self.ledger = ledger
        self.committed = Ledger(ledger.path, read_only=True)
        """Read-only connection for answers to clients: it does not see uncommitted transactions."""
        self.members = members
        self.lock = asyncio.Lock()
        self.exchange = Exchange(ledger)
        self.scaler = Scaler(ledger, self.exchange, members, scaling_period_s, pools=pools)
        self.run_log = RunLog(ledger, self.exchange, members)
        self._prompts = PromptCheck(ledger.path, ledger.key)
        self.server = ExchangeServer(
            self.exchange,
            self.lock,
            self.run_log.write_down,
            self.act_on,
            host,
            exchange_port,
            self._prompts,
            encrypted=tls_folder() is not None,
        )
        self.watchers = Watchers(ledger, self.exchange, self.lock, self.run_log, self.server)
        self.context = RunContext(ledger, self.exchange, self.lock, self.run_log, self.server, self.watchers)
        self.stopping, self._tick_s = False, tick_s
        self.pool = Pool(self, members)
        self._refusal = refusal
        self.states = RunStates(self.context, self.pool.assignments)
        self.faults = Faults(self.context, members, self.states, self.pool.assignments)
        self.blobs = blobs or BlobStore(directory / BLOBS_NAME)
        self._bundles = RunBundles(ledger, self.blobs, functions_from)
        resumption = Resumption(self.context, self._prompts, self._bundles)
        self.commands = Commands(self.context, self.states, self.faults, self.pool.assignments, resumption, members)
        self.queue = RunQueue(ledger, directory, self.lock, self.watchers, self._bundles)
        self.starter = RunStarter(self.context, self.states, self.faults, self.pool, self._prompts, self._bundles)
        self.preemption = Preemption(self.context, self.states, self.pool.assignments)
        self._hours = Hours(self.context)
        self.watchdog = Watchdog(ledger, self.exchange, members, ledger.path.parent, min_free_bytes)
        self._gauge_history = GaugeHistory(ledger.path.parent, members)
        self.insecurity = insecurity(host)
        """Warning about connections that are not encrypted; empty if all are."""
        self._state_meters = StateMeters(
            ledger, self.exchange, members, ledger.path.parent, is_insecure=bool(self.insecurity)
        )
        self._finished: tuple[ActiveRun | None, int] = (None, 0)
        """The run and the session whose learner has finished."""
        self._finished_s = 0.0
        """Monotonic time at which the learner in `_finished` first reported that it has finished."""
        self._ledger_fault: LedgerFault | None = None
        ledger.on_fault = self._on_ledger_fault

    async def recover(self) -> None:
        """Restore the active run. Call this before anyone may connect, else workers are told that their run is over."""
        await run_start.recover(self.context)
        await self.starter.start_next()
        await run_start.warn_of_backup(self.context)

    async def run_forever(self) -> None:
        """Start queued runs and expire silent members, until cancelled. Raises LedgerFault if the disk has refused any
        transaction, because the worker that got the error would otherwise retry for ever."""
        watching = asyncio.create_task(self.pool.lag.watch())
        try:
            while True:
                await self._tick()
                await asyncio.sleep(self._tick_s)
        finally:
            watching.cancel()

    async def _tick(self) -> None:
        if self._ledger_fault is not None:
            raise self._ledger_fault
        duties = (
            self.starter.start_next,
            self._put_out_revoked,
            self._expire_silent,
            self._check,
            self.preemption.check,
            self._hours.check,
            self.scaler.check,
            self._tidy_up,
            self._observe,
        )
        for duty in duties:
            try:
                await duty()
            except (LedgerFault, sqlite3.Error):
                raise
            except Exception as error:  # the error concerns one member or one run; the next tick retries
                unforeseen.note("the coordinator's duties", error)

    async def _put_out_revoked(self) -> None:
        for member in self.members.all():
            if member.caller is not None and (why := self._refusal(member.caller)):
                await self.pool.put_out(member, why)

    async def _expire_silent(self) -> None:
        if not self.context.delays.waits_for:  # while workers are refused, their silence has no meaning
            await self.pool.expire_silent()

    async def _check(self) -> None:
        """React to the members' faults, and pass on the warnings of the watchdog and of the prompt check."""
        await self.faults.check(time.monotonic())
        messages = [*self.watchdog.check(time.monotonic()), *self._prompts.take_warnings()]
        await self.watchers.warn(messages, stalls=self.watchdog.stalls)
        await self._finish_if_done()

    async def _tidy_up(self) -> None:
        await self._prune()
        self.ledger.remove_unused_segments()
        await self._bundles.tidy_up()

    async def _observe(self) -> None:
        self._state_meters.observe(time.monotonic())
        self._gauge_history.observe(time.monotonic())

    async def _prune(self) -> None:
        run = self.exchange.active
        if run is None or run.prompts is None or run.spec.logger.keep_samples:
            return
        async with self.lock:
            if self.ledger.is_pruning_due(run.run_id, run.batch_size):
                with self.ledger.transaction(synced=False):
                    self.ledger.prune(run.run_id, run.batch_size)

    def _on_ledger_fault(self, fault: LedgerFault) -> None:
        self._ledger_fault = fault

    # Events of the pool and of the exchange

    async def act_on(self, notices: list[Notice]) -> None:
        """Process a commit: summarize a run that was paused, end a finished run, update the roster, notify watchers."""
        run = self.exchange.active
        if run is None:
            return
        self.scaler.note(notices)
        for notice in notices:
            if notice.kind == "paused" and notice.run_id == run.run_id:
                log.warning("run %s is paused: %s", run.run_id, one_line(notice.content["message"]))
                self.run_log.summarize(run.run_id)
        self.pool.assignments.update_lists()
        await self.watchers.notify()
        await self._finish_if_done()

    async def pause_on_fault(self, run_id: str, message: str, *, retried: bool = False) -> None:
        """Pause a run that cannot continue."""
        await self.states.pause_on_fault(run_id, message, retried=retried)

    async def learner_finished(self, session: int) -> None:
        """End the exported run, unless an evaluation is pending or workers still wait for the last version."""
        if self._finished != (self.exchange.active, session):
            self._finished, self._finished_s = (self.exchange.active, session), time.monotonic()
        await self._finish_if_done()

    async def _finish_if_done(self) -> None:
        run = self.exchange.active
        if run is None:
            return
        row = self.ledger.run(run.run_id)
        finished_run, session = self._finished
        exported = finished_run is run and session == row["session"]
        if (
            exported
            and row["next_step"] >= self.exchange.num_steps(run)
            and evaluation.pending(self.exchange, run) is None
            and not self._awaits_last_version(run)
        ):
            await self.states.end(run.run_id, "succeeded", explain(run, self.exchange.end_step))

    def _awaits_last_version(self, run: ActiveRun) -> bool:
        """Return whether a worker of the roster still has an older version than the last one. Workers serve the last
        version to callers after the run's end. The wait is bounded, because the run is trained and exported."""
        if time.monotonic() - self._finished_s >= LAST_VERSION_S:
            return False
        members = map(self.members.get, self.pool.assignments.roster.member_ids)
        versions = [member.version for member in members if member is not None]
        return any(version is not None and version.step < self.exchange.num_steps(run) for version in versions)

    async def warn(self, messages: list[str]) -> None:
        await self.watchers.warn(messages)

    async def tell_watchers(self) -> None:
        await self.watchers.notify()

    # The end

    async def wait_for_leavers(self, grace_s: float) -> None:
        """Keep serving, for `grace_s` seconds at most, until the draining workers have left. The signal that stops the
        coordinator often stops the workers too, in any order, and their last submissions (unfinished groups, scores,
        a checkpoint) would have to be computed again. Workers that stay are not affected."""
        started_s = time.monotonic()
        while self.members.all() and (waited_s := time.monotonic() - started_s) < grace_s:
            leaving = [member.member_id for member in self.members.all() if member.draining]
            if waited_s > DRAIN_NOTICE_S and not leaving:
                return
            await asyncio.sleep(self._tick_s / 5)

    async def end_streams(self) -> None:
        """End the streams of workers and watchers, which otherwise do not end."""
        self.stopping = True
        for member in self.members.all():
            member.end_stream()
        await self.watchers.notify()

    def close(self) -> None:
        """Close sockets and files; the caller who opened the ledger closes it."""
        self.server.close()
        self._prompts.close()
        self.run_log.close()
        self.committed.close()
