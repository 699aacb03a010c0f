"""`RolloutService`: completions for any client of a rollout worker, and turns for the conversations of environment
workers.

Requests of external clients wait behind the gate that they share with the HTTP endpoint
(`services/rollout/openai/server.py`); requests with a `session` are turns of the run's episodes, and enter the engine
as leases do. A client that cancels its call, or whose connection breaks, ends the sequences of the call. A drain loses
no token: tokens that were sampled by its deadline are returned with the finish reason `abort`, and another worker
continues from them (`GenerateRequest.begun_ids`).
"""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from paceline.data.tokens import encode_prompt
from paceline.errors import Conflict, InvalidInput
from paceline.groups import Completion, IntArray, Version, VersionSpan
from paceline.rollout.engine import MAX_ID, MAX_STOP_IDS, GenerationRequest, SamplingParams, sample_seed
from paceline.services.common.serving.grpc_server import ACCEPTED, with_status
from paceline.services.openai.requests import MAX_CHOICES
from paceline.services.rollout.group_sampler import gather_or_cancel
from paceline.services.rollout.openai.engine_requests import MAX_CHARS_PER_TOKEN
from paceline.services.rollout.run import RolloutRun
from paceline.v1 import common_pb2, rollout_pb2, rollout_pb2_grpc

if TYPE_CHECKING:
    from paceline.services.rollout.worker import RolloutWorker

Context = grpc.aio.ServicerContext[Any, Any]
MAX_SESSION_CHARS = 256
MAX_GRACE_S = 86_400.0
BEGUN_VERSION = Version(0, 0)
"""Placeholder version of `begun_ids`. These tokens are not part of the answer."""


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers the calls of `RolloutService` for one worker."""

    def __init__(self, worker: RolloutWorker):
        self._worker = worker

    @with_status
    async def Generate(self, request: rollout_pb2.GenerateRequest, context: Context) -> rollout_pb2.GenerateResponse:
        run = self._worker.served
        if run is None or run.engine.version is None:
            raise Conflict("this worker holds no weights yet; try again when a run has started")
        _check_bounds(request, run.spec.policy.max_total_sequence_length)
        _check_weights(request, run)
        prompt_ids = await _prompt_ids(request, run)
        params = _params(request.params, run) if request.HasField("params") else run.params
        begun = _begun(request)
        call = uuid.uuid4().hex

        async def sample(index: int) -> Completion:
            seed = sample_seed(request.seed, 0, index)
            asked = GenerationRequest(f"call/{call}/{index}", prompt_ids, params, seed, begun, stop=run.stop)
            return await (run.generate_turn if request.session else run.generate_external)(asked)

        number = request.n or 1
        if request.session:
            # Tells the caller that an interrupted answer was being sampled.
            await context.send_initial_metadata(ACCEPTED)
            completions = await gather_or_cancel(sample(index) for index in range(number))
        else:
            gate = self._worker.endpoint.gate_of(run)
            if number > gate.capacity:
                raise InvalidInput(f"n is {number}; at most {gate.capacity} completions are possible in one call")

            async def sample_in_turn(index: int) -> Completion:
                async with gate.place():
                    return await sample(index)

            with gate.admitted(number):
                completions = await gather_or_cancel(sample_in_turn(index) for index in range(number))
        if request.HasField("pinned_version"):
            _check_tokens(completions, request.pinned_version)
        response = rollout_pb2.GenerateResponse()
        for completion in completions:
            _add(response, run.text(completion), completion, len(request.begun_ids))
        return response

    @with_status
    async def Status(
        self, request: rollout_pb2.RolloutServiceStatusRequest, context: Context
    ) -> rollout_pb2.RolloutServiceStatusResponse:
        response = rollout_pb2.RolloutServiceStatusResponse(member_id=self._worker.member_id)
        run = self._worker.served
        if run is not None:
            response.run_id = run.run_id
            response.num_running, response.num_waiting = run.engine.num_running, run.engine.num_waiting
            response.num_leases, response.generated_tokens = run.num_leases, run.generated_tokens
            if run.engine.version is not None:
                response.version.session, response.version.step = run.engine.version
        return response

    @with_status
    async def Drain(self, request: rollout_pb2.DrainRequest, context: Context) -> rollout_pb2.DrainResponse:
        if not 0 <= request.grace_s <= MAX_GRACE_S:
            raise InvalidInput(f"grace_s is {request.grace_s:g}; must be from 0 to {MAX_GRACE_S:g} seconds")
        return rollout_pb2.DrainResponse(returned=await self._worker.drain(request.grace_s))


def _check_bounds(request: rollout_pb2.GenerateRequest, max_tokens: int) -> None:
    """Raise InvalidInput for a request whose numbers or texts exceed anything that could be generated."""
    bounds = (
        ("n", request.n, MAX_CHOICES),
        ("the number of prompt_ids", len(request.prompt_ids), max_tokens),
        ("the number of begun_ids", len(request.begun_ids), max_tokens),
        ("the length of prompt", len(request.prompt), MAX_CHARS_PER_TOKEN * max_tokens),
        ("the length of session", len(request.session), MAX_SESSION_CHARS),
        ("the number of stop_token_ids", len(request.params.stop_token_ids), MAX_STOP_IDS),
        ("min_new_tokens", request.params.min_new_tokens, max_tokens),
    )
    for name, value, most in bounds:
        if value > most:
            raise InvalidInput(f"{name} is {value}; at most {most} are possible for this run")


def _check_weights(request: rollout_pb2.GenerateRequest, run: RolloutRun) -> None:
    """Raise Conflict if the request asks for another run or other weights than this worker has now. Steps of published
    versions only grow, also from one session of the learner to the next, so steps are compared first."""
    version = run.engine.version
    assert version is not None
    if request.run_id and request.run_id != run.run_id:
        raise Conflict(f"this worker works on run {run.run_id}, not on {request.run_id:.100}; try another worker")
    if request.HasField("pinned_version"):
        pinned = _version(request.pinned_version)
        if pinned != version:
            raise Conflict(f"this worker holds version {tuple(version)}, not {tuple(pinned)}; try another worker")
    if request.HasField("min_version"):
        oldest = _version(request.min_version)
        if (version.step, version.session) < (oldest.step, oldest.session):
            raise Conflict(
                f"this worker holds version {tuple(version)}, older than {tuple(oldest)}; try another worker, "
                "or try later"
            )


def _check_tokens(completions: list[Completion], pinned: common_pb2.PolicyVersion) -> None:
    """Raise Conflict if weights changed during a request of an evaluation."""
    spans = {Version(span.session, span.step) for each in completions for span in each.spans}
    if others := spans - {_version(pinned), BEGUN_VERSION}:
        raise Conflict(f"this worker received version {tuple(max(others))} during the request; try another worker")


async def _prompt_ids(request: rollout_pb2.GenerateRequest, run: RolloutRun) -> IntArray:
    if request.prompt_ids:
        return np.array(request.prompt_ids, np.int32)
    template = run.spec.data.apply_chat_template, run.spec.data.chat_template_kwargs
    return await asyncio.to_thread(encode_prompt, run.tokenizer, request.prompt, *template)


def _params(params: common_pb2.SamplingParams, run: RolloutRun) -> SamplingParams:
    """Return the request's parameters; zero or unset fields take the run's."""
    if params.max_new_tokens > run.spec.policy.max_total_sequence_length:
        raise InvalidInput(
            f"max_new_tokens {params.max_new_tokens} exceeds policy.max_total_sequence_length "
            f"{run.spec.policy.max_total_sequence_length}"
        )
    return SamplingParams.from_request(params, run.params)


def _begun(request: rollout_pb2.GenerateRequest) -> Completion | None:
    """Return the tokens that another worker sampled for this completion, if any. Raises InvalidInput."""
    number = len(request.begun_ids)
    if not number:
        return None
    if request.n > 1:
        raise InvalidInput(f"n is {request.n} with begun_ids, which begin one completion; leave n out")
    if wrong := [token_id for token_id in request.begun_ids if not 0 <= token_id <= MAX_ID]:
        raise InvalidInput(f"begun_ids holds {wrong[0]}; token ids must be from 0 to {MAX_ID}")
    span = VersionSpan(*BEGUN_VERSION, 0, number)
    # Engines use only the ids; the caller keeps the log-probabilities of these tokens.
    return Completion(np.array(request.begun_ids, np.int32), np.zeros(number, np.float32), (span,), "abort")


def _add(response: rollout_pb2.GenerateResponse, text: str, completion: Completion, num_begun: int) -> None:
    generated = response.completions.add(
        text=text,
        token_ids=completion.token_ids[num_begun:].tolist(),
        logprobs=completion.logprobs[num_begun:].tolist(),
        finish_reason=completion.finish_reason,
    )
    for span in completion.spans:
        if span.end <= num_begun:
            continue
        version = common_pb2.PolicyVersion(session=span.session, step=span.step)
        start = max(0, span.start - num_begun)
        generated.spans.add(version=version, start=start, end=span.end - num_begun)


def _version(version: common_pb2.PolicyVersion) -> Version:
    return Version(version.session, version.step)
