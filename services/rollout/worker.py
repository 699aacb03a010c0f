"""The rollout service: it takes leases, submits groups, and receives weights while it samples.

`RolloutWorker` is a member of the pool and answers `RolloutService`; `services/rollout/run.py` is its work on one run.
Started by `paceline serve rollout` (also `paceline-rollout`).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np

from paceline.backoff import ExponentialBackoff
from paceline.chat.requests import MAX_CHOICES
from paceline.data.tokens import encode_prompt
from paceline.errors import Conflict, EngineDied, InvalidInput
from paceline.groups import Completion
from paceline.wire import PROTOCOL
from protos.paceline.v1 import common_pb2, rollout_pb2, rollout_pb2_grpc, worker_pb2
from rollout.engine import MAX_STOP_IDS, GenerationRequest, SamplingParams, sample_seed
from services.common.assigned_run import AssignedRun
from services.common.gpus import refuse_cpu
from services.common.grpc_server import with_status
from services.common.membership import Membership
from services.common.run_setup import spec_of
from services.rollout.engine_settings import with_engine_settings
from services.rollout.gather import gather_or_cancel
from services.rollout.openai.engine_requests import MAX_CHARS_PER_TOKEN
from services.rollout.openai.server import Endpoint
from services.rollout.run import RolloutRun

log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]


class RolloutWorker(rollout_pb2_grpc.RolloutServiceServicer):
    """One member of the rollout pool: at most one run at a time.

    A set-up that fails is retried after a growing pause for as long as the run is assigned; `pause` is that backoff.
    """

    def __init__(
        self,
        coordinator: str,
        member_id: str,
        device: str,
        grace_s: float,
        host: str,
        pause: ExponentialBackoff | None = None,
    ):
        self.member_id = member_id
        self.assigned = AssignedRun()
        self._set_up_pause = pause or ExponentialBackoff()
        self.address = ""
        self.http_address = ""
        self.endpoint = Endpoint(lambda: self.served)
        self.drained = asyncio.Event()
        self._host = host
        self._device = device
        self.cpu_chosen = False
        """True when the service was started with --device cpu."""
        self.engine_settings: Sequence[str] = ()
        """Settings of this worker's engine in place of the run's (`services/rollout/engine_settings.py`)."""
        self._grace_s = grace_s
        self._run: RolloutRun | None = None
        self._ended_run: RolloutRun | None = None
        """Run that is over; its engine serves callers until the next run is set up."""
        self.membership = Membership(coordinator, self._hello, self._on_directive, self._gauges)

    @property
    def served(self) -> RolloutRun | None:
        """The run that callers are answered from: the current one, else the last one."""
        return self._run or self._ended_run

    async def work(self) -> None:
        """Work on the assigned run, until cancelled. An engine that dies ends the service, which leaves the pool with
        the reason; its supervisor starts it again."""
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
        """Finish what is possible in `grace_s` seconds and return the rest; return the number of unfinished leases."""
        run = self.served
        returned = await run.drain(grace_s) if run is not None else 0
        self.drained.set()
        return returned

    async def _work_on(self, assignment: worker_pb2.RunAssignment) -> None:
        await self._close_ended_run()
        run = await self._set_up(assignment)
        self._run, is_over = run, False
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
        except asyncio.CancelledError:
            is_over = self.assigned.assignment is None
            raise
        finally:
            self._run = None
            if is_over and run.engine.version is not None:
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
                run = await RolloutRun.start(
                    spec, assignment, self.member_id, self.membership, self._device, self._host
                )
            except EngineDied:
                raise
            except (
                Exception
            ) as error:  # anything that cannot be loaded now may be there later, and an exit would not help
                await self.assigned.failed(assignment.run_id, error, self.membership.report)
                await asyncio.sleep(self._set_up_pause.next_s())
            else:
                await self.assigned.set_up()
                return run

    async def _on_directive(self, directive: worker_pb2.ConnectResponse) -> None:
        match directive.WhichOneof("directive"):
            case "welcome":
                await self._report_ready()
                if self._run is not None:
                    await self._run.weights.answer_again()
            case "run":
                self.assigned.assign(directive.run)
            case "idle":
                await self.assigned.idle()
            case "weight_offer":
                if self._run is not None:
                    self._run.weights.offer(directive.weight_offer)
            case "expelled":
                if self._run is not None and self._run.run_id == directive.expelled.run_id:
                    self._run.weights.expelled(directive.expelled)
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
        if self._run is not None and self._run.engine.version is not None:
            hello.run_id = self._run.run_id
            hello.version.session, hello.version.step = self._run.engine.version
        return hello

    def _gauges(self) -> dict[str, float]:
        return self._run.gauges() if self._run is not None else {}

    # RolloutService

    @with_status
    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Context
    ) -> rollout_pb2.GenerateResponse:
        run = self.served
        if run is None or run.engine.version is None:
            raise Conflict("this worker holds no weights yet; try again when a run has started")
        _check_bounds(request, run.spec.policy.max_total_sequence_length)
        if request.prompt_ids:
            prompt_ids = np.array(request.prompt_ids, np.int32)
        else:
            prompt_ids = await asyncio.to_thread(
                encode_prompt,
                run.tokenizer,
                request.prompt,
                run.spec.data.apply_chat_template,
                run.spec.data.chat_template_kwargs,
            )
        params = _params(request.params, run) if request.HasField("params") else run.params
        call, gate = uuid.uuid4().hex, self.endpoint.gate_of(run)
        if request.n > gate.capacity:
            raise InvalidInput(
                f"n is {request.n}, at most {gate.capacity} completions are made for one call here"
            )

        async def sample(index: int) -> Completion:
            seed = sample_seed(request.seed, 0, index)
            async with gate.place():
                call_id = f"call/{call}/{index}"
                return await run.generate_external(
                    GenerationRequest(call_id, prompt_ids, params, seed, stop=run.stop)
                )

        with gate.admitted(request.n or 1):
            completions = await gather_or_cancel(sample(i) for i in range(request.n or 1))
        response = rollout_pb2.GenerateResponse()
        for completion in completions:
            generated = response.completions.add(
                text=run.text(completion),
                token_ids=completion.token_ids.tolist(),
                logprobs=completion.logprobs.tolist(),
                finish_reason=completion.finish_reason,
            )
            for span in completion.spans:
                version = common_pb2.PolicyVersion(session=span.session, step=span.step)
                generated.spans.add(version=version, start=span.start, end=span.end)
        return response

    @with_status
    async def Status(
        self, request: rollout_pb2.RolloutServiceStatusRequest, context: Context
    ) -> rollout_pb2.RolloutServiceStatusResponse:
        response = rollout_pb2.RolloutServiceStatusResponse(member_id=self.member_id)
        run = self.served
        if run is not None:
            response.run_id = run.run_id
            response.num_running, response.num_waiting = run.engine.num_running, run.engine.num_waiting
            response.num_leases, response.generated_tokens = run.num_leases, run.generated_tokens
            if run.engine.version is not None:
                response.version.session, response.version.step = run.engine.version
        return response

    @with_status
    async def Drain(self, request: rollout_pb2.DrainRequest, context: Context) -> rollout_pb2.DrainResponse:
        return rollout_pb2.DrainResponse(returned=await self.drain(request.grace_s))


async def _ended(cancelled: asyncio.Task[None]) -> None:
    """Wait for a task that was cancelled. Raises the task's error, and CancelledError only if the caller is cancelled
    too."""
    try:
        await cancelled
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if caller is not None and caller.cancelling():
            raise


def _first(group: BaseExceptionGroup[EngineDied]) -> BaseException:
    """Return the first error in a group of groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _check_bounds(request: rollout_pb2.GenerateRequest, max_tokens: int) -> None:
    """Raises InvalidInput for a request whose numbers or texts are larger than anything that could be generated."""
    bounds = (
        ("n", request.n, MAX_CHOICES),
        ("the number of prompt_ids", len(request.prompt_ids), max_tokens),
        ("the length of prompt", len(request.prompt), MAX_CHARS_PER_TOKEN * max_tokens),
        ("the number of stop_token_ids", len(request.params.stop_token_ids), MAX_STOP_IDS),
        ("min_new_tokens", request.params.min_new_tokens, max_tokens),
    )
    for name, value, most in bounds:
        if value > most:
            raise InvalidInput(f"{name} is {value}, at most {most} are possible for this run")


def _params(params: common_pb2.SamplingParams, run: RolloutRun) -> SamplingParams:
    """Return the request's parameters; zero or unset fields take the run's."""
    if params.max_new_tokens > run.spec.policy.max_total_sequence_length:
        raise InvalidInput(
            f"max_new_tokens {params.max_new_tokens} exceeds policy.max_total_sequence_length "
            f"{run.spec.policy.max_total_sequence_length}"
        )
    return SamplingParams.from_request(params, run.params)
