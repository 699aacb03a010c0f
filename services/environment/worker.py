"""The environment service (`paceline serve environment`): a member of the pool, whose work on one run is in
`services/environment/run.py`. User code runs in separate processes (`environment/hosting/`), so it cannot stop the
service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from paceline.bundle.imports import check_requirements
from paceline.calls.backoff import ExponentialBackoff
from paceline.data.tokens import load_tokenizer
from paceline.environment.episodes import run_episodes
from paceline.environment.hosting.pool import UserCode
from paceline.environment.protocols import EpisodeLease, FinishedGroup, TokenSource, TurnLog
from paceline.environment.setting import EpisodeSetting
from paceline.errors import Unreadable
from paceline.host.resources import usable_cores
from paceline.services.common.worker.assigned_run import AssignedRun, BundledSpec, refusal_of_files, spec_of
from paceline.services.common.worker.membership import Membership
from paceline.services.environment.conversation_server import ConversationServer
from paceline.services.environment.run import EnvironmentRun
from paceline.services.environment.sampling_workers import SamplingWorkers
from paceline.v1 import common_pb2, worker_pb2
from paceline.wire import PROTOCOL

log = logging.getLogger(__name__)


class EnvironmentWorker:
    """A member of the environment pool; works on one run. `pause` is the back-off before a failed set-up is repeated."""

    def __init__(
        self,
        coordinator: str,
        member_id: str,
        num_processes: int = 0,
        pause: ExponentialBackoff | None = None,
        functions_from: Sequence[Path] = (),
        membership: Callable[..., Membership] = Membership,
    ):
        """`num_processes` run user code; 0 takes the run's `environment.processes`, else the number of cores."""
        self.member_id = member_id
        self.address = ""
        self.assigned = AssignedRun()
        self.drained = asyncio.Event()
        """Event that is set by `drain` and by the coordinator's directive to drain."""
        self._coordinator = coordinator
        self._num_processes = num_processes
        self._functions_from = functions_from
        self._set_up_pause = pause or ExponentialBackoff()
        self._run: EnvironmentRun | None = None
        self._worker_list: worker_pb2.Engines | None = None
        """The newest list of rollout workers, which may arrive before the run is set up."""
        self.membership = membership(coordinator, self._hello, self._on_directive, self._gauges)

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
        """Let episodes end for up to `grace_s` seconds, return the other leases, and return their number."""
        returned = await self._run.drain(grace_s) if self._run is not None else 0
        self.drained.set()
        return returned

    async def _work_on(self, assignment: worker_pb2.RunAssignment) -> bool:
        async with contextlib.AsyncExitStack() as opened:
            try:
                run = await opened.enter_async_context(self._set_up(assignment))
            except Exception as error:  # whatever cannot be loaded now may be there later
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
        """Load the tokenizer and the user code of a run. Raises the errors of the set-up, and InvalidInput if the code
        cannot be used."""
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
            opened.push_async_callback(code.close)  # also if the start is cancelled
            with bundled.original_paths():
                await code.start()
            workers = SamplingWorkers(assignment.run_id)
            opened.push_async_callback(workers.close)
            if self._worker_list is not None:
                workers.update(self._worker_list)
            conversations = None
            if not spec.environment.has_class:
                conversations = await opened.enter_async_context(ConversationServer(assignment.run_id, tokenizer))
            setting = EpisodeSetting.of(spec, tokenizer)

            def run_group(lease: EpisodeLease, tokens: TokenSource, turn_log: TurnLog) -> Awaitable[FinishedGroup]:
                return run_episodes(setting, lease, tokens, turn_log, code, conversations)

            most = processes * spec.environment.parallel_calls
            yield EnvironmentRun(spec, assignment.run_id, self.membership, workers, run_group, most, setting.counts)

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
                    log.warning("run %s continues with another environment, which is loaded", before.run_id)
                    self.assigned.assignment = directive.run
                    self.assigned.changed.set()
            case "idle":
                await self.assigned.idle()
            case "engines":
                self._worker_list = directive.engines
                if self._run is not None:
                    self._run.workers.update(directive.engines)
            case "drain":
                self.drained.set()

    async def _report_ready(self) -> None:
        run_id = self._run.run_id if self._run is not None else None
        await self.assigned.report(run_id, self.membership.report)

    def _hello(self) -> worker_pb2.Hello:
        return worker_pb2.Hello(
            role=common_pb2.ROLE_ENVIRONMENT, member_id=self.member_id, address=self.address, protocol=PROTOCOL
        )

    def _gauges(self) -> dict[str, float]:
        return self._run.gauges() if self._run is not None else {}
