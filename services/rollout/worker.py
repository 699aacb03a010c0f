"""The rollout service (`paceline serve rollout`): a member of the pool. `services/rollout/run.py` is its work on one
run, `services/rollout/servicer.py` answers `RolloutService`. Workers of one run may have different engines and sizes
(`--engine KEY=VALUE`): of the keys of `policy.generation`, only those that set how a worker computes may differ; the
distribution that it samples from is the run's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import click

from paceline.calls.backoff import ExponentialBackoff
from paceline.errors import EngineDied, InvalidInput, SpecError
from paceline.services.common.gpus import refuse_cpu
from paceline.services.common.relay import RelayConnection, goes_by_host
from paceline.services.common.worker.assigned_run import AssignedRun, spec_of
from paceline.services.common.worker.membership import Membership
from paceline.services.rollout.openai.server import Endpoint
from paceline.services.rollout.run import RolloutRun
from paceline.spec import RunSpec
from paceline.spec.reading import apply_override, parse_spec
from paceline.v1 import common_pb2, worker_pb2
from paceline.wire import PROTOCOL

log = logging.getLogger(__name__)


class RolloutWorker:
    """One member of the rollout pool: at most one run at a time. A failed set-up is retried after the back-off `pause`
    while the run is assigned. `host` is this machine's address for weights, and `bind` the address to listen on if it
    is not `host`."""

    def __init__(
        self,
        coordinator: str,
        member_id: str,
        device: str,
        grace_s: float,
        host: str,
        pause: ExponentialBackoff | None = None,
        bind: str = "",
    ):
        self.member_id = member_id
        self.assigned = AssignedRun()
        self._set_up_pause = pause or ExponentialBackoff()
        self.address = ""
        self.http_address = ""
        self.membership = Membership(coordinator, self._hello, self.on_directive, self._gauges)
        self.endpoint = Endpoint(lambda: self.served, coordinator=coordinator)
        self.drained = asyncio.Event()
        self._host = host
        self.relay = RelayConnection(coordinator, bind or host, host)
        """Connection to this host's relay, which brings weights."""
        self._device = device
        self.cpu_chosen = False
        """True if the service was started with --device cpu."""
        self.engine_settings: Sequence[str] = ()
        """Settings of this worker's engine that replace the run's (`with_engine_settings`)."""
        self._grace_s = grace_s
        self._run: RolloutRun | None = None
        self._ended_run: RolloutRun | None = None
        """Last run, after its end. Its engine serves callers until the next run is set up."""

    @property
    def served(self) -> RolloutRun | None:
        """Return the run that serves callers: the current run, else the last run."""
        return self._run or self._ended_run

    async def work(self) -> None:
        """Work on the assigned run until cancelled. An engine that dies ends the service, which leaves with the reason."""
        try:
            await self._work_on_runs()
        finally:
            await self._close_ended_run()

    async def _work_on_runs(self) -> None:
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
                if work.done():
                    try:
                        work.result()
                    except* EngineDied as died:
                        log.error("leaving the pool: %s", reason := str(_first(died)))
                        await self.membership.leave(reason=reason)
                        raise
                    await self.assigned.changed.wait()
            finally:
                changed.cancel()
                work.cancel()
                await _ended(work)

    async def drain(self, grace_s: float) -> int:
        """Finish as many leases as possible in `grace_s` seconds, return the other leases, and return their number."""
        run = self.served
        returned = await run.drain(grace_s) if run is not None else 0
        self.drained.set()
        return returned

    async def _work_on(self, assignment: worker_pb2.RunAssignment) -> None:
        await self._close_ended_run()
        run = await self._set_up(assignment)
        self._run, has_failed = run, True
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(run.engine.watch())
                progress = tasks.create_task(run.weights.report_progress())
                await self._report_ready()
                await run.generate_forever()
                if not run.draining:
                    await self.assigned.changed.wait()  # the run is over; the next directive is on its way
                watch.cancel()
                progress.cancel()
            has_failed = False
        except asyncio.CancelledError:
            has_failed = False
            raise
        finally:
            self._run = None
            is_over = self.assigned.assignment is None
            if is_over and not has_failed and run.engine.version is not None:
                run.weights.close()
                self._ended_run = run
            else:
                await run.close()

    async def _close_ended_run(self) -> None:
        run, self._ended_run = self._ended_run, None
        if run is not None:
            await run.close()

    async def _set_up(self, assignment: worker_pb2.RunAssignment) -> RolloutRun:
        """Set up engine, tokenizer and weights of a run; report each failure and try again."""
        self._set_up_pause.reset()
        while True:
            try:
                spec = with_engine_settings(spec_of(assignment), self.engine_settings)
                if self._device == "cpu" and not self.cpu_chosen:
                    refuse_cpu(spec.cluster, "rollout")
                relay = await self.relay.connected() if goes_by_host(spec) else None
                run = await RolloutRun.start(spec, assignment, self.member_id, self.membership, self._device, relay)
                if relay is not None and (identity := relay.identity) is not None:
                    await self.membership.report(worker_pb2.ConnectRequest(host_agent=identity))
            except EngineDied:
                raise
            except Exception as error:  # retried, because missing files may appear later; an exit would not help
                await self.assigned.failed(assignment.run_id, error, self.membership.report)
                await asyncio.sleep(self._set_up_pause.next_s())
            else:
                await self.assigned.set_up()
                return run

    async def on_directive(self, directive: worker_pb2.ConnectResponse) -> None:
        run = self._run
        match directive.WhichOneof("directive"):
            case "welcome":
                await self._report_ready()
                if self._run is not None:  # another one by now, or none
                    await self._run.weights.answer_again()
            case "run":
                self.assigned.assign(directive.run)
            case "idle":
                await self.assigned.idle()
            case "weight_offer" if run is not None:
                run.weights.offer(directive.weight_offer)
            case "host_plan" if run is not None:
                run.weights.take_plan(directive.host_plan)
            case "expelled" if run is not None and run.run_id == directive.expelled.run_id:
                run.weights.expelled(directive.expelled)
                await self._report_ready()
            case "drain":
                self._grace_s = directive.drain.grace_s
                self.drained.set()

    async def _report_ready(self) -> None:
        run_id = self._run.run_id if self._run is not None else None
        await self.assigned.report(run_id, self.membership.report)

    def _hello(self) -> worker_pb2.Hello:
        hello = worker_pb2.Hello(
            role=common_pb2.ROLE_ROLLOUT,
            member_id=self.member_id,
            address=self.address,
            protocol=PROTOCOL,
            http_address=self.http_address,
        )
        if (identity := self.relay.identity) is not None:
            hello.host_agent.CopyFrom(identity)
        if self._run is not None and self._run.engine.version is not None:
            hello.run_id = self._run.run_id
            hello.version.session, hello.version.step = self._run.engine.version
        return hello

    def _gauges(self) -> dict[str, float]:
        return self._run.gauges() if self._run is not None else {}


async def _ended(cancelled: asyncio.Task[None]) -> None:
    """Wait for a task that was cancelled. Raises the task's error, and CancelledError only if the caller is cancelled."""
    try:
        await cancelled
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if caller is not None and caller.cancelling():
            raise


def _first(group: BaseExceptionGroup[EngineDied]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


KEYS = ("backend", "max_batch_size", "stall_s", "vllm_cfg", "vllm_kwargs")
"""Keys below policy.generation that a worker may set."""
OF_VLLM = ("vllm_cfg", "vllm_kwargs")


def check_settings(_context: click.Context, _option: click.Parameter, settings: tuple[str, ...]) -> tuple[str, ...]:
    """Callback of --engine. Raises click.UsageError for a setting that a worker must not have."""
    for setting in settings:
        dotted, equals, _ = setting.partition("=")
        key = dotted.removeprefix("policy.generation.")
        if not equals or key.partition(".")[0] not in KEYS:
            raise click.UsageError(
                f"--engine {setting!r} must be KEY=VALUE with a key of policy.generation that concerns this worker "
                f"alone ({', '.join(KEYS)}); other keys are set in the run's spec"
            )
    return tuple(setting.removeprefix("policy.generation.") for setting in settings)


def with_engine_settings(spec: RunSpec, settings: Sequence[str]) -> RunSpec:
    """Return the spec with the worker's engine settings. A worker with another backend than vLLM drops the run's vLLM
    settings. Raises InvalidInput for a combination that no spec may have."""
    if not settings:
        return spec
    tree = spec.model_dump(mode="json")
    try:
        for setting in settings:
            apply_override(tree, f"policy.generation.{setting}")
        generation = tree["policy"]["generation"]
        if generation["backend"] == "native" and not any(setting.startswith(OF_VLLM) for setting in settings):
            for name in OF_VLLM:
                generation.pop(name, None)
        return parse_spec(tree)
    except SpecError as error:
        raise InvalidInput(f"--engine {' '.join(settings)} does not fit the run: {error}") from None


engine_option = click.option(
    "--engine",
    "engine_settings",
    multiple=True,
    metavar="KEY=VALUE",
    callback=check_settings,
    help="Setting of policy.generation for this worker alone, such as backend=vllm, max_batch_size=256 or "
    "vllm_cfg.tensor_parallel_size=2; may be given several times.",
)
