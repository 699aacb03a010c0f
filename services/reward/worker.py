"""The reward service (`paceline serve reward`): a member of the pool that scores tasks of the coordinator's run. User
functions run in separate processes (reward/), so they cannot stop the service. A run's reference, if the pool serves
it, runs on a thread of the service."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.bundle.imports import check_requirements
from paceline.calls.backoff import ExponentialBackoff, pause_after
from paceline.errors import InvalidInput, Unreadable, WireError, counted
from paceline.files.whole_file import Stamp, stamp
from paceline.groups import Completion, IntArray
from paceline.reward.reference import ReferenceScorer
from paceline.reward.results import RewardResult
from paceline.reward.runner import RewardRunner
from paceline.services.common.gpus import refuse_cpu, usable_gpus
from paceline.services.common.reporting.progress_log import Occupancy, ProgressLog
from paceline.services.common.worker.assigned_run import AssignedRun, BundledSpec, refusal_of_files, spec_of
from paceline.services.common.worker.membership import Membership
from paceline.services.common.worker.score_extras import TRAINER_STATE, FunctionSums, LoggedMetrics, extra_json
from paceline.services.reward.group_inputs import GroupInputs, inputs_of_completions, inputs_of_episodes
from paceline.spec import RewardFunctionSection, RunSpec
from paceline.tracing import span
from paceline.v1 import common_pb2, worker_pb2
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import PROTOCOL, CompletionArrays, decode_result, encode_reference, parse_message

TASK_WAIT_S = 10.0
PREFETCH = 8
"""Number of tasks that are prefetched for each process, so that no process waits for a round trip to the exchange."""

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0

log = logging.getLogger(__name__)


class RewardWorker:
    """A member of the reward pool; works on one run. `pause` is the back-off before a failed set-up is repeated."""

    def __init__(
        self,
        coordinator: str,
        member_id: str,
        num_processes: int,
        pause: ExponentialBackoff | None = None,
        functions_from: Sequence[Path] = (),
        only: Sequence[str] = (),
        membership: Callable[..., Membership] = Membership,
    ):
        self.member_id = member_id
        self._coordinator = coordinator
        self._functions_from = functions_from
        self.only = frozenset(only)
        """Built-in functions that this worker scores with; empty for all functions."""
        self.assigned = AssignedRun()
        self._set_up_pause = pause or ExponentialBackoff()
        self.refused_pause = ExponentialBackoff()
        """Back-off before the next task request after a refusal by the exchange."""
        self.address = ""
        self._num_processes = num_processes
        self._turns = asyncio.Semaphore(num_processes)
        """Free processes. Tasks that wait for a process are returned to the exchange when the worker stops."""
        self._spec: RunSpec | None = None
        self._code: tuple[Stamp, ...] = ()
        """Stamps of the functions' files, and of the files beside them, at the time of loading."""
        self._runner: RewardRunner | None = None
        self._reference: ReferenceScorer | None = None
        self._stopping = asyncio.Event()
        self._scored = 0
        self._occupancy = Occupancy()
        self._progress = ProgressLog(log)
        self._logged = LoggedMetrics()
        self._functions = FunctionSums()
        self._unavailable = 0
        """Number of tasks in a row that were returned because a service was unavailable or a process was killed."""
        self.membership = membership(coordinator, self._hello, self._on_directive, self._gauges)

    async def work(self) -> None:
        """Score for the assigned run until `stop`, then finish the running tasks."""
        while not self._stopping.is_set():
            self.assigned.changed.clear()
            assignment = self.assigned.assignment
            if assignment is None:
                await self.assigned.changed.wait()
                continue
            async with contextlib.AsyncExitStack() as opened:
                try:
                    bundled = await self._bundled_spec(assignment)
                    opened.callback(bundled.close)
                    spec = bundled.spec
                    await asyncio.to_thread(check_requirements, spec.bundle.requirements)
                    self._code = _code_of(spec)
                    if spec.cluster.reward_gpus and not usable_gpus():
                        refuse_cpu(spec.cluster, "reward", "this host shows no GPU that torch can use")
                    runner = RewardRunner(spec.rewards, self._num_processes)
                    with bundled.original_paths():
                        await opened.enter_async_context(runner)
                    reference = await opened.enter_async_context(ReferenceScorer(spec))
                except Exception as error:  # whatever cannot be loaded now may be there later
                    await self._put_off(assignment, error)
                    continue
                self._spec, self._runner, self._reference = spec, runner, reference
                opened.callback(self._forget_run)
                self._turns = asyncio.Semaphore(self._num_processes)
                self._set_up_pause.reset()
                await self.assigned.set_up()
                await self._report_ready()
                await self._score_forever(assignment.run_id, spec, runner)

    async def _bundled_spec(self, assignment: worker_pb2.RunAssignment) -> BundledSpec:
        """Return the spec with paths of the bundle's files. Raises Unreadable for refused files, and transfer errors."""
        spec, bundle = spec_of(assignment), assignment.bundle
        others = [reward.function for reward in spec.rewards if reward.function not in self.only]
        if self.only and others:
            raise Unreadable(
                f"this worker scores only with {', '.join(sorted(self.only))} (--only), but the run has {', '.join(others)}; "
                "start a reward worker without --only, or add these functions to --only"
            )
        if why := refusal_of_files(spec, bundle, self._functions_from):
            raise Unreadable(f"this worker does not run the functions: {why}")
        return await asyncio.to_thread(
            BundledSpec, spec, self._coordinator, bundle, "code", "include", allowed=self._functions_from
        )

    async def _put_off(self, assignment: worker_pb2.RunAssignment, error: Exception) -> None:
        await self.assigned.failed(assignment.run_id, error, self.membership.report)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._set_up_pause.next_s()):
                await self.assigned.changed.wait()

    def _forget_run(self) -> None:
        self._spec = self._runner = self._reference = None

    @property
    def functions(self) -> tuple[RewardFunctionSection, ...]:
        """Return the functions of the current run; none without a run."""
        return self._spec.rewards if self._spec is not None else ()

    def stop(self) -> None:
        self._stopping.set()
        self.assigned.changed.set()

    async def _score_forever(self, run_id: str, spec: RunSpec, runner: RewardRunner) -> None:
        """Request tasks as processes become free, until the run changes; then wait for the running tasks."""
        running: dict[asyncio.Task[None], int] = {}
        changed = asyncio.create_task(self.assigned.changed.wait())
        async with asyncio.TaskGroup() as tasks:
            while not self.assigned.changed.is_set():
                room = PREFETCH * self._num_processes - len(running)
                if room == 0:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    continue
                request = pb.ExchangeRequest(
                    run_id=run_id,
                    task=pb.TaskRequest(room=room, wait_s=TASK_WAIT_S, held=pb.Held(group_ids=running.values())),
                )
                requesting = asyncio.create_task(self.membership.request(request))
                await asyncio.wait((requesting, changed), return_when=asyncio.FIRST_COMPLETED)
                if not requesting.done():
                    requesting.cancel()
                    break
                reply, payloads = requesting.result()
                if reply.status == pb.REPLY_STATUS_STALE:
                    await self.assigned.changed.wait()  # the run is over; the next assignment is on its way
                if reply.status == pb.REPLY_STATUS_INVALID:
                    await self._pause_requests(reply.message)
                    continue
                self.refused_pause.reset()
                for task, *frames in zip(reply.task.tasks, payloads[::2], payloads[1::2], strict=True):
                    scoring = tasks.create_task(self._score(run_id, spec, runner, task, *frames))
                    running[scoring] = task.group_id
                    self._occupancy.note(len(running), self._num_processes)
                    scoring.add_done_callback(functools.partial(self._task_ended, running))
        changed.cancel()

    def _task_ended(self, running: dict[asyncio.Task[None], int], scoring: asyncio.Task[None]) -> None:
        del running[scoring]
        self._occupancy.note(len(running), self._num_processes)

    async def _pause_requests(self, refusal: str) -> None:
        """Wait before the next task request, because the exchange refused one; running tasks continue."""
        pause_s = self.refused_pause.next_s()
        log.error("the exchange refused the task request, retrying in %.0f s: %s", pause_s, refusal)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self.assigned.changed.wait()

    async def _score(
        self, run_id: str, spec: RunSpec, runner: RewardRunner, task: pb.ScoreTask, arrays: bytes, texts: bytes
    ) -> None:
        prompt_ids, completions = decode_result(arrays, texts)
        columns = json.loads(task.columns_json)
        state = columns.pop(TRAINER_STATE, None)
        score = pb.ScoreResult(group_id=task.group_id, attempt=task.attempt, digest=task.digest)
        try:
            inputs = _inputs(task, columns, arrays, texts, spec, completions)
        except WireError as error:
            log.error("group %d cannot be scored: %s", task.group_id, error)
            score.error = str(error)
            await self.membership.request(pb.ExchangeRequest(run_id=run_id, score=score))
            return
        frames: list[bytes] = []
        if not await self._turn_comes():
            score.handed_back = True
            await self.membership.request(pb.ExchangeRequest(run_id=run_id, score=score))
            return
        started_s = time.monotonic()
        with span("score", task.traceparent, group_id=task.group_id, attempt=task.attempt):
            try:
                result = await self._run_functions(runner, inputs, state)
                if result.failure is None and task.wants_reference:
                    frames = [await self._ask_reference(prompt_ids, completions)]
            except InvalidInput as error:
                score.error = str(error)
            else:
                if result.failure is not None:
                    score.error = result.failure.message
                    if result.failure.kind in ("unavailable", "killed"):
                        score.handed_back, score.crashed = True, result.failure.kind == "killed"
                        await self._pause(self._unavailable)
                    self._unavailable = self._unavailable + 1 if score.handed_back else 0
                elif result.rewards_CF is not None:
                    score.rewards.extend(inputs.all_rewards(result.rewards_CF).ravel().tolist())
                    score.functions.extend(reward.label for reward in spec.rewards)
                    extra = {name: inputs.all_values(values) for name, values in result.extra.items()}
                    score.extra_json = extra_json(extra)
        score.score_s = time.monotonic() - started_s
        await self._submit(run_id, score, [] if score.error else frames)
        self._scored += 1
        self._progress.note(
            lambda sums, s: (
                f"run {run_id}: {counted(sums['groups'], 'group')} in {s:.0f} s, {sums['scored']:.0f} of them scored, "
                f"{sums['work_s'] / sums['groups']:.2f} s for each group"
            ),
            groups=1,
            scored=not score.error,
            work_s=score.score_s,
        )

    async def _submit(self, run_id: str, score: pb.ScoreResult, frames: list[bytes]) -> None:
        """Submit the scores of a group; if the exchange refuses the scores, submit the reason."""
        reply, _ = await self.membership.request(pb.ExchangeRequest(run_id=run_id, score=score), frames)
        if reply.status == pb.REPLY_STATUS_INVALID:
            log.error("the score of group %d was refused: %s", score.group_id, reply.message)
            refused = pb.ScoreResult(
                group_id=score.group_id, attempt=score.attempt, digest=score.digest, error=reply.message
            )
            await self.membership.request(pb.ExchangeRequest(run_id=run_id, score=refused))

    async def _turn_comes(self) -> bool:
        """Wait for a free process; return False if the worker must stop first. After True the caller must release it."""
        turn = asyncio.create_task(self._turns.acquire())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((turn, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            turn.cancel()
        if turn.done() and not self._stopping.is_set():
            return True
        if turn.done():
            self._turns.release()
        return False

    async def _pause(self, failures: int) -> None:
        """Wait before a task is returned, so that an unavailable service does not get the next task at once."""
        pause_s = pause_after(failures + 1, FIRST_PAUSE_S, MAX_PAUSE_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._stopping.wait()

    async def _run_functions(
        self, runner: RewardRunner, inputs: GroupInputs, state: Mapping[str, Any] | None
    ) -> RewardResult:
        try:
            result = await runner.score(
                inputs.prompts, inputs.completions, inputs.completion_ids, inputs.columns, state
            )
            self._logged.add(result.metrics)
            self._functions.add_result(self.functions, result)
            return result
        finally:
            self._turns.release()

    async def _ask_reference(self, prompt_ids: IntArray, completions: Sequence[Completion]) -> bytes:
        assert self._reference is not None, "only a worker that has set up the run gets tasks"
        ids = [completion.token_ids for completion in completions]
        return encode_reference(await self._reference.score(prompt_ids, ids))

    async def _on_directive(self, directive: worker_pb2.ConnectResponse) -> None:
        match directive.WhichOneof("directive"):
            case "welcome":
                await self._report_ready()
            case "run":
                before = self.assigned.assignment
                if self.assigned.assign(directive.run):
                    self._set_up_pause.reset()
                # Both happen after `paceline resume`.
                elif before is not None and before.bundle != directive.run.bundle:
                    self.assigned.assignment = directive.run
                    log.warning("run %s continues with other reward functions, which are loaded", before.run_id)
                    self.assigned.changed.set()
                elif self._spec is not None and _code_of(self._spec) != self._code:
                    run_id = directive.run.run_id
                    log.warning("the reward functions of run %s have changed and are loaded again", run_id)
                    self.assigned.changed.set()
            case "idle":
                await self.assigned.idle()
            case "drain":
                self.stop()

    async def _report_ready(self) -> None:
        assignment = self.assigned.assignment
        run_id = assignment.run_id if self._runner is not None and assignment is not None else None
        await self.assigned.report(run_id, self.membership.report)

    def _hello(self) -> worker_pb2.Hello:
        return worker_pb2.Hello(
            role=common_pb2.ROLE_REWARD, member_id=self.member_id, address=self.address, protocol=PROTOCOL
        )

    def _gauges(self) -> dict[str, float]:
        scored, self._scored = self._scored, 0
        sums = self._logged.take_gauges() | self._functions.take_gauges()
        return {"groups_since_report": float(scored), "occupied": self._occupancy.take(), **sums}


def _inputs(
    task: pb.ScoreTask,
    columns: dict[str, Any],
    arrays: bytes,
    texts: bytes,
    spec: RunSpec,
    completions: Sequence[Completion],
) -> GroupInputs:
    prompt = json.loads(task.prompt_json)
    row_arrays = CompletionArrays.of(arrays).rows
    if row_arrays is None:
        return inputs_of_completions(prompt, columns, completions)
    samples = parse_message(pb.Texts, texts).samples
    sums_turns = spec.environment.advantage == "outcome"
    return inputs_of_episodes(
        prompt, columns, completions, row_arrays.row_samples.tolist(), samples, sums_turns=sums_turns
    )


def _code_of(spec: RunSpec) -> tuple[Stamp, ...]:
    """Return the stamps of the Python files in the folders of the spec's functions, which a function may import."""
    folders = {Path(reward.function.rpartition(":")[0]).parent for reward in spec.rewards if ":" in reward.function}
    return tuple(stamp(folder, ["*.py"]) for folder in sorted(folders))
