"""`AgentTurns`: the session of an agent's program, request by request, from messages to recorded turns.

Tasks: each request is answered by a task of the session, so that a client that lost its connection finds the answer by its
retry. At most one turn is not recorded: the newest one, because only the end of the program tells whether it is the last. It is
recorded before the next turn is sampled.

Promises: a marked retry of the same body gets the same answer; what the program did not get does not train; a request whose
tokens do not extend a row exactly begins a row of its own, and so does one that could extend two.

A request goes on from an earlier one when its messages are that one's messages, the answer to it, and something new. Messages are
compared by what they say, because clients write the same answer in several ways: without its reasoning, with `content` null or
empty, with the arguments of calls in another form of the same JSON.
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
from paceline.environment.rows import Place, RowTokens
from paceline.environment.setting import GroupContext, Stopwatch
from paceline.errors import Conflict, InvalidInput, PromptTooLong
from paceline.groups import IntArray
from paceline.v1 import exchange_pb2 as pb

BEGINNING = "0"


@dataclass
class Asked:
    """One answered request."""

    conversation: Conversation
    """As templates take it; without messages for a request of token ids."""
    prompt_ids: IntArray
    turn: SampledTurn
    answer: Json
    """The assistant's message as templates take it."""
    sent: Sequence[Mapping[str, Any]]
    """The messages as they were sent."""
    trains: bool
    delivered: bool = False
    """The program got the answer."""


class History:
    """The answered requests of a session."""

    def __init__(self) -> None:
        self._by_end: dict[str, list[Asked]] = {}
        """Answered requests by the chain of their messages, the answer among them."""

    def add(self, asked: Asked) -> None:
        if not asked.sent:
            return
        chain = _chains(asked.sent, asked.conversation)[-1]
        end = _link(chain, asked.answer)
        self._by_end.setdefault(end, []).append(asked)

    def parent(self, sent: Sequence[Mapping[str, Any]], conversation: Conversation) -> tuple[Asked, int] | None:
        """Return the request that this one goes on from, and the number of messages up to its answer; None where there is
        none, or where several with different tokens could be meant."""
        chains = _chains(sent, conversation)
        for count in range(len(sent) - 1, 0, -1):
            found = self._by_end.get(chains[count])
            if not found:
                continue
            first = found[0]
            if any(not _same_tokens(first, other) for other in found[1:]):
                return None
            return first, count
        return None


def read_messages(sent: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Return the messages of a request as templates take them. Raises InvalidInput."""
    messages = []
    for each in sent:
        try:
            message = Message.model_validate(each)
        except ValueError as error:
            raise InvalidInput(f"messages has one that is no message: {error}") from None
        messages.append(message.rendered())
    return messages


def _same_tokens(first: Asked, other: Asked) -> bool:
    return np.array_equal(first.prompt_ids, other.prompt_ids) and np.array_equal(
        first.turn.token_ids, other.turn.token_ids
    )


def _chains(sent: Sequence[Mapping[str, Any]], conversation: Conversation) -> list[str]:
    """Return a digest of each beginning of the messages: `[n]` is that of the first n."""
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
"""The user's `train_call`."""


class AgentTurns:
    """The session of one life of a sample."""

    def __init__(self, context: GroupContext, life: Life, watch: Stopwatch, trains: Trains):
        self._context, self._setting, self._life = context, context.setting, life
        self._rendering: Rendering = context.setting.renderings.chat
        self._watch, self._trains = watch, trains
        self._history = History()
        self._recorded = recorded_turns(life)
        self._unasked = list(self._recorded)
        """Recorded turns of an earlier holder that no request has asked for yet."""
        self._pending: TakenTurn | None = None
        """The newest turn, which is not recorded yet."""
        self._tasks: dict[str, asyncio.Task[tuple[AgentAnswer, Asked]]] = {}
        """The newest answer to each body."""
        self._record = asyncio.Lock()
        self._arrivals = itertools.count(len(self._recorded))
        self._num_turns = len(self._recorded)
        self._waiting = 0
        self._over = False
        self.limit = ""
        """The limit that a request has met."""
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails when the lease is lost, or user code fails in `train_call`."""
        self.changed = asyncio.Event()
        """Set when the program begins or ends to wait for an answer."""

    @property
    def waits(self) -> bool:
        """Return whether the program waits for an answer: its own time stands still."""
        return self._waiting > 0

    async def answer(self, request: AgentRequest) -> AgentAnswer:
        """Return the answer to a request, see `AgentSession`."""
        if self._over:
            raise Conflict("the episode is over: its program has ended, or its time was up")
        earlier = self._tasks.get(request.body_digest) if request.retry_count else None
        task = earlier or asyncio.create_task(self._answer(request), name="agent turn")
        if earlier is None:
            self._tasks[request.body_digest] = task
            task.add_done_callback(_retrieve)
        self._wait(1)
        try:
            answer, asked = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Conflict("the episode is over") from None
            raise
        finally:
            self._wait(-1)
        asked.delivered = True
        return answer

    async def finish(self, reward: float | None, ending: str, detail: str) -> FinishedSample:
        """Record the last turn, and return the sample. Raises EnvironmentFailed without a turn that trains, LeaseLost."""
        await self.close()
        async with self._record:
            taken = [*self._recorded, *([self._pending] if self._pending else [])]
            if not any(each.counts for each in taken):
                raise EnvironmentFailed(
                    "the agent sent no request that trains; it has to use the base_url and api_key that it gets"
                )
            if self._pending is None:
                self._pending = await self._closing_turn(taken[-1])
                taken.append(self._pending)
            self._pending.note.sample.CopyFrom(self._text(taken, reward, ending, detail))
            rows = [*(arrays.row for arrays, _ in self._life.turns), self._place(taken[-1]).row]
            self._pending.note.left_out.extend(left_out_of(taken, rows))
            await self._add(self._pending, last=True)
        return self._life.finished()

    async def close(self) -> None:
        self._over = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    # One request

    async def _answer(self, request: AgentRequest) -> tuple[AgentAnswer, Asked]:
        try:
            return await self._take(request)
        except (LeaseLost, EnvironmentFailed) as error:
            if not self.lost.done():
                self.lost.set_exception(error)
            raise Conflict(f"the episode is over: {error}") from error

    async def _take(self, request: AgentRequest) -> tuple[AgentAnswer, Asked]:
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
        asked = Asked(conversation, prompt_ids, turn, answer, request.messages, trains)
        async with self._record:
            await self._flush()
            self._pending = TakenTurn(asked, note, prompt_ids, turn)
        self._history.add(asked)
        return AgentAnswer(prompt_ids, turn, api_message(answer)), asked

    def _prompt(self, request: AgentRequest, conversation: Conversation) -> IntArray:
        if request.prompt_ids is not None:
            return np.ascontiguousarray(request.prompt_ids, np.int32)
        found = self._history.parent(request.messages, conversation)
        if found is not None:
            parent, count = found
            bridge = self._rendering.bridge(
                parent.conversation,
                parent.prompt_ids,
                parent.turn,
                parent.answer,
                conversation.messages[count:],
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
            TurnRequest(prompt_ids, params, seed, self._context.session(self._life.sample))
        )

    def _wait(self, change: int) -> None:
        self._waiting += change
        if self._waiting:
            self._watch.stop()
        elif not self._over:
            self._watch.start()
        self.changed.set()

    # Records of an earlier holder

    def _find_recorded(self, key: str) -> TakenTurn | None:
        found = next((each for each in self._unasked if each.note.request_digest == key), None)
        if found is not None:
            self._unasked.remove(found)
        return found

    async def _answer_again(
        self, taken: TakenTurn, request: AgentRequest, conversation: Conversation
    ) -> tuple[AgentAnswer, Asked]:
        (answer,) = json.loads(taken.note.messages_json)
        trains = await self._trains(list(request.messages), list(request.tools))
        taken.asked = Asked(conversation, taken.prompt_ids, taken.turn, answer, request.messages, trains)
        self._history.add(taken.asked)
        if not trains:
            self._life.rows.close(self._life.turns[self._recorded.index(taken)][0].row)
        return AgentAnswer(taken.prompt_ids, taken.turn, api_message(answer)), taken.asked

    # Records

    async def _flush(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            await self._add(pending, last=False)
            self._recorded.append(pending)

    async def _add(self, taken: TakenTurn, *, last: bool) -> None:
        place = self._place(taken)
        await self._life.add(place, taken.turn, taken.note, last=last)
        if taken.asked is None or not taken.asked.trains:
            self._life.rows.close(place.row)

    def _place(self, taken: TakenTurn) -> Place:
        if taken.asked is None or not taken.asked.trains:
            return Place(self._life.rows.count, taken.prompt_ids)
        return self._life.rows.place(taken.prompt_ids)

    async def _closing_turn(self, last: TakenTurn) -> TakenTurn:
        """Return a turn of one token that no program asked for: the newest turn is recorded already, and a sample ends with a
        turn that says so. It is left out."""
        params = self._context.params(1, 1)
        seed = self._life.seed(self._context.lease.seed, next(self._arrivals))
        turn = await self._context.source.sample(
            TurnRequest(last.prompt_ids, params, seed, self._context.session(self._life.sample))
        )
        note = pb.TurnNote(messages_json="[]", text=clean(turn.text), finish_reason=turn.finish_reason)
        return TakenTurn(None, note, last.prompt_ids, turn)

    def _text(self, taken: Sequence[TakenTurn], reward: float | None, ending: str, detail: str) -> pb.SampleText:
        """Return the texts of the sample: the longest conversation that trains, the newest of equal ones."""
        asked = [each.asked for each in taken if each.asked is not None and each.counts]
        main = max(asked, key=lambda each: len(each.conversation.messages))
        for each in asked:
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
    """A sampled or recorded turn with its request; `asked` is None while no program has asked for a recorded one."""

    asked: Asked | None
    note: pb.TurnNote
    prompt_ids: IntArray
    turn: SampledTurn

    @property
    def counts(self) -> bool:
        """Return whether the turn trains: its program got the answer, and it is none that `train_call` keeps out."""
        return self.asked is not None and self.asked.trains and self.asked.delivered


def recorded_turns(life: Life) -> list[TakenTurn]:
    rows, taken = RowTokens(), []
    for arrays, note in life.turns:
        prompt_ids = rows.prompt_of(arrays)
        rows.add(arrays)
        turn = SampledTurn(arrays.token_ids, arrays.logprobs, arrays.spans, note.finish_reason, note.text)
        taken.append(TakenTurn(None, note, prompt_ids, turn))
    return taken


def left_out_of(taken: Sequence[TakenTurn], rows: Sequence[int]) -> list[int]:
    """Return the turns that are no part of the sample's rows: those that do not count, unless a later turn of their row does,
    because what a model has read is in its row."""
    left_out: list[int] = []
    kept: set[int] = set()
    for index in range(len(taken) - 1, -1, -1):
        if taken[index].counts:
            kept.add(rows[index])
        elif rows[index] not in kept:
            left_out.append(index)
    return sorted(left_out)


def digest_of(request: AgentRequest) -> str:
    """Return the digest by which a recorded turn finds the request that asks for it again."""
    ids = None if request.prompt_ids is None else request.prompt_ids.tolist()
    said: list[Any] = [list(request.messages), list(request.tools), dict(request.template_kwargs), ids]
    stops = [list(request.stop_token_ids)] if request.stop_token_ids else []
    return digest([*said, request.max_new_tokens, *stops])
