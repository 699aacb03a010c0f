"""Builds the coordinator from its parts, runs its periodic duties, and ends it.

Each piece of state has one owner: the ledger has runs and groups, `Pool` has the members and their assignments, and
`Runs` changes the states of runs. Everything runs on one event loop; `RunContext.lock` serialises transactions with
the exchange's.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.errors import LedgerFault
from paceline.files.names import BLOBS_NAME
from paceline.rate_limited_log import unforeseen
from paceline.services.common.access.insecure import insecurity
from paceline.services.common.access.rights import Caller
from paceline.services.coordinator.blobs import BlobStore
from paceline.services.coordinator.exchange.state import Exchange
from paceline.services.coordinator.exchange.transport.server import ExchangeServer
from paceline.services.coordinator.exchange.uploads.prompt_check import PromptCheck
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.lifecycle.run_data import RunBundles
from paceline.services.coordinator.lifecycle.runs import Runs
from paceline.services.coordinator.members.registry import Members
from paceline.services.coordinator.pool.run_context import RunContext, Watchers
from paceline.services.coordinator.reporting.member_files import GaugeHistory
from paceline.services.coordinator.reporting.otel import StateMeters
from paceline.services.coordinator.reporting.run_log import RunLog
from paceline.services.coordinator.reporting.watchdog import Watchdog
from paceline.services.coordinator.scaling.policy import PoolConfig
from paceline.services.coordinator.scaling.scaler import PERIOD_S, Scaler
from paceline.tls.folder import tls_folder

TICK_S = 0.5
DRAIN_NOTICE_S = 5.0
"""Seconds for which a stopping coordinator waits for workers to report their own stop; they report every second."""

log = logging.getLogger(__name__)


class Observers(NamedTuple):
    """Parts that watch the coordinator's state at each tick."""

    watchdog: Watchdog
    prompts: PromptCheck
    gauge_history: GaugeHistory
    state_meters: StateMeters


class Duties:
    """The periodic duties: each concerns one member or one run, and a failed one is retried at the next tick."""

    def __init__(
        self,
        runs: Runs,
        scaler: Scaler,
        bundles: RunBundles,
        observers: Observers,
        refusal: Callable[[Caller], str],
        tick_s: float,
    ):
        self._runs, self._context, self._pool = runs, runs.context, runs.pool
        self._scaler, self._bundles, self._observers = scaler, bundles, observers
        self._refusal, self._tick_s = refusal, tick_s
        self._ledger_fault: LedgerFault | None = None
        self._context.ledger.on_fault = self._on_ledger_fault

    async def run_forever(self) -> None:
        """Start queued runs and expire silent members, until cancelled. Raises LedgerFault if the disk has refused any
        transaction, because the worker that got the error would otherwise retry for ever."""
        watching = asyncio.create_task(self._pool.lag.watch())
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
            self._runs.starter.start_next,
            self._put_out_revoked,
            self._expire_silent,
            self._check,
            self._runs.preemption.check,
            self._runs.hours.check,
            self._scaler.check,
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
        for member in self._pool.members.all():
            if member.introduction.caller is not None and (why := self._refusal(member.introduction.caller)):
                await self._pool.put_out(member, why)

    async def _expire_silent(self) -> None:
        if not self._context.delays.waits_for:  # while workers are refused, their silence has no meaning
            await self._pool.expire_silent()

    async def _check(self) -> None:
        """React to the members' faults, and pass on the warnings of the watchdog and of the prompt check."""
        await self._runs.faults.check(time.monotonic())
        messages = [*self._observers.watchdog.check(time.monotonic()), *self._observers.prompts.take_warnings()]
        await self._context.watchers.warn(messages, stalls=self._observers.watchdog.stalls)
        await self._runs.end_if_done()

    async def _tidy_up(self) -> None:
        await self._prune()
        self._context.ledger.remove_unused_segments()
        await self._bundles.tidy_up()

    async def _observe(self) -> None:
        self._observers.state_meters.observe(time.monotonic())
        self._observers.gauge_history.observe(time.monotonic())

    async def _prune(self) -> None:
        run = self._context.exchange.active
        if run is None or run.prompts is None or run.spec.logger.keep_samples:
            return
        async with self._context.lock:
            if self._context.ledger.is_pruning_due(run.run_id, run.batch_size):
                with self._context.ledger.transaction(synced=False):
                    self._context.ledger.prune(run.run_id, run.batch_size)

    def _on_ledger_fault(self, fault: LedgerFault) -> None:
        self._ledger_fault = fault


class Coordinator:
    """The parts of one coordinator."""

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
        self.ledger, self.members = ledger, members
        self.committed = Ledger(ledger.path, read_only=True)
        """Read-only connection for answers to clients: it does not see uncommitted transactions."""
        self.exchange = Exchange(ledger)
        self.blobs = blobs or BlobStore(directory / BLOBS_NAME)
        self.insecurity = insecurity(host)
        """Warning about connections that are not encrypted; empty if all are."""
        lock, run_log = asyncio.Lock(), RunLog(ledger, self.exchange, members)
        self._prompts = PromptCheck(ledger.path, ledger.key)
        self.server = ExchangeServer(
            self.exchange,
            lock,
            run_log.write_down,
            lambda notices: self.runs.act_on(notices),
            host,
            exchange_port,
            self._prompts,
            encrypted=tls_folder() is not None,
        )
        self.context = RunContext(
            ledger,
            self.exchange,
            lock,
            run_log,
            self.server,
            Watchers(ledger, self.exchange, lock, run_log, self.server),
        )
        self.scaler = Scaler(ledger, self.exchange, members, scaling_period_s, pools=pools)
        bundles = RunBundles(ledger, self.blobs, functions_from)
        self.runs = Runs(self.context, members, directory, self._prompts, bundles, self.scaler)
        self.pool = self.runs.pool
        observers = Observers(
            Watchdog(ledger, self.exchange, members, ledger.path.parent, min_free_bytes),
            self._prompts,
            GaugeHistory(ledger.path.parent, members),
            StateMeters(ledger, self.exchange, members, ledger.path.parent, is_insecure=bool(self.insecurity)),
        )
        self._tick_s = tick_s
        self.duties = Duties(self.runs, self.scaler, bundles, observers, refusal, tick_s)

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
        self.context.watchers.stopping = True
        for member in self.members.all():
            member.end_stream()
        await self.context.watchers.notify()

    def close(self) -> None:
        """Close sockets and files; the caller who opened the ledger closes it."""
        self.server.close()
        self._prompts.close()
        self.context.run_log.close()
        self.committed.close()
