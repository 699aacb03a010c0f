"""The HTTP endpoint: routes, errors in the API's shape, streams, and cancellation when a client disconnects.

Order of waiting: a request waits in the gate for room, then for the engine. A client that disconnects cancels its
request, and with it the sequences in the engine. Nothing here reaches leases, token accounting or batches.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

from paceline.chat.messages import Unsupported
from paceline.errors import Busy, Conflict, InvalidInput, NotFound, PacelineError, Unavailable
from paceline.groups import Version
from paceline.rate_limited_log import unforeseen
from rollout.engine import sample_seed
from services.rollout.gather import gather_or_cancel
from services.rollout.openai.answers import Answer, Json
from services.rollout.openai.gate import Gate
from services.rollout.openai.requests import Ask, ChatAsk, CompletionAsk, read_ask
from services.rollout.openai.sampling import (
    Choice,
    Delta,
    Sampler,
    Served,
    decode,
    encode,
    model_name,
    resolve,
)

MAX_BODY_BYTES = 8 << 20
MAX_BODIES = 16
"""Request bodies that are read at a time, because everyone who can reach the port can send them."""

BODY_S = 30.0
"""Seconds for a body to arrive."""

MAX_CONNECTIONS = 512
"""Connections; a further connection is closed at once, because the worker needs files for other things."""

SHUTDOWN_S = 2.0
"""Seconds that answers under way have when the endpoint closes; by then their sequences have ended."""

RETRY_AFTER_S = 1

STATUS: Sequence[tuple[type[PacelineError], int, str, str | None]] = (
    (Busy, 429, "rate_limit_error", "rate_limit_exceeded"),
    (NotFound, 404, "invalid_request_error", "model_not_found"),
    (InvalidInput, 400, "invalid_request_error", None),
    (Unavailable, 503, "service_unavailable_error", None),
    (PacelineError, 500, "server_error", None),
)
"""Error, status, type and code; the first match wins."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint:
    """Endpoint for the run that `source` returns at the time of each request; None means that there is no run now."""

    def __init__(self, source: Callable[[], Served | None]) -> None:
        self._source = source
        self._gate: tuple[Served, Gate] | None = None
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._bodies = 0
        """Limit on bodies that are being read."""
        self._app = web.Application(middlewares=[_with_errors], client_max_size=MAX_BODY_BYTES)
        self._app.router.add_get("/v1/models", self._models)
        self._app.router.add_get("/v1/models/{model:.+}", self._model)
        self._app.router.add_post("/v1/chat/completions", self._chat)
        self._app.router.add_post("/v1/completions", self._complete)

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port; 0 takes a free one. Raises Conflict when the port is taken."""
        self._runner = web.AppRunner(
            self._app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S
        )
        await self._runner.setup()
        try:
            self._listener = await asyncio.get_running_loop().create_server(self._protocol, host, port)
        except OSError as error:
            await self._runner.cleanup()
            raise Conflict(
                f"the HTTP endpoint cannot listen on {host}:{port} ({error.strerror}); choose another --http-port"
            ) from None
        return int(self._listener.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Take no more requests; answers under way are finished first."""
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def _protocol(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        assert self._runner is not None
        server = self._runner.server
        assert server is not None
        return server() if len(server.connections) < MAX_CONNECTIONS else _Full()

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

    async def _answer(self, request: web.Request, kind: type[Ask]) -> web.StreamResponse:
        ask = read_ask(kind, await self._body(request))
        served = self._served()
        pinned = resolve(served, ask.model)
        gate = self.gate_of(served)
        chat = kind is ChatAsk
        answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        number = len(ask.prompts()) * (ask.n or 1)
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
            samplers = await asyncio.to_thread(_samplers, served, ask, answer_id, pinned, chat)
            if not ask.stream:
                choices = await gather_or_cancel(_placed(gate, sampler) for sampler in samplers)
                return web.json_response(answer.whole(choices))
            return await _stream(request, ask, gate, answer, samplers, chat)

    async def _body(self, request: web.Request) -> Any:
        # A web page can make a browser post text to a local port, but not JSON, which needs this server's consent.
        if request.content_type != "application/json":
            raise InvalidInput(f"the content type is {request.content_type!r}, must be 'application/json'")
        if self._bodies >= MAX_BODIES:
            raise Busy(f"{self._bodies} requests are being read; try again")
        self._bodies += 1
        try:
            async with asyncio.timeout(BODY_S):
                content = await request.read()
        except TimeoutError:
            raise InvalidInput(f"the body did not come within {BODY_S:g} s") from None
        finally:
            self._bodies -= 1
        try:
            return json.loads(content)
        except ValueError as error:
            raise InvalidInput(f"the body is no JSON: {error}") from None
        except RecursionError:
            raise InvalidInput("the body is nested too deeply") from None

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


class _Full(asyncio.Protocol):
    """Protocol of a connection beyond the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it."""
        transport.close()


def _entries(served: Served) -> list[Json]:
    version = served.engine.version
    names = [] if version is None else [served.run_id, model_name(served.run_id, version)]
    length = served.spec.policy.max_total_sequence_length
    return [
        {"id": name, "object": "model", "created": 0, "owned_by": "paceline", "max_model_len": length}
        for name in names
    ]


def _samplers(served: Served, ask: Ask, answer_id: str, pinned: Version | None, chat: bool) -> list[Sampler]:
    params = ask.params(served.params, served.spec.policy.max_total_sequence_length)
    seed = secrets.randbits(63) if ask.seed is None else ask.seed
    stops = served.spec.policy.generation.stop_strings if ask.stop is None else ask.stops
    samplers: list[Sampler] = []
    for number, prompt in enumerate(ask.prompts()):
        prompt_ids = encode(served, prompt, chat=chat, template_kwargs=ask.chat_template_kwargs or {})
        for i in range(ask.n or 1):
            index = len(samplers)
            request_id = f"http/{answer_id}/{index}"
            one_seed = sample_seed(seed, number, i)
            samplers.append(Sampler(served, prompt_ids, params, request_id, one_seed, index, stops, pinned))
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

    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    work = asyncio.create_task(produce_all())
    try:
        first = await chunks.get()
        if first is None:
            await work  # it failed before the first chunk: an ordinary error with its status
        await response.prepare(request)
        for sampler in samplers if chat else ():
            await _send(response, answer.opening(sampler.index))
        chunk = first
        while chunk is not None:
            await _send(response, chunk)
            chunk = await chunks.get()
        try:
            choices = await work
        except PacelineError as error:
            await _send(response, _error_body(error)[1])
            return response
        if ask.include_usage:
            await _send(response, answer.counts(choices))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def _send(response: web.StreamResponse, event: Json) -> None:
    await response.write(b"data: " + json.dumps(event, allow_nan=False).encode() + b"\n\n")


def _error_body(error: PacelineError) -> tuple[int, Json]:
    status, kind, code = next(
        (status, kind, code) for error_type, status, kind, code in STATUS if isinstance(error, error_type)
    )
    field = error.field if isinstance(error, Unsupported) else "model" if status == 404 else None
    return status, {"error": {"message": str(error), "type": kind, "param": field, "code": code}}


@web.middleware
async def _with_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error as the API's JSON."""
    try:
        return await handler(request)
    except PacelineError as error:
        status, body = _error_body(error)
        headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else None
        return web.json_response(body, status=status, headers=headers)
    except web.HTTPException as error:
        message = f"{request.method} {request.path}: {error.reason}; see /v1/models for what is here"
        body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
        return web.json_response(body, status=error.status)
    except Exception as error:  # any error is answered to its sender, and others are served on
        message = unforeseen.note(f"an HTTP {request.method}", error)
        body = {"error": {"message": message, "type": "server_error", "param": None, "code": None}}
        return web.json_response(body, status=500)
