"""Serves the HTTP endpoint: its routes, errors in the API's shape, and streams; cancels requests whose clients
disconnect.

Order of waiting: a request waits in the gate for capacity, then for the engine. A client that disconnects cancels its
request, and with it the sequences in the engine. Training comes first: leases enter the engine as they come, external
requests through the gate, a few sequences at a time. Nothing here affects leases, token accounting or batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Protocol

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from paceline.chat.completion_texts import text_of
from paceline.chat.messages import Json, Unsupported
from paceline.errors import Busy, InvalidInput, PacelineError, Unavailable
from paceline.groups import Version
from paceline.rate_limited_log import RateLimitedLog
from paceline.services.common.access.callers import WorkerCallers
from paceline.services.common.access.rights import COMPLETIONS
from paceline.services.common.serving.json_http import HttpGuard, JsonListener, event_stream, send_event
from paceline.services.openai.answers import Answer, PlainAnswer
from paceline.services.openai.frames import Choice, Delta, Event, Frame, model_name
from paceline.services.openai.requests import ChatAsk, CompletionAsk, read_ask, read_plain_ask
from paceline.services.openai.responses import ResponseAnswer, fields_of_responses, read_responses_ask
from paceline.services.openai.token_route import TokenAnswer, TokenAsk
from paceline.services.rollout.group_sampler import gather_or_cancel
from paceline.services.rollout.openai.engine_requests import EngineAsk, num_prompts, samplers_of
from paceline.services.rollout.openai.sampling import Sampler, Served, decode_all, no_weights, resolve

SHARE = 8
"""External requests may use 1/SHARE of the engine's places, but at least one place."""

QUEUE = 16
"""Largest number of external sequences that run or wait, as a multiple of the places for external sequences."""


class Gate:
    """Places for external sequences in an engine that decodes `batch_size` at a time."""

    def __init__(self, batch_size: int, share: int = SHARE, queue: int = QUEUE) -> None:
        self.places = max(1, batch_size // share)
        self.capacity = queue * self.places
        self._taken = 0
        self._free = asyncio.Semaphore(self.places)

    @contextlib.contextmanager
    def admitted(self, num_sequences: int) -> Iterator[None]:
        """Reserve room for a request's sequences in the queue. Raises Busy if there is no room."""
        if self._taken + num_sequences > self.capacity:
            raise Busy(
                f"{self._taken} sequences run or wait, but at most {self.capacity} may; this request has "
                f"{num_sequences}. Try again later, or try another worker"
            )
        self._taken += num_sequences
        try:
            yield
        finally:
            self._taken -= num_sequences

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold one sequence's place in the engine, first come, first served."""
        async with self._free:
            yield


seldom = RateLimitedLog(logging.getLogger(__name__))


class Endpoint:
    """Endpoint for the run that `source` returns at the time of each request; None means that there is no run now."""

    def __init__(
        self,
        source: Callable[[], Served | None],
        *,
        make_gate: Callable[[int], Gate] = Gate,
        coordinator: str = "",
        recorder: Recorder | None = None,
    ) -> None:
        """`make_gate(batch_size)` returns the gate of an engine that decodes `batch_size` sequences at a time. The
        `coordinator` identifies callers if the port requires a token; without it only the process's token is valid.
        `recorder` stores answers and feedback."""
        self._source = source
        self._recorder = recorder
        self._make_gate = make_gate
        self._gate: tuple[Served, Gate] | None = None
        guard = HttpGuard(WorkerCallers(coordinator), COMPLETIONS, seldom)
        self._listener = JsonListener("the HTTP endpoint", "choose another --http-port", guard=guard)
        router = self._listener.app.router
        router.add_get("/v1/models", self._models)
        router.add_get("/v1/models/{model:.+}", self._model)
        router.add_post("/v1/chat/completions", partial(self._complete, ChatAsk, "chatcmpl"))
        router.add_post("/v1/completions", partial(self._complete, CompletionAsk, "cmpl"))
        router.add_post("/v1/responses", self._respond)
        router.add_post("/inference/v1/generate", self._generate)
        router.add_post("/generate", self._plain)
        router.add_post("/v1/feedback", self._feedback)

    @property
    def scheme(self) -> str:
        return self._listener.scheme

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port, a free one for 0. Raises Conflict if the port is taken."""
        return await self._listener.start(host, port)

    async def close(self) -> None:
        await self._listener.close()

    async def _models(self, _: web.Request) -> web.StreamResponse:
        served = self._source()
        entries = [] if served is None else _entries(served)
        return web.json_response({"object": "list", "data": entries})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        served, name = self._served(), request.match_info["model"]
        resolve(served, name)
        return web.json_response(next(entry for entry in _entries(served) if entry["id"] == name))

    async def _complete(
        self, kind: type[ChatAsk] | type[CompletionAsk], prefix: str, request: web.Request
    ) -> web.StreamResponse:
        ask = read_ask(kind, await self._listener.body(request))
        served, answer_id = self._served(), f"{prefix}-{uuid.uuid4().hex}"
        decode = partial(text_of, served.tokenizer)
        answer = Answer(answer_id, ask, served.run_id, _version(served), decode)
        return await self._answer(request, served, ask, answer_id, answer)

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        ask, chat = read_responses_ask(await self._listener.body(request))
        served, answer_id = self._served(), f"resp_{uuid.uuid4().hex}"
        answer = ResponseAnswer(answer_id, ask, served.run_id, _version(served), partial(decode_all, served.tokenizer))
        with fields_of_responses():
            return await self._answer(request, served, chat, answer_id, answer)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        ask = read_ask(TokenAsk, await self._listener.body(request))
        served, answer_id = self._served(), uuid.uuid4().hex
        answer = TokenAnswer(answer_id, ask, served.run_id, _version(served))
        return await self._answer(request, served, ask, answer_id, answer)

    async def _plain(self, request: web.Request) -> web.StreamResponse:
        body, served, answer_id = await self._listener.body(request), self._served(), uuid.uuid4().hex
        answer = PlainAnswer(answer_id, served.run_id, _version(served))
        return await self._answer(request, served, read_plain_ask(body, served.run_id), answer_id, answer)

    async def _feedback(self, request: web.Request) -> web.StreamResponse:
        if self._recorder is None:
            raise InvalidInput(
                "this endpoint records no requests and takes no feedback; `paceline serve model --traces FOLDER` does both"
            )
        feedback = read_ask(FeedbackAsk, await self._listener.body(request))
        return web.json_response(await self._recorder.rate(feedback))

    async def _answer(
        self, request: web.Request, served: Served, ask: EngineAsk, answer_id: str, frame: Frame
    ) -> web.StreamResponse:
        pinned = resolve(served, ask.model or served.run_id)
        gate = self.gate_of(served)
        number = num_prompts(ask) * (ask.n or 1)
        if number > gate.capacity:
            raise Unsupported(
                f"{number} completions in one request, but at most {gate.capacity} fit; request fewer", "n"
            )
        with gate.admitted(number):
            samplers = await asyncio.to_thread(samplers_of, served, ask, answer_id, pinned)
            if not ask.stream:
                choices = await gather_or_cancel(_placed(gate, sampler) for sampler in samplers)
                await self._record(served, ask, answer_id, choices)
                return web.json_response(frame.whole(choices))
            record = partial(self._record, served, ask, answer_id)
            return await _stream(request, gate, frame, samplers, record)

    async def _record(self, served: Served, ask: EngineAsk, answer_id: str, choices: Sequence[Choice]) -> None:
        if self._recorder is not None:
            await self._recorder.record(answer_id, await asyncio.to_thread(rows_of, served, ask, choices))

    def _served(self) -> Served:
        served = self._source()
        if served is None:
            raise Unavailable("this worker has no run now; try again when a run has started")
        return served

    def gate_of(self, served: Served) -> Gate:
        """Return the one gate of a run's external requests, whatever their route."""
        if self._gate is None or self._gate[0] is not served:
            self._gate = (served, self._make_gate(served.engine.max_batch_size))
        return self._gate[1]


def _entries(served: Served) -> list[Json]:
    version = served.engine.version
    names = [] if version is None else [served.run_id, model_name(served.run_id, version)]
    length = served.spec.policy.max_total_sequence_length
    return [
        {"id": name, "object": "model", "created": 0, "owned_by": "paceline", "max_model_len": length} for name in names
    ]


async def _placed(gate: Gate, sampler: Sampler) -> Choice:
    async with gate.place():
        return await sampler.run()


async def _stream(
    request: web.Request,
    gate: Gate,
    frame: Frame,
    samplers: list[Sampler],
    record: Callable[[Sequence[Choice]], Awaitable[None]],
) -> web.StreamResponse:
    """Stream server-sent events, also for late errors. `record` gets the choices before the stream ends."""
    chunks: asyncio.Queue[list[Event] | None] = asyncio.Queue()  # bounded by the tokens that were requested
    opening = frame.begin(len(samplers))

    def tell(delta: Delta) -> None:
        chunks.put_nowait(frame.add(delta))

    async def produce(sampler: Sampler) -> Choice:
        sampler.on_delta = tell
        choice = await _placed(gate, sampler)
        chunks.put_nowait(frame.end(choice))
        return choice

    async def produce_all() -> list[Choice]:
        try:
            return await gather_or_cancel(produce(sampler) for sampler in samplers)
        finally:
            chunks.put_nowait(None)

    response = event_stream()
    work = asyncio.create_task(produce_all())
    try:
        events = await chunks.get()
        if events is None:
            await work  # it failed before the first chunk: an ordinary error with its status
        await response.prepare(request)
        await _send(response, opening)
        while events is not None:
            await _send(response, events)
            events = await chunks.get()
        try:
            choices = await work
        except PacelineError as error:
            await _send(response, frame.fail(error))
            return response
        await record(choices)
        await _send(response, frame.finish(choices))
        if frame.ends_with_mark:
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def _send(response: web.StreamResponse, events: Sequence[Event]) -> None:
    for event in events:
        await send_event(response, event.body, event.name)


def _version(served: Served) -> Version:
    if served.engine.version is None:
        raise no_weights(served)
    return served.engine.version


class FeedbackAsk(BaseModel):
    """Body of `POST /v1/feedback`."""

    model_config = ConfigDict(extra="forbid")

    completion_id: Annotated[str, Field(min_length=1, max_length=128)]
    """`id` of the answer."""
    index: Annotated[int, Field(ge=0)] = 0
    """Index of the choice in the answer."""
    score: Annotated[float, Field(allow_inf_nan=False)]
    """The completion's reward, such as 1 for good and 0 for bad."""


class Recorder(Protocol):
    """Stores answered requests and their feedback."""

    async def record(self, answer_id: str, rows: Sequence[Json]) -> None:
        """Store the choices of an answer, before it is sent. Raises nothing, because the answer is sent in any case."""

    async def rate(self, feedback: FeedbackAsk) -> Json:
        """Store feedback, and return the answer to the client. Raises NotFound, Conflict, Unavailable."""


def rows_of(served: Served, ask: EngineAsk, choices: Sequence[Choice]) -> list[Json]:
    """Return prompt, completion and finish reason of each choice. A prompt of token ids is decoded to text."""
    return [
        {"prompt": _prompt(served, ask, choice), "completion": choice.text, "finish_reason": choice.finish_reason}
        for choice in choices
    ]


def _prompt(served: Served, ask: EngineAsk, choice: Choice) -> Any:
    match ask:
        case ChatAsk():
            return ask.rendered()
        case CompletionAsk():
            prompt = ask.prompts()[choice.index // (ask.n or 1)]
            if isinstance(prompt, str):
                return prompt
    return served.tokenizer.decode(choice.prompt_ids.tolist(), skip_special_tokens=False)
