"""The environment service: it takes the leases of runs with an environment and runs their episodes.

`EnvironmentWorker` is a member of the pool; `services/environment/run.py` is its work on one run. User code runs in separate
processes (`environment/hosting/`), so it cannot stop the service. Started by `paceline serve environment` (also
`paceline-environment`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path

from paceline.bundle.imports import check_requirements
from paceline.calls.backoff import ExponentialBackoff
from paceline.data.tokens import load_tokenizer
from paceline.environment.episodes import run_episodes
from paceline.environment.hosting.pool import UserCode
from paceline.environment.protocols import EpisodeLease, GroupRows, Journal, TokenSource
from paceline.environment.setting import EpisodeSetting
from paceline.errors import Unreadable
from paceline.host.resources import usable_cores
from paceline.services.common.worker.assigned_run import AssignedRun, BundledSpec, refusal_of_files, spec_of
from paceline.services.common.worker.membership import Membership
from paceline.services.environment.engines import Engines
from paceline.services.environment.run import EnvironmentRun
from paceline.services.environment.session_server import SessionServer
from paceline.v1 import common_pb2, worker_pb2
from paceline.wire import PROTOCOL

log = logging.getLogger(__name__)


class EnvironmentWorker:
    """One member of the environment pool: at most one run at a time.

    A set-up that fails is retried after a growing pause for as long as the run is assigned; `pause` is that backoff.
    """

    def __init__(
        self,
        coordinator: str,
        member_id: str,
        num_processes: int = 0,
        pause: ExponentialBackoff | None = None,
        functions_from: Sequence[Path] = (),
    ):
        """`num_processes` are those of user code; 0 takes the run's `environment.processes`, else the host's cores."""
        self.member_id = member_id
        self.address = ""
        self.assigned = AssignedRun()
        self.drained = asyncio.Event()
        """Set by the coordinator's order to leave, and by `drain`."""
        self._coordinator = coordinator
        self._num_processes = num_processes
        self._functions_from = functions_from
        self._set_up_pause = pause or ExponentialBackoff()
        self._run: EnvironmentRun | None = None
        self._engines: worker_pb2.Engines | None = None
        """The newest list, which may come before the run is set up."""
        self.membership = Membership(coordinator, self._hello, self._on_directive, self._gauges)

    async def work(self) -> None:
        while True:
            self.assigned.changed.clear()
            assignment = self.assigned.assignment
            if assignment is None:
                await self.assigned.changed.wait()
                continue
            work = asyncio.create_task(self._work_on(assignment))
            changed = asyncio.create_task(self.assigned.changed.wait())
            try:
                await asyncio.wait((work, changed), return_when=asyncio.FIRST_COMPLETED)
                if work.done() and not work.result():
                    await asyncio.wait((changed,), timeout=self._set_up_pause.next_s())
                elif work.done():
                    await self.assigned.changed.wait()  # the run is over; the next directive is on its way
            finally:
                changed.cancel()
                work.cancel()
                await asyncio.wait((work,))

    async def drain(self, grace_s: float) -> int:
        """End the episodes that end in `grace_s` seconds and return the other leases; return their number."""
        returned = await self._run.drain(grace_s) if self._run is not None else 0
        self.drained.set()
        return returned

    async def _work_on(self, assignment: worker_pb2.RunAssignment) -> bool:
        """Set up a run and work on it to its end; return False when it could not be set up."""
        async with contextlib.AsyncExitStack() as opened:
            try:
                run = await opened.enter_async_context(self._set_up(assignment))
            except Exception as error:  # anything that cannot be loaded now may be there later
                await self.assigned.failed(assignment.run_id, error, self.membership.report)
                return False
            self._run = run
            opened.callback(setattr, self, "_run", None)
            self._set_up_pause.reset()
            await self.assigned.set_up()
            await self._report_ready()
            await run.work()
        return True

    @contextlib.asynccontextmanager
    async def _set_up(self, assignment: worker_pb2.RunAssignment) -> AsyncIterator[EnvironmentRun]:
        """Load tokenizer and user code of a run. Raises InvalidInput for code that cannot be used, and whatever else a
        set-up meets."""
        spec, bundle = spec_of(assignment), assignment.bundle
        if why := refusal_of_files(spec, bundle, self._functions_from):
            raise Unreadable(f"this worker does not run the environment: {why}")
        async with contextlib.AsyncExitStack() as opened:
            bundled = await asyncio.to_thread(
                BundledSpec, spec, self._coordinator, bundle, "code", "include", allowed=self._functions_from
            )
            opened.callback(bundled.close)
            spec = bundled.spec
            await asyncio.to_thread(check_requirements, spec.bundle.requirements)
            tokenizer = await asyncio.to_thread(load_tokenizer, spec.policy)
            processes = self._num_processes or spec.environment.processes or usable_cores()
            code = UserCode(spec.environment, processes)
            opened.push_async_callback(code.close)  # also of a start that is cancelled
            with bundled.original_paths():
                await code.start()
            engines = Engines(assignment.run_id)
            opened.push_async_callback(engines.close)
            if self._engines is not None:
                engines.update(self._engines)
            sessions = None
            if not spec.environment.has_class:
                sessions = await opened.enter_async_context(SessionServer(assignment.run_id, tokenizer))
            setting = EpisodeSetting.of(spec, tokenizer)

            def run_group(lease: EpisodeLease, tokens: TokenSource, journal: Journal) -> Awaitable[GroupRows]:
                return run_episodes(setting, lease, tokens, journal, code, sessions)

            most = processes * spec.environment.parallel_calls
            yield EnvironmentRun(spec, assignment.run_id, self.membership, engines, run_group, most, setting.counts)

    async def _on_directive(self, directive: worker_pb2.ConnectResponse) -> None:
        match directive.WhichOneof("directive"):
            case "welcome":
                await self._report_ready()
            case "run":
                before = self.assigned.assignment
                if self.assigned.assign(directive.run):
                    self._set_up_pause.reset()
                elif before is not None and before.bundle != directive.run.bundle:
                    # As after `paceline resume`.
                    log.warning("run %s goes on with another environment, which is loaded", before.run_id)
                    self.assigned.assignment = directive.run
                    self.assigned.changed.set()
            case "idle":
                await self.assigned.idle()
            case "engines":
                self._engines = directive.engines
                if self._run is not None:
                    self._run.engines.update(directive.engines)
            case "drain":
                self.drained.set()

    async def _report_ready(self) -> None:
        run_id = self._run.run_id if self._run is not None else None
        await self.assigned.report(run_id, self.membership.report)

    def _hello(self) -> worker_pb2.Hello:
        return worker_pb2.Hello(
            role=common_pb2.ROLE_ENVIRONMENT,
            member_id=self.member_id,
            address=self.address,
            protocol=PROTOCOL,
        )

    def _gauges(self) -> dict[str, float]:
        return self._run.gauges() if self._run is not None else {}
