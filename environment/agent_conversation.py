"""Records the requests of an agent's program as turns of one conversation.

Tasks: a task of the conversation answers each request, so a client that lost its connection gets the answer when it
retries. Only the newest turn may be unrecorded, because only the end of the program tells whether that turn is the last
one. It is recorded before the next turn is sampled.

Promises: a request that its client marks as a retry gets the same answer if its body is the same. An answer that the
program did not get is not trained. A request begins a new transcript if its tokens extend no transcript exactly, or if
they extend several.

A request continues an earlier one if its messages are the earlier messages, the answer and something new. Messages are
compared by content, because clients write the same answer in several ways: without its reasoning, with `content` null
or empty, with the arguments of calls as another form of the same JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.chat.messages import Json, Message
from paceline.data.messages import api_message, read_message
from paceline.environment.life import FinishedSample, Life, clean, digest, json_text, sample_text
from paceline.environment.protocols import (
    AgentAnswer,
    AgentRequest,
    EnvironmentFailed,
    LeaseLost,
    SampledTurn,
    TurnRequest,
)
from paceline.environment.rendering.protocol import Conversation, Rendering
from paceline.environment.setting import GroupContext, Stopwatch
from paceline.environment.transcripts import Continuation, TranscriptTokens
from paceline.errors import Conflict, InvalidInput, PromptTooLong
from paceline.groups import IntArray
from paceline.v1 import exchange_pb2 as pb

BEGINNING = "0"


@dataclass
class AnsweredRequest:
    conversation: Conversation
    """The request's conversation in the form that templates take. It has no messages if the request has token ids."""
    prompt_ids: IntArray
    turn: SampledTurn
    answer: Json
    """The assistant's message in the form that templates take."""
    sent: Sequence[Mapping[str, Any]]
    """Messages of the request, unchanged."""
    trains: bool
    delivered: bool = False
    """True after the program got the answer."""


class History:
    def __init__(self) -> None:
        self._by_end: dict[str, list[AnsweredRequest]] = {}
        """Answered requests by the digest of their messages with the answer."""

    def add(self, answered: AnsweredRequest) -> None:
        if not answered.sent:
            return
        chain = _chains(answered.sent, answered.conversation)[-1]
        end = _link(chain, answered.answer)
        self._by_end.setdefault(end, []).append(answered)

    def parent(
        self, sent: Sequence[Mapping[str, Any]], conversation: Conversation
    ) -> tuple[AnsweredRequest, int] | None:
        """Return the earlier request that the messages `sent` continue, and the number of messages up to that request's
        answer. Return None if no request matches, or if several with different tokens match."""
        chains = _chains(sent, conversation)
        for count in range(len(sent) - 1, 0, -1):
            matches = self._by_end.get(chains[count])
            if not matches:
                continue
            first = matches[0]
            if any(not _same_tokens(first, other) for other in matches[1:]):
                return None
            return first, count
        return None


def read_messages(sent: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Return the messages of a request in the form that templates take. Raises InvalidInput."""
    messages = []
    for each in sent:
        try:
            message = Message.model_validate(each)
        except ValueError as error:
            raise InvalidInput(f"`messages` has an invalid message: {error}") from None
        messages.append(message.rendered())
    return messages


def _same_tokens(first: AnsweredRequest, other: AnsweredRequest) -> bool:
    return np.array_equal(first.prompt_ids, other.prompt_ids) and np.array_equal(
        first.turn.token_ids, other.turn.token_ids
    )


def _chains(sent: Sequence[Mapping[str, Any]], conversation: Conversation) -> list[str]:
    """Return the digests of all prefixes of the messages: entry n is the digest of the first n messages."""
    chain = digest([BEGINNING, list(conversation.tools), dict(conversation.template_kwargs)])
    chains = [chain]
    for message in sent:
        chain = _link(chain, message)
        chains.append(chain)
    return chains


def _link(chain: str, message: Mapping[str, Any]) -> str:
    read = read_message(message)
    calls = [
        [call.get("id"), call["function"]["name"], call["function"]["arguments"]] for call in read.get("tool_calls", ())
    ]
    return digest([chain, [read["role"], read["content"], calls, read.get("tool_call_id")]])


Trains = Callable[[Sequence[Any], Sequence[Any]], Awaitable[bool]]


class AgentTurns:
    def __init__(self, context: GroupContext, life: Life, watch: Stopwatch, trains: Trains):
        self._context, self._setting, self._life = context, context.setting, life
        self._rendering: Rendering = context.setting.renderings.chat
        self._watch, self._trains = watch, trains
        self._history = History()
        self._recorded = recorded_turns(life)
        self._unmatched = list(self._recorded)
        """Turns that an earlier holder of the lease recorded and that no request has matched yet."""
        self._pending: TakenTurn | None = None
        """The newest turn while it is not recorded yet."""
        self._tasks: dict[str, asyncio.Task[tuple[AgentAnswer, AnsweredRequest]]] = {}
        """Tasks of the newest answers, by the digest of the request's body."""
        self._record = asyncio.Lock()
        self._arrivals = itertools.count(len(self._recorded))
        self._num_turns = len(self._recorded)
        self._waiting = 0
        self._over = False
        self.limit = ""
        """The limit that a request has reached, as text; empty if no request has reached one."""
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that fails if the lease is lost or `train_call` fails."""
        self.changed = asyncio.Event()
        """Event that is set when the program begins or stops waiting for an answer."""

    @property
    def waits(self) -> bool:
        """Return whether the program waits for an answer. The wait does not count as the program's own time."""
        return self._waiting > 0

    async def answer(self, request: AgentRequest) -> AgentAnswer:
        """Return the answer to a request; see `AgentConversation`."""
        if self._over:
            raise Conflict("the episode is over: its program has ended, or its time limit has passed")
        earlier = self._tasks.get(request.body_digest) if request.retry_count else None
        task = earlier or asyncio.create_task(self._answer(request), name="agent turn")
        if earlier is None:
            self._tasks[request.body_digest] = task
            task.add_done_callback(_retrieve)
        self._wait(1)
        try:
            answer, answered = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Conflict("the episode is over") from None
            raise
        finally:
            self._wait(-1)
        answered.delivered = True
        return answer

    async def finish(self, reward: float | None, ending: str, detail: str) -> FinishedSample:
        """Record the last turn and return the sample. Raises LeaseLost, and EnvironmentFailed if no turn trains."""
        await self.close()
        async with self._record:
            taken = [*self._recorded, *([self._pending] if self._pending else [])]
            if not any(each.counts for each in taken):
                raise EnvironmentFailed(
                    "the agent sent no request that trains; it must use the `base_url` and the `api_key` that it gets"
                )
            if self._pending is None:
                self._pending = await self._closing_turn(taken[-1])
                taken.append(self._pending)
            self._pending.note.sample.CopyFrom(self._text(taken, reward, ending, detail))
            transcripts = [*(arrays.row for arrays, _ in self._life.turns), self._continuation(taken[-1]).transcript]
            self._pending.note.left_out.extend(left_out_of(taken, transcripts))
            await self._add(self._pending, last=True)
        return self._life.finished()

    async def close(self) -> None:
        self._over = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    # One request

    async def _answer(self, request: AgentRequest) -> tuple[AgentAnswer, AnsweredRequest]:
        try:
            return await self._take(request)
        except (LeaseLost, EnvironmentFailed) as error:
            if not self.lost.done():
                self.lost.set_exception(error)
            raise Conflict(f"the episode is over: {error}") from error

    async def _take(self, request: AgentRequest) -> tuple[AgentAnswer, AnsweredRequest]:
        conversation = Conversation(read_messages(request.messages), list(request.tools), request.template_kwargs)
        key = digest_of(request)
        if recorded := self._find_recorded(key):
            return await self._answer_again(recorded, request, conversation)
        if self._num_turns >= self._setting.environment.max_turns:
            self.limit = f"environment.max_turns {self._setting.environment.max_turns}"
            raise Conflict(f"the episode is over: {self.limit}")
        self._num_turns += 1
        try:
            trains = await self._trains(list(request.messages), list(request.tools))
            prompt_ids = self._prompt(request, conversation)
            turn = await self._sample(prompt_ids, request.max_new_tokens, request.stop_token_ids)
        except BaseException:
            self._num_turns -= 1
            raise
        if request.prompt_ids is not None:
            answer: Json = {"role": "assistant", "content": turn.text}
        else:
            parsed = self._rendering.parse(conversation, prompt_ids, turn)
            answer = parsed.message(f"call_{self._life.number}_{key[:8]}_{self._num_turns}")
        note = pb.TurnNote(
            messages_json=json_text([answer]),
            text=clean(turn.text),
            finish_reason=turn.finish_reason,
            request_digest=key,
        )
        answered = AnsweredRequest(conversation, prompt_ids, turn, answer, request.messages, trains)
        async with self._record:
            await self._flush()
            self._pending = TakenTurn(answered, note, prompt_ids, turn)
        self._history.add(answered)
        return AgentAnswer(prompt_ids, turn, api_message(answer)), answered

    def _prompt(self, request: AgentRequest, conversation: Conversation) -> IntArray:
        if request.prompt_ids is not None:
            return np.ascontiguousarray(request.prompt_ids, np.int32)
        match = self._history.parent(request.messages, conversation)
        if match is not None:
            parent, count = match
            bridge = self._rendering.bridge(
                parent.conversation, parent.prompt_ids, parent.turn, parent.answer, conversation.messages[count:]
            )
            if bridge is not None:
                return np.concatenate([parent.prompt_ids, parent.turn.token_ids, bridge])
            self._setting.counts.bridge_breaks += 1
        return self._rendering.prompt(conversation)

    async def _sample(self, prompt_ids: IntArray, limit: int | None, stops: tuple[int, ...]) -> SampledTurn:
        room = self._setting.room(len(prompt_ids))
        if room < 1:
            self.limit = self._setting.no_room(len(prompt_ids))
            raise PromptTooLong(self.limit)
        async with self._record:
            await self._flush()
        seed = self._life.seed(self._context.lease.seed, next(self._arrivals))
        params = self._context.params(room, limit)
        params = params._replace(stop_token_ids=tuple(dict.fromkeys([*params.stop_token_ids, *stops])))
        return await self._context.source.sample(
            TurnRequest(prompt_ids, params, seed, self._context.conversation(self._life.sample))
        )

    def _wait(self, change: int) -> None:
        self._waiting += change
        if self._waiting:
            self._watch.stop()
        elif not self._over:
            self._watch.start()
        self.changed.set()

    # Turns that an earlier holder recorded

    def _find_recorded(self, key: str) -> TakenTurn | None:
        recorded = next((each for each in self._unmatched if each.note.request_digest == key), None)
        if recorded is not None:
            self._unmatched.remove(recorded)
        return recorded

    async def _answer_again(
        self, taken: TakenTurn, request: AgentRequest, conversation: Conversation
    ) -> tuple[AgentAnswer, AnsweredRequest]:
        (answer,) = json.loads(taken.note.messages_json)
        trains = await self._trains(list(request.messages), list(request.tools))
        taken.answered = AnsweredRequest(conversation, taken.prompt_ids, taken.turn, answer, request.messages, trains)
        self._history.add(taken.answered)
        if not trains:
            self._life.transcripts.close(self._life.turns[self._recorded.index(taken)][0].row)
        return AgentAnswer(taken.prompt_ids, taken.turn, api_message(answer)), taken.answered

    # The turn log

    async def _flush(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            await self._add(pending, last=False)
            self._recorded.append(pending)

    async def _add(self, taken: TakenTurn, *, last: bool) -> None:
        continuation = self._continuation(taken)
        await self._life.add(continuation, taken.turn, taken.note, last=last)
        if taken.answered is None or not taken.answered.trains:
            self._life.transcripts.close(continuation.transcript)

    def _continuation(self, taken: TakenTurn) -> Continuation:
        if taken.answered is None or not taken.answered.trains:
            return Continuation(self._life.transcripts.count, taken.prompt_ids)
        return self._life.transcripts.continuation(taken.prompt_ids)

    async def _closing_turn(self, last: TakenTurn) -> TakenTurn:
        """Return a turn of one token that no program requested and no transcript has. It is needed if the newest turn
        is recorded already, because the last turn of a sample carries the sample's texts."""
        params = self._context.params(1, 1)
        seed = self._life.seed(self._context.lease.seed, next(self._arrivals))
        turn = await self._context.source.sample(
            TurnRequest(last.prompt_ids, params, seed, self._context.conversation(self._life.sample))
        )
        note = pb.TurnNote(messages_json="[]", text=clean(turn.text), finish_reason=turn.finish_reason)
        return TakenTurn(None, note, last.prompt_ids, turn)

    def _text(self, taken: Sequence[TakenTurn], reward: float | None, ending: str, detail: str) -> pb.SampleText:
        """Return the texts of the longest conversation that trains; if several are equally long, of the newest."""
        answered = [each.answered for each in taken if each.answered is not None and each.counts]
        main = max(answered, key=lambda each: len(each.conversation.messages))
        for each in answered:
            if len(each.conversation.messages) == len(main.conversation.messages):
                main = each
        messages = [*main.conversation.messages, main.answer]
        begins = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        return sample_text(
            messages[begins:], ending, detail, reward, prompt=messages[:begins], tools=main.conversation.tools
        )


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


@dataclass(eq=False)
class TakenTurn:
    """A sampled or recorded turn with its request; `answered` is None until a program requests a recorded turn."""

    answered: AnsweredRequest | None
    note: pb.TurnNote
    prompt_ids: IntArray
    turn: SampledTurn

    @property
    def counts(self) -> bool:
        """Return whether the turn trains: its program got the answer, and `train_call` did not exclude it."""
        return self.answered is not None and self.answered.trains and self.answered.delivered


def recorded_turns(life: Life) -> list[TakenTurn]:
    transcripts, taken = TranscriptTokens(), []
    for arrays, note in life.turns:
        prompt_ids = transcripts.prompt_of(arrays)
        transcripts.add(arrays)
        turn = SampledTurn(arrays.token_ids, arrays.logprobs, arrays.spans, note.finish_reason, note.text)
        taken.append(TakenTurn(None, note, prompt_ids, turn))
    return taken


def left_out_of(taken: Sequence[TakenTurn], transcripts: Sequence[int]) -> list[int]:
    """Return the indices of the turns to leave out of the transcripts. A turn that does not train is left out, unless a
    later turn of its transcript trains: a transcript holds all that the model has read."""
    left_out: list[int] = []
    kept: set[int] = set()
    for index in range(len(taken) - 1, -1, -1):
        if taken[index].counts:
            kept.add(transcripts[index])
        elif transcripts[index] not in kept:
            left_out.append(index)
    return sorted(left_out)


def digest_of(request: AgentRequest) -> str:
    """Return the digest by which a repeated request is matched with its recorded turn."""
    ids = None if request.prompt_ids is None else request.prompt_ids.tolist()
    parts: list[Any] = [list(request.messages), list(request.tools), dict(request.template_kwargs), ids]
    stops = [list(request.stop_token_ids)] if request.stop_token_ids else []
    return digest([*parts, request.max_new_tokens, *stops])
