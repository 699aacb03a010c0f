"""The HTTP server of agents, on this host's loopback: every sample has a base URL of its own.

    http://127.0.0.1:PORT/SECRET/v1

A program that takes an OpenAI base URL needs nothing else: whoever knows the secret is the session, whatever API key is
sent. Promise: a request is answered from its session alone, after its turn is recorded; requests of a session that has ended
are refused; and none ends the service.

Order of waiting: a request waits for its session's turn, which waits for a rollout worker and for the journal. The end of a
session cancels its requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import uuid
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import xxhash
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from environment.protocols import AgentAnswer, AgentRequest, AgentSession, LeaseLost, SessionAddress
from paceline.chat.messages import Json, Unsupported
from paceline.chat.rendering import ChatTemplate
from paceline.chat.requests import ChatAsk, Ids, read_ask
from paceline.errors import Conflict, NotFound
from paceline.rate_limited_log import RateLimitedLog
from services.common.json_http import JsonListener, event_stream, send_event
from services.environment.sessions.answers import SessionAnswer, token_answer

HOST = "127.0.0.1"
MAX_CONNECTIONS = 8192
"""Connections of the host's own programs, of which each may hold several."""

MAX_BODIES = 64
LOG_S = 60.0
log = logging.getLogger(__name__)


class TokenParams(BaseModel):
    """Sampling parameters of `/inference/v1/generate`; all others are the run's."""

    model_config = ConfigDict(extra="allow")

    max_tokens: int | None = Field(default=None, ge=1)
    n: int | None = None


class TokenAsk(BaseModel):
    """`POST /inference/v1/generate`."""

    model_config = ConfigDict(extra="allow")

    token_ids: Ids
    sampling_params: TokenParams = TokenParams()
    stream: bool | None = None


class _Open:
    """A session with the requests that wait for its turns."""

    def __init__(self, session: AgentSession) -> None:
        self.session = session
        self.requests: set[asyncio.Task[AgentAnswer]] = set()


class SessionServer:
    """Sessions of one run's agents; an async context manager. Implements `SessionHost`."""

    def __init__(self, run_id: str, tokenizer: Any) -> None:
        self._run_id, self._tokenizer = run_id, tokenizer
        self._template = ChatTemplate(tokenizer)
        self._sessions: dict[str, _Open] = {}
        self._seldom = RateLimitedLog(log, LOG_S)
        self._port = 0
        self._listener = JsonListener(
            "the server of agents' sessions",
            "free a port",
            max_connections=MAX_CONNECTIONS,
            max_bodies=MAX_BODIES,
        )
        router = self._listener.app.router
        router.add_get("/{key}/v1/models", self._models)
        router.add_post("/{key}/v1/chat/completions", self._chat)
        router.add_post("/{key}/inference/v1/generate", self._generate)
        router.add_post("/{key}/v1/inference/v1/generate", self._generate)

    async def __aenter__(self) -> SessionServer:
        self._port = await self._listener.start(HOST, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listener.close()

    @contextlib.asynccontextmanager
    async def open(self, session: AgentSession) -> AsyncIterator[SessionAddress]:
        """Serve a session while the context is open; its requests that still run at the end are cancelled."""
        key, opened = secrets.token_urlsafe(24), _Open(session)
        self._sessions[key] = opened
        try:
            yield SessionAddress(f"http://{HOST}:{self._port}/{key}/v1", key)
        finally:
            del self._sessions[key]
            requests = list(opened.requests)
            for request in requests:
                request.cancel()
            if requests:
                await asyncio.wait(requests)

    # Routes

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        entry = {"id": self._run_id, "object": "model", "created": 0, "owned_by": "paceline"}
        return web.json_response({"object": "list", "data": [entry]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        opened, body = self._session(request), await self._listener.body(request)
        ask = read_ask(ChatAsk, body)
        _check(ask)
        self._note_parameters(ask)
        answer = await self._answer(
            opened,
            AgentRequest(
                messages=body["messages"],
                tools=[] if ask.tool_choice.kind == "none" else ask.tools or [],
                template_kwargs={
                    **(ask.chat_template_kwargs or {}),
                    **self._template.effort_kwargs(ask.reasoning_effort),
                },
                prompt_ids=None,
                max_new_tokens=ask.max_tokens,
                **await _identity(request),
            ),
        )
        shaped = SessionAnswer(
            f"chatcmpl-{uuid.uuid4().hex}",
            self._run_id,
            answer,
            logprobs=ask.wants_logprobs,
            token_ids=bool(ask.return_token_ids),
            decode=self._tokenizer.decode,
        )
        if not ask.stream:
            return web.json_response(shaped.whole())
        response = event_stream()
        await response.prepare(request)
        for event in shaped.events(include_usage=ask.include_usage):
            await send_event(response, event)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        opened, body = self._session(request), await self._listener.body(request)
        ask = read_ask(TokenAsk, body)
        if ask.stream or (ask.sampling_params.n or 1) > 1:
            raise Unsupported("stream and n above 1 are not possible for token ids; remove them", "stream")
        answer = await self._answer(
            opened,
            AgentRequest(
                messages=[],
                tools=[],
                template_kwargs={},
                prompt_ids=np.array(ask.token_ids, np.int32),
                max_new_tokens=ask.sampling_params.max_tokens,
                **await _identity(request),
            ),
        )
        return web.json_response(token_answer(f"gen-{uuid.uuid4().hex}", answer))

    def _session(self, request: web.Request) -> _Open:
        opened = self._sessions.get(request.match_info["key"])
        if opened is None:
            raise NotFound(
                "no episode has this URL, or it is over; take the base URL that the episode was given"
            )
        return opened

    async def _answer(self, opened: _Open, request: AgentRequest) -> AgentAnswer:
        """Return the session's answer. Raises Conflict when the session ends before."""
        task = asyncio.ensure_future(opened.session.answer(request))
        opened.requests.add(task)
        task.add_done_callback(opened.requests.discard)
        try:
            return await asyncio.shield(task)
        except LeaseLost:
            raise Conflict(OVER) from None
        except asyncio.CancelledError:
            if task.cancelled():
                raise Conflict(OVER) from None
            raise  # the client is gone: its turn goes on, and a repeated request gets it

    def _note_parameters(self, ask: ChatAsk) -> None:
        """Say that the run's sampling parameters count, because the learner's log-probabilities are of those."""
        named = [
            name
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "min_tokens")
            if getattr(ask, name) is not None
        ]
        if named:
            self._seldom.warning(
                "parameters", "an agent sets %s; its turns are sampled as the run says", ", ".join(named)
            )


OVER = "this episode is over: the program may end"


def _check(ask: ChatAsk) -> None:
    """Raises Unsupported for what would change the tokens and cannot be had in an episode."""
    if (ask.n or 1) > 1:
        raise Unsupported(f"n is {ask.n}, but a request of an episode is one turn; remove it", "n")
    if ask.stops or ask.stop_token_ids:
        raise Unsupported("stop is set, but turns end as the run says (policy.generation); remove it", "stop")
    if ask.tool_choice.kind in ("required", "function"):
        raise Unsupported(
            f"tool_choice is {ask.tool_choice.kind!r}, but in an episode the model decides; take 'auto'",
            "tool_choice",
        )


async def _identity(request: web.Request) -> Json:
    """Return what tells a repeated request from a new one."""
    try:
        retry_count = int(request.headers.get("x-stainless-retry-count", "0"))
    except ValueError:
        retry_count = 0
    content = await request.read()  # kept by the first call
    return {"body_digest": xxhash.xxh3_128_hexdigest(content), "retry_count": retry_count}
