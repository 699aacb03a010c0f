"""Serves agents over HTTP on this host's loopback, at a separate base URL `http://127.0.0.1:PORT/SECRET/v1` for every
sample.

A program that accepts an OpenAI base URL needs nothing else: the secret identifies the conversation, and any API key is
accepted. Promise: a request is answered only from its own conversation and after its turn is recorded, so a stream
sends the whole turn in a few events. Requests of an ended conversation are refused. No request ends the service.

Order of waiting: a request waits for a turn of its conversation, which waits for a rollout worker and for the turn log.
The end of a conversation cancels its requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash
from aiohttp import web

from paceline.chat.answer_reader import AnswerPart, TextPart
from paceline.chat.call_formats import ToolCall
from paceline.chat.messages import Json, Unsupported
from paceline.chat.rendering import ChatTemplate
from paceline.environment.protocols import AgentAnswer, AgentConversation, AgentRequest, ConversationAddress, LeaseLost
from paceline.errors import Conflict, NotFound
from paceline.groups import Version
from paceline.rate_limited_log import RateLimitedLog
from paceline.services.common.serving.json_http import JsonListener, event_stream, send_event
from paceline.services.openai.answers import Answer
from paceline.services.openai.frames import Choice, Delta, Event, Frame
from paceline.services.openai.requests import Ask, ChatAsk, read_ask
from paceline.services.openai.responses import ResponseAnswer, fields_of_responses, read_responses_ask
from paceline.services.openai.token_route import TokenAnswer, TokenAsk

HOST = "127.0.0.1"
MAX_CONNECTIONS = 8192
"""Largest number of connections from programs on this host; one program may open several connections."""

MAX_BODIES = 64
MAX_STOP_IDS = 16
LOG_S = 60.0
log = logging.getLogger(__name__)


class _Open:
    """A conversation with its waiting requests."""

    def __init__(self, session: AgentConversation) -> None:
        self.session = session
        self.requests: set[asyncio.Task[AgentAnswer]] = set()


class ConversationServer:
    """Serves the conversations of one run's agents. An async context manager. Implements `ConversationHost`."""

    def __init__(self, run_id: str, tokenizer: Any) -> None:
        self._run_id, self._tokenizer = run_id, tokenizer
        self._template = ChatTemplate(tokenizer)
        self._sessions: dict[str, _Open] = {}
        self._seldom = RateLimitedLog(log, LOG_S)
        self._port = 0
        self._listener = JsonListener(
            "the conversation server of agents",
            "free a port",
            max_connections=MAX_CONNECTIONS,
            share_of_address=1.0,
            max_bodies=MAX_BODIES,
            encrypted=False,  # agents on this host read its address from their environment
        )
        router = self._listener.app.router
        router.add_get("/{key}/v1/models", self._models)
        router.add_post("/{key}/v1/chat/completions", self._chat)
        router.add_post("/{key}/v1/responses", self._respond)
        router.add_post("/{key}/inference/v1/generate", self._generate)
        router.add_post("/{key}/v1/inference/v1/generate", self._generate)

    async def __aenter__(self) -> ConversationServer:
        self._port = await self._listener.start(HOST, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listener.close()

    @contextlib.asynccontextmanager
    async def open(self, session: AgentConversation) -> AsyncIterator[ConversationAddress]:
        """Serve a conversation while the context is open. Requests that still run at the end are cancelled."""
        key, opened = secrets.token_urlsafe(24), _Open(session)
        self._sessions[key] = opened
        try:
            yield ConversationAddress(f"http://{HOST}:{self._port}/{key}/v1", key)
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
        answer = await self._answer(opened, await self._chat_request(request, ask, body["messages"]))
        answer_id = f"chatcmpl-{uuid.uuid4().hex}"
        frame = Answer(answer_id, ask, self._run_id, _newest(answer), self._tokenizer.decode)
        return await _shaped(request, frame, answer, stream=bool(ask.stream))

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        opened, body = self._session(request), await self._listener.body(request)
        ask, chat = read_responses_ask(body)
        with fields_of_responses():
            asked = await self._chat_request(request, chat, [each.model_dump() for each in chat.messages])
        answer = await self._answer(opened, asked)
        frame = ResponseAnswer(f"resp_{uuid.uuid4().hex}", ask, self._run_id, _newest(answer), self._tokenizer.decode)
        return await _shaped(request, frame, answer, stream=bool(chat.stream))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        opened, body = self._session(request), await self._listener.body(request)
        ask = read_ask(TokenAsk, body)
        self._check(ask)
        self._check_ids("token_ids", ask.token_ids)
        self._note_parameters(ask)
        asked = AgentRequest(
            messages=[],
            tools=[],
            template_kwargs={},
            prompt_ids=np.array(ask.token_ids, np.int32),
            max_new_tokens=ask.max_tokens,
            stop_token_ids=tuple(ask.stop_token_ids or ()),
            **await _identity(request),
        )
        answer = await self._answer(opened, asked)
        frame = TokenAnswer(uuid.uuid4().hex, ask, self._run_id, _newest(answer))
        return await _shaped(request, frame, answer, stream=bool(ask.stream))

    async def _chat_request(self, request: web.Request, ask: ChatAsk, messages: Sequence[Json]) -> AgentRequest:
        self._check(ask)
        self._note_parameters(ask)
        effort = self._template.effort_kwargs(ask.reasoning_effort)
        return AgentRequest(
            messages=messages,
            tools=[] if ask.tool_choice.kind == "none" else ask.tools or [],
            template_kwargs={**(ask.chat_template_kwargs or {}), **effort},
            prompt_ids=None,
            max_new_tokens=ask.max_tokens,
            stop_token_ids=tuple(ask.stop_token_ids or ()),
            **await _identity(request),
        )

    def _session(self, request: web.Request) -> _Open:
        opened = self._sessions.get(request.match_info["key"])
        if opened is None:
            raise NotFound("no running episode has this URL; use the base URL that the episode was given")
        return opened

    async def _answer(self, opened: _Open, request: AgentRequest) -> AgentAnswer:
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
            raise  # the client is gone: the turn continues, and a repeated request gets its answer

    def _check(self, ask: Ask) -> None:
        """Raise Unsupported for parameters that change the tokens and are impossible in an episode."""
        if (ask.n or 1) > 1:
            raise Unsupported(f"n is {ask.n}, but a request of an episode is one turn; remove n", "n")
        if ask.stops:
            raise Unsupported(
                "stop is set, but in an episode only tokens end a turn (policy.generation, or stop_token_ids); remove stop",
                "stop",
            )
        if len(ask.stop_token_ids or ()) > MAX_STOP_IDS:
            raise Unsupported(f"stop_token_ids has more than {MAX_STOP_IDS} ids", "stop_token_ids")
        self._check_ids("stop_token_ids", ask.stop_token_ids or ())
        if isinstance(ask, ChatAsk) and ask.tool_choice.kind in ("required", "function"):
            raise Unsupported(
                f"tool_choice is {ask.tool_choice.kind!r}, but in an episode the model decides; use 'auto'",
                "tool_choice",
            )

    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        if ids and max(ids) >= (size := len(self._tokenizer)):
            raise Unsupported(f"{field} has {max(ids)}, but the vocabulary has {size} tokens", field)

    def _note_parameters(self, ask: Ask) -> None:
        """Warn that the run's sampling parameters apply, because the learner's log-probabilities assume them."""
        named = [
            name
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "min_tokens")
            if getattr(ask, name) is not None
        ]
        if named:
            self._seldom.warning(
                "parameters", "an agent sets %s; its turns are sampled with the run's parameters", ", ".join(named)
            )


OVER = "this episode is over: the program may end"


def _newest(answer: AgentAnswer) -> Version:
    return max(Version(span.session, span.step) for span in answer.turn.spans)


async def _shaped(request: web.Request, frame: Frame, answer: AgentAnswer, *, stream: bool) -> web.StreamResponse:
    choice = choice_of(answer)
    if not stream:
        return web.json_response(frame.whole([choice]))
    response = event_stream()
    await response.prepare(request)
    for event in events_of(frame, choice):
        await send_event(response, event.body, event.name)
    if frame.ends_with_mark:
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def _identity(request: web.Request) -> Json:
    try:
        retry_count = int(request.headers.get("x-stainless-retry-count", "0"))
    except ValueError:
        retry_count = 0
    content = await request.read()  # aiohttp keeps what the first call has read
    return {"body_digest": xxhash.xxh3_128_hexdigest(content), "retry_count": retry_count}


def choice_of(answer: AgentAnswer) -> Choice:
    turn = answer.turn
    return Choice(
        0,
        answer.prompt_ids,
        _parts(answer.message),
        turn.token_ids.tolist(),
        turn.logprobs.tolist(),
        tuple(turn.spans),
        turn.finish_reason,
        turn.text,
    )


def events_of(frame: Frame, choice: Choice) -> list[Event]:
    whole = Delta(0, choice.parts, list(choice.token_ids), list(choice.logprobs), 0, 0, choice.spans)
    return [*frame.begin(1), *frame.add(whole), *frame.end(choice), *frame.finish([choice])]


def _parts(message: Mapping[str, Any]) -> list[AnswerPart]:
    parts: list[AnswerPart] = []
    if reasoning := message.get("reasoning_content"):
        parts.append(TextPart(reasoning, reasoning=True))
    if content := message.get("content"):
        parts.append(TextPart(content))
    for call in message.get("tool_calls") or ():
        parts.append(ToolCall(call["function"]["name"], call["function"]["arguments"], call["id"]))
    return parts
