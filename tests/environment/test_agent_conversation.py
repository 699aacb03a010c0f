"""Agents that send requests to a conversation: transcripts, retries, auxiliary calls, limits, recorded turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import xxhash
from episode_world import (
    HERMES,
    MemoryTurnLog,
    ScriptedSource,
    ids_of,
    lease,
    merged_tokenizer,
    row_tokens,
    run_group,
    run_spec,
    user,
)

from paceline.environment import episodes
from paceline.environment.hosting.classes import ClassFacts
from paceline.environment.protocols import (
    AgentAnswer,
    AgentConversation,
    AgentRequest,
    ConversationAddress,
    EnvironmentFailed,
    FinishedGroup,
    LeaseLost,
    TurnRequest,
)
from paceline.environment.setting import EpisodeSetting, Stopwatch
from paceline.errors import Conflict, InvalidInput, PromptTooLong

TOKENIZER = merged_tokenizer()
Message = Mapping[str, Any]


class Client:
    """An agent's client of one conversation."""

    def __init__(self, conversation: AgentConversation) -> None:
        self._conversation = conversation

    async def ask(
        self,
        messages: Sequence[Message],
        retry: int = 0,
        tools: Sequence[Any] = (),
        ids: Any = None,
        limit: int | None = None,
    ) -> AgentAnswer:
        body = json.dumps([list(messages), list(tools), ids, limit])
        digest = xxhash.xxh3_128(body.encode()).hexdigest()
        prompt_ids = None if ids is None else np.array(ids, np.int32)
        return await self._conversation.answer(AgentRequest(messages, tools, {}, prompt_ids, limit, digest, retry))

    async def chat(self, messages: list[Message], text: str, **options: Any) -> list[Message]:
        """Say something; return the messages with the answer."""
        asked = [*messages, *user(text)]
        answer = await self.ask(asked, **options)
        return [*asked, answer.message]


Program = Callable[[Client, Mapping[str, Any]], Awaitable[float | None]]


class Host:
    """Conversations without a server: a key names each."""

    def __init__(self) -> None:
        self.conversations: dict[str, AgentConversation] = {}

    @asynccontextmanager
    async def open(self, conversation: AgentConversation) -> AsyncIterator[ConversationAddress]:
        key = f"key-{id(conversation)}"
        self.conversations[key] = conversation
        try:
            yield ConversationAddress("http://127.0.0.1:1/v1", key)
        finally:
            del self.conversations[key]


class AgentCode:
    """The user's program in this process: `UserCode` without its processes."""

    classes: Mapping[str, ClassFacts] = {}

    def __init__(self, program: Program, host: Host, trains: Callable[[Any, Any], bool] | None = None) -> None:
        self._program, self._host, self._trains = program, host, trains

    async def solve(self, row: Mapping[str, Any], base_url: str, api_key: str, deaths: Any) -> float | None:
        try:
            return await self._program(Client(self._host.conversations[api_key]), row)
        except (Conflict, InvalidInput, KeyError) as error:
            raise EnvironmentFailed(f"the agent raised {type(error).__name__}: {error}") from error

    async def trains(self, messages: list[Any], tools: list[Any], deaths: Any) -> bool:
        assert self._trains is not None
        return self._trains(messages, tools)


class World:
    """An agent, a policy that counts, and a turn log."""

    def __init__(self, program: Program, template: str = HERMES, trains: Any = None, **environment: Any) -> None:
        section = {"class": "", "agent": "agent.py:solve", **environment}
        if trains:
            section["train_call"] = "agent.py:train_call"
        self.tokenizer = merged_tokenizer(template)
        self.setting = EpisodeSetting.of(run_spec(environment=section), self.tokenizer)
        self.source = ScriptedSource(self.say, self.tokenizer)
        self.turn_log, self.host = MemoryTurnLog(), Host()
        self.code = AgentCode(program, self.host, trains)
        self.texts = [f"answer {number}" for number in range(100)]

    def say(self, request: TurnRequest, number: int) -> tuple[list[int], str]:
        return ids_of(self.texts[number], self.tokenizer), "stop"

    async def run(self, num_samples: int = 1, **changes: Any) -> FinishedGroup:
        leased = lease("", num_samples, recorded=dict(self.turn_log.samples), **changes)
        rows = await run_group(self.setting, self.source, self.code, leased, self.turn_log, self.host)
        assert self.host.conversations == {}
        return rows

    async def run_again_after(self, turn: int) -> FinishedGroup:
        """Lose the lease when this turn is recorded, then run what is left of it."""
        self.turn_log.fail_at = turn
        with pytest.raises(LeaseLost):
            await self.run()
        self.turn_log.fail_at = None
        return await self.run()

    def read(self, rows: FinishedGroup) -> list[str]:
        return [self.tokenizer.decode(row_tokens(completion)) for completion in rows.completions]


async def three_turns(client: Client, row: Mapping[str, Any]) -> float:
    messages = await client.chat([], "one")
    messages = await client.chat(messages, "two")
    await client.chat(messages, "three")
    return 1.5


async def test_a_conversation_is_one_row() -> None:
    world = World(three_turns)
    rows = await world.run()
    (text,) = world.read(rows)
    assert [text.count(said) for said in ("one", "two", "three", "answer 0", "answer 1", "answer 2")] == [1] * 6
    assert (len(rows.rows.turns), world.setting.counts.bridge_breaks) == (3, 0)
    sample = rows.samples[0]
    assert (sample.ending, sample.reward, sample.detail) == ("done", 1.5, "")
    assert json.loads(sample.prompt_json) == user("one")
    assert [m["content"] for m in json.loads(sample.messages_json)] == [
        "answer 0",
        "two",
        "answer 1",
        "three",
        "answer 2",
    ]
    for (request, _), (earlier, turn) in zip(world.source.asked[1:], world.source.asked, strict=False):
        read = np.concatenate([earlier.prompt_ids, turn.token_ids])
        assert np.array_equal(request.prompt_ids[: len(read)], read)  # sampled tokens are never encoded again


async def test_calls_of_tools_go_back_and_forth_as_clients_write_them() -> None:
    tools = [
        {
            "type": "function",
            "function": {
                "name": "add",
                "description": "Adds.",
                "parameters": {"type": "object", "properties": {}},
            },
        }
    ]

    async def program(client: Client, row: Mapping[str, Any]) -> None:
        asked: list[Message] = user("add 1 and 2")
        answer = await client.ask(asked, tools=tools)
        (call,) = answer.message["tool_calls"]
        assert answer.message["content"] is None
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
        rewritten = {
            "id": call["id"],
            "type": "function",
            "function": {"name": "add", "arguments": '{ "b":2, "a":1 }'},
        }
        said = {"role": "assistant", "content": "", "tool_calls": [rewritten]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        await client.ask([*asked, said, result], tools=tools)

    world = World(program)
    world.texts[0] = '<tool_call>\n{"name":"add","arguments":{"a":1,"b":2}}\n</tool_call>'
    rows = await world.run()
    (text,) = world.read(rows)
    assert text.count('{"name":"add","arguments":{"a":1,"b":2}}') == 1  # as it was sampled
    assert "<tool_response>\n3\n</tool_response>" in text
    assert rows.samples[0].HasField("reward") is False
    assert json.loads(rows.samples[0].tools_json) == tools


async def test_a_rewritten_history_begins_a_row_of_its_own() -> None:
    async def program(client: Client, row: Mapping[str, Any]) -> None:
        messages = await client.chat([], "one")
        messages = await client.chat(messages, "two")
        summary = [*user("so far: one and two"), messages[-1]]
        await client.chat(summary, "three")

    world = World(program)
    rows = await world.run()
    first, second = world.read(rows)
    assert "answer 1" in first
    assert "answer 2" not in first
    assert "so far: one and two" in second
    assert second.count("answer") == 2
    assert rows.completions[1].num_sampled == len(ids_of("answer 2", world.tokenizer))  # what was read does not train
    assert world.setting.counts.rows == 2


async def test_a_template_that_rewrites_history_gives_rows_of_exact_tokens() -> None:
    from episode_world import FORGETFUL

    world = World(three_turns, FORGETFUL)
    rows = await world.run()
    assert len(rows.completions) == 3
    assert world.setting.counts.bridge_breaks == 2
    for completion, (request, turn) in zip(rows.completions, world.source.asked, strict=True):
        assert np.array_equal(completion.prompt_ids, request.prompt_ids)
        assert np.array_equal(completion.token_ids, turn.token_ids)


async def test_marked_retries_get_the_same_answer_and_others_another_one() -> None:
    async def program(client: Client, row: Mapping[str, Any]) -> None:
        asked = user("one")
        first = await client.ask(asked)
        again = await client.ask(asked, retry=1)
        other = await client.ask(asked)
        assert first is again
        assert first.message != other.message
        slow = asyncio.create_task(client.ask(user("two")))
        await asyncio.sleep(0)
        slow.cancel()  # the connection is lost
        await asyncio.gather(slow, return_exceptions=True)
        retried = await client.ask(user("two"), retry=1)
        assert retried.message["content"] == "answer 2"

    world = World(program)
    rows = await world.run()
    assert len(world.source.asked) == 3
    assert len(rows.rows.turns) == 3


async def test_equal_requests_have_rows_of_their_own_and_ambiguous_parents_too() -> None:
    async def program(client: Client, row: Mapping[str, Any]) -> None:
        first = await client.chat([], "one")
        second = await client.chat([], "one")
        assert first == second
        await client.chat(first, "two")

    world = World(program)
    world.texts[1] = world.texts[0]  # the same tokens twice
    rows = await world.run()
    assert len(rows.completions) == 3
    assert [row.num_sampled for row in rows.completions] == [len(turn.token_ids) for _, turn in world.source.asked]


async def test_requests_may_overlap() -> None:
    async def program(client: Client, row: Mapping[str, Any]) -> None:
        messages = await client.chat([], "one")
        await asyncio.gather(*(client.chat(messages, f"branch {number}") for number in range(4)))

    world = World(program)
    rows = await world.run()
    assert len(rows.rows.turns) == 5
    assert len(rows.completions) == 4  # the first branch goes on in the row of its parent
    assert sum("answer 0" in text for text in world.read(rows)) == 4
    sampled = sum(row.num_sampled for row in rows.completions)
    assert sampled == sum(len(turn.token_ids) for _, turn in world.source.asked)  # each token trains once


async def test_auxiliary_calls_are_answered_recorded_and_left_out() -> None:
    async def program(client: Client, row: Mapping[str, Any]) -> None:
        title = await client.ask(user("title"))
        assert title.message["content"] == "answer 0"
        messages = await client.chat([], "one")
        await client.ask(user("title"))
        await client.chat(messages, "two")
        await client.ask(user("title"))

    world = World(program, trains=lambda messages, tools: messages[0]["content"] != "title")
    rows = await world.run()
    assert [text.count("title") for text in world.read(rows)] == [0]
    assert [len(turn) for turn in (rows.rows.turns,)] == [2]
    last = world.turn_log.samples[0].turns[-1][1]
    assert list(last.left_out) == [0, 2, 4]
    assert len(world.turn_log.samples[0].turns) == 5


async def test_an_answer_that_nobody_got_does_not_train() -> None:
    sampled = asyncio.Event()

    async def program(client: Client, row: Mapping[str, Any]) -> None:
        messages = await client.chat([], "one")
        lost = asyncio.create_task(client.chat(messages, "two"))
        await sampled.wait()
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        await client.chat([], "three")

    world = World(program)

    async def second(request: TurnRequest) -> None:
        if len(world.source.asked) == 1:
            sampled.set()

    world.source.before = second
    rows = await world.run()
    assert [text.count("answer") for text in world.read(rows)] == [1, 1]
    assert list(world.turn_log.samples[0].turns[-1][1].left_out) == [1]


async def test_requests_of_token_ids_extend_rows_too() -> None:
    async def program(client: Client, row: Mapping[str, Any]) -> None:
        ids = ids_of("one", TOKENIZER, end=False)
        first = await client.ask([], ids=ids)
        await client.ask([], ids=[*ids, *first.turn.token_ids.tolist(), *ids], limit=2)

    world = World(program)
    rows = await world.run()
    (row,) = rows.completions
    assert (len(rows.rows.turns), row.finish_reason) == (2, "length")
    assert rows.rows.turns[1].end - rows.rows.turns[1].start == 2


@pytest.mark.parametrize("graceful", [True, False])
async def test_a_limit_of_turns_ends_the_requests(graceful: bool) -> None:
    async def program(client: Client, row: Mapping[str, Any]) -> float:
        messages: list[Message] = []
        for number in range(10):
            try:
                messages = await client.chat(messages, str(number))
            except Conflict:
                if graceful:
                    return 0.5
                raise
        return 1.0

    world = World(program, max_turns=3)
    rows = await world.run()
    text = rows.samples[0]
    assert (text.ending, text.detail, text.HasField("reward")) == (
        "truncated",
        "environment.max_turns 3",
        graceful,
    )
    assert len(rows.rows.turns) == 3


async def test_a_prompt_without_room_is_refused_and_truncates() -> None:
    async def program(client: Client, row: Mapping[str, Any]) -> float:
        messages = await client.chat([], "one")
        with pytest.raises(PromptTooLong, match="leaves no room"):
            await client.chat(messages, "x " * 5000)
        return 0.25

    rows = await World(program).run()
    text = rows.samples[0]
    assert (text.ending, text.reward) == ("truncated", 0.25)
    assert "policy.max_total_sequence_length 4096" in text.detail
    assert len(rows.rows.turns) == 1


async def test_time_ends_a_program_that_hangs_and_not_one_that_waits_for_the_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def hangs(client: Client, row: Mapping[str, Any]) -> float:
        await client.chat([], "one")
        await asyncio.Event().wait()
        return 1.0

    rows = await World(hangs, timeout_s=0.2).run()
    assert (rows.samples[0].ending, rows.samples[0].detail) == ("truncated", "environment.timeout_s 0.2")

    world, now = World(three_turns), {"s": 0.0}

    async def slow(request: TurnRequest) -> None:
        now["s"] += 7200.0

    world.source.before = slow
    monkeypatch.setattr(episodes, "Stopwatch", lambda limit_s: Stopwatch(limit_s, lambda: now["s"]))
    rows = await world.run()
    assert now["s"] == 3 * 7200.0 > world.setting.environment.timeout_s
    assert rows.samples[0].ending == "done"


@pytest.mark.parametrize("requests", [0, 1])
async def test_a_program_that_fails_ends_its_life(requests: int) -> None:
    lives: list[int] = []

    async def program(client: Client, row: Mapping[str, Any]) -> float:
        lives.append(1)
        if len(lives) == 2:
            return await three_turns(client, row)
        for _ in range(requests):
            await client.chat([], "one")
        raise KeyError("answer")

    world = World(program)
    rows = await world.run()
    ((_, life, reason, error, give_up),) = world.turn_log.ended
    assert (life, reason, give_up) == (1, "environment_failed", False)
    assert "the agent raised KeyError: 'answer'" in error
    assert rows.samples[0].ending == "done"


async def test_a_program_that_sends_nothing_fails_by_name() -> None:
    async def program(client: Client, row: Mapping[str, Any]) -> float:
        return 1.0

    world = World(program, max_failures=1)
    rows = await world.run()
    assert rows.completions == []
    assert "the agent sent no request that trains" in rows.samples[0].detail


async def test_a_request_after_the_end_is_refused() -> None:
    kept: list[Client] = []

    async def program(client: Client, row: Mapping[str, Any]) -> None:
        kept.append(client)
        await client.chat([], "one")

    await World(program).run()
    with pytest.raises(Conflict, match="the episode is over"):
        await kept[0].ask(user("two"))


# Records


@pytest.mark.parametrize("records", [0, 1, 2])
async def test_a_deterministic_agent_goes_on_from_its_record(records: int) -> None:
    expected = World(three_turns, deterministic=True)
    want = await expected.run()
    world = World(three_turns, deterministic=True)
    world.turn_log.fail_at = records
    with pytest.raises(LeaseLost):
        await world.run()
    world.turn_log.fail_at = None
    world.source = ScriptedSource(lambda request, number: world.say(request, number + records), world.tokenizer)
    rows = await world.run()
    assert world.read(rows) == expected.read(want)
    assert [turn[:3] for turn in rows.rows.turns] == [turn[:3] for turn in want.rows.turns]
    assert rows.samples[0].messages_json == want.samples[0].messages_json
    assert len(world.source.asked) == 3 - records
    assert (world.turn_log.ended, world.setting.counts.replayed) == ([], records > 0)


async def test_an_agent_that_is_not_deterministic_begins_again() -> None:
    world = World(three_turns)
    rows = await world.run_again_after(1)
    assert [ended[:3] for ended in world.turn_log.ended] == [(0, 1, "restarted")]
    assert len(rows.rows.turns) == 3


async def test_what_an_agent_does_not_ask_for_again_is_left_out() -> None:
    """It says that it is deterministic, and is not."""
    lives: list[int] = []

    async def program(client: Client, row: Mapping[str, Any]) -> None:
        lives.append(1)
        await client.chat(await client.chat([], f"life {len(lives)}"), "more")

    world = World(program, deterministic=True)
    rows = await world.run_again_after(1)
    assert "life 2" in world.read(rows)[0]
    assert len(rows.completions) == 1
    assert list(world.turn_log.samples[0].turns[-1][1].left_out) == [0]


async def test_a_sample_whose_last_turn_is_recorded_already_ends_with_a_turn_that_is_left_out() -> None:
    async def program(client: Client, row: Mapping[str, Any]) -> float:
        messages = await client.chat([], "one")
        if world.turn_log.fail_at is not None:
            await client.chat(messages, "two")
        return 2.0

    world = World(program, deterministic=True)
    rows = await world.run_again_after(1)
    assert [text.count("answer") for text in world.read(rows)] == [1]
    turns = world.turn_log.samples[0].turns
    assert (len(turns), list(turns[-1][1].left_out), len(turns[-1][0].token_ids)) == (2, [1], 1)
    assert rows.samples[0].reward == 2.0


async def test_a_lost_lease_ends_the_program() -> None:
    ended: list[str] = []

    async def program(client: Client, row: Mapping[str, Any]) -> float:
        try:
            return await three_turns(client, row)
        except Conflict as error:
            ended.append(str(error))
            await asyncio.Event().wait()
            raise

    world = World(program)
    world.turn_log.fail_at = 0
    with pytest.raises(LeaseLost):
        await world.run(num_samples=2)
    assert all("another worker holds the lease" in text for text in ended)
