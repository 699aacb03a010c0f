"""The HTTP endpoint: routes, errors in the API's shape, streams, and cancellation when a client disconnects.

Order of waiting: a request waits in the gate for room, then for the engine. A client that disconnects cancels its
request, and with it the sequences in the engine. Nothing here reaches leases, token accounting or batches.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Callable

from aiohttp import web

from paceline.chat.answer_reader import AnswerReader
from paceline.chat.answers import Answer
from paceline.chat.api_errors import error_answer
from paceline.chat.choices import Choice, Delta, model_name
from paceline.chat.messages import Json, Unsupported
from paceline.chat.requests import Ask, ChatAsk, CompletionAsk, read_ask
from paceline.errors import PacelineError, Unavailable
from paceline.groups import Version
from rollout.engine import sample_seed
from services.common.json_http import JsonListener, event_stream, send_event
from services.rollout.gather import gather_or_cancel
from services.rollout.openai.gate import Gate
from services.rollout.openai.sampling import (
    Sampler,
    Served,
    decode,
    encode_text,
    prepare,
    resolve,
    sampling_params,
)


class Endpoint:
    """Endpoint for the run that `source` returns at the time of each request; None means that there is no run now."""

    def __init__(self, source: Callable[[], Served | None]) -> None:
        self._source = source
        self._gate: tuple[Served, Gate] | None = None
        self._listener = JsonListener("the HTTP endpoint", "choose another --http-port")
        router = self._listener.app.router
        router.add_get("/v1/models", self._models)
        router.add_get("/v1/models/{model:.+}", self._model)
        router.add_post("/v1/chat/completions", self._chat)
        router.add_post("/v1/completions", self._complete)

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port; 0 takes a free one. Raises Conflict when the port is taken."""
        return await self._listener.start(host, port)

    async def close(self) -> None:
        """Take no more requests; answers under way are finished first."""
        await self._listener.close()

    # Models

    async def _models(self, _: web.Request) -> web.StreamResponse:
        served = self._source()
        entries = [] if served is None else _entries(served)
        return web.json_response({"object": "list", "data": entries})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        served, name = self._served(), request.match_info["model"]
        resolve(served, name)
        return web.json_response(next(entry for entry in _entries(served) if entry["id"] == name))

    # Completions

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, ChatAsk)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, CompletionAsk)

    async def _answer(
        self, request: web.Request, kind: type[ChatAsk] | type[CompletionAsk]
    ) -> web.StreamResponse:
        ask = read_ask(kind, await self._listener.body(request))
        served = self._served()
        pinned = resolve(served, ask.model)
        gate = self.gate_of(served)
        chat = isinstance(ask, ChatAsk)
        answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        number = (1 if isinstance(ask, ChatAsk) else len(ask.prompts())) * (ask.n or 1)
        if number > gate.capacity:
            raise Unsupported(
                f"{number} completions in one request, at most {gate.capacity} fit; ask for fewer", "n"
            )
        assert served.engine.version is not None
        answer = Answer(
            answer_id,
            chat=chat,
            run_id=served.run_id,
            at_first=served.engine.version,
            logprobs=ask.wants_logprobs,
            token_ids=bool(ask.return_token_ids),
            decode=lambda ids: decode(served.tokenizer, ids),
        )
        with gate.admitted(number):
            samplers = await asyncio.to_thread(_samplers, served, ask, answer_id, pinned)
            if not ask.stream:
                choices = await gather_or_cancel(_placed(gate, sampler) for sampler in samplers)
                return web.json_response(answer.whole(choices))
            return await _stream(request, ask, gate, answer, samplers, chat)

    def _served(self) -> Served:
        served = self._source()
        if served is None:
            raise Unavailable("this worker works on no run now; try again when one has started")
        return served

    def gate_of(self, served: Served) -> Gate:
        """Return the one gate of a run's external requests, whatever their route."""
        if self._gate is None or self._gate[0] is not served:
            self._gate = (served, Gate(served.engine.max_batch_size))
        return self._gate[1]


def _entries(served: Served) -> list[Json]:
    version = served.engine.version
    names = [] if version is None else [served.run_id, model_name(served.run_id, version)]
    length = served.spec.policy.max_total_sequence_length
    return [
        {"id": name, "object": "model", "created": 0, "owned_by": "paceline", "max_model_len": length}
        for name in names
    ]


def _samplers(
    served: Served, ask: ChatAsk | CompletionAsk, answer_id: str, pinned: Version | None
) -> list[Sampler]:
    params = sampling_params(ask, served.params, served.spec.policy.max_total_sequence_length)
    seed = secrets.randbits(63) if ask.seed is None else ask.seed
    stops = served.spec.policy.generation.stop_strings if ask.stop is None else ask.stops
    if isinstance(ask, ChatAsk):
        prepared = prepare(served, ask)
        prompts, reader = [prepared.prompt_ids], prepared.reader
    else:
        prompts, reader = [encode_text(served, prompt) for prompt in ask.prompts()], AnswerReader
    samplers: list[Sampler] = []
    for number, prompt_ids in enumerate(prompts):
        for i in range(ask.n or 1):
            index = len(samplers)
            request_id = f"http/{answer_id}/{index}"
            one_seed = sample_seed(seed, number, i)
            samplers.append(
                Sampler(served, prompt_ids, params, request_id, one_seed, index, reader(), stops, pinned)
            )
    return samplers


async def _placed(gate: Gate, sampler: Sampler) -> Choice:
    async with gate.place():
        return await sampler.run()


async def _stream(
    request: web.Request, ask: Ask, gate: Gate, answer: Answer, samplers: list[Sampler], chat: bool
) -> web.StreamResponse:
    """Stream server-sent events: chunks, then `[DONE]`; an error after the first byte is an event too."""
    chunks: asyncio.Queue[Json | None] = asyncio.Queue()  # bounded by the tokens that were requested

    def tell(delta: Delta) -> None:
        chunks.put_nowait(answer.chunk(delta))

    async def produce(sampler: Sampler) -> Choice:
        sampler.on_delta = tell
        choice = await _placed(gate, sampler)
        chunks.put_nowait(answer.closing(choice))
        return choice

    async def produce_all() -> list[Choice]:
        try:
            return await gather_or_cancel(produce(sampler) for sampler in samplers)
        finally:
            chunks.put_nowait(None)

    response = event_stream()
    work = asyncio.create_task(produce_all())
    try:
        first = await chunks.get()
        if first is None:
            await work  # it failed before the first chunk: an ordinary error with its status
        await response.prepare(request)
        for sampler in samplers if chat else ():
            await send_event(response, answer.opening(sampler.index))
        chunk = first
        while chunk is not None:
            await send_event(response, chunk)
            chunk = await chunks.get()
        try:
            choices = await work
        except PacelineError as error:
            await send_event(response, error_answer(error)[1])
            return response
        if ask.include_usage:
            await send_event(response, answer.counts(choices))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
