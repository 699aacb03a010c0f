"""Episodes of classes: both contracts, every limit, and going on from a record: replayed, restored, or begun again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from episode_world import (
    LocalCode,
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

from paceline.calls.backoff import ExponentialBackoff
from paceline.environment import episodes
from paceline.environment.protocols import (
    EnvironmentLost,
    FinishedGroup,
    LeaseLost,
    SampledTurn,
    ServiceAway,
    TurnRequest,
)
from paceline.environment.setting import EpisodeSetting
from paceline.errors import InvalidInput, PromptTooLong


class Counter:
    """TRL's contract."""

    deterministic = False

    def reset(self, start: int = 0, **columns: Any) -> str:
        self.count, self.seen = start, columns
        return f" It is {start} now."

    def add(self, n: int) -> int:
        """
        Add.

        Args:
            n: what to add
        """
        self.count += n
        return self.count

    def get_reward(self) -> float:
        return float(self.count)


class Saved(Counter):
    def save(self) -> Any:
        return [self.count]

    def load(self, state: Any) -> None:
        self.count = state[0]


class Repeatable(Counter):
    deterministic = True


class Changing(Repeatable):
    """Says it is deterministic, and is not."""

    answers = iter(range(1000))

    def add(self, n: int) -> int:
        """
        Add.

        Args:
            n: what to add
        """
        return next(self.answers)


class Guess:
    """Has `step`."""

    def reset(self, secret: str) -> None:
        self.secret, self.guesses = secret, 0

    def step(self, text: str) -> tuple[str, float, bool]:
        self.guesses += 1
        if self.guesses > 9:
            raise RuntimeError("too many")
        return f"not {text}", -1.0, text.strip() == self.secret


TOKENIZER = merged_tokenizer()


def add(n: int, before: str = "") -> str:
    call = json.dumps({"name": "add", "arguments": {"n": n}})
    return f"{before}<tool_call>\n{call}\n</tool_call>"


def says(*texts: str, reason: str = "stop") -> Callable[[TurnRequest, int], tuple[list[int], str]]:
    """Say one text after another, the last one for ever."""
    return lambda request, number: (
        ids_of(texts[min(number, len(texts) - 1)], TOKENIZER, end=reason == "stop"),
        reason,
    )


def turns_of(rows: FinishedGroup) -> list[tuple[int, ...]]:
    return [(rows.rows.samples[turn.row], *turn[:3]) for turn in rows.rows.turns]


class World:
    """A class, a script and a journal."""

    def __init__(self, cls: type, *texts: str, **environment: Any):
        spec = run_spec(environment=environment)
        self.setting = EpisodeSetting.of(spec, TOKENIZER)
        self.source = ScriptedSource(says(*texts), TOKENIZER)
        self.code, self.turn_log = LocalCode({"": cls}), MemoryTurnLog()

    async def run(self, prompt: Any = None, **changes: Any) -> FinishedGroup:
        leased = lease(user("Count.") if prompt is None else prompt, recorded=dict(self.turn_log.samples), **changes)
        try:
            return await run_group(self.setting, self.source, self.code, leased, self.turn_log)
        finally:
            assert self.code.num_open == 0

    def messages(self, rows: FinishedGroup, sample: int = 0) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(rows.samples[sample].messages_json)
        return found


async def test_calls_are_answered_until_the_model_makes_none() -> None:
    world = World(Counter, add(2, "So: "), add(3), "It is 6.")
    rows = await world.run(columns={"start": 1, "other": "x"})
    assert [m["role"] for m in world.messages(rows)] == [
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    call = world.messages(rows)[0]["tool_calls"][0]
    assert call["function"] == {"name": "add", "arguments": {"n": 2}}
    assert world.messages(rows)[1] == {
        "role": "tool",
        "content": "3",
        "name": "add",
        "tool_call_id": call["id"],
    }
    text = rows.samples[0]
    assert (text.ending, text.detail, text.reward, text.HasField("turn_rewards")) == ("done", "", 6.0, False)
    assert json.loads(text.prompt_json) == user("Count. It is 1 now.")
    assert json.loads(text.tools_json)[0]["function"]["name"] == "add"
    assert (rows.rows.num_samples, rows.rows.samples, len(rows.rows.turns)) == (1, (0,), 3)
    read = TOKENIZER.decode(row_tokens(rows.completions[0]), skip_special_tokens=False)
    assert "Count. It is 1 now.<|im_end|>" in read
    assert read.count("<tool_response>") == 2
    assert read.endswith("It is 6.<|im_end|>")
    assert np.array_equal(rows.prompt_ids, rows.completions[0].prompt_ids)
    counts = world.setting.counts
    assert (counts.samples, counts.rows) == (1, 1)
    assert (counts.bridge_breaks, counts.tool_errors, counts.failures) == (0, 0, 0)


async def test_each_sample_has_an_instance_and_seeds_of_its_own() -> None:
    world = World(Counter, add(2), "Done.")
    rows = await world.run(num_samples=3)
    assert rows.rows.samples == (0, 1, 2)
    assert [text.reward for text in rows.samples] == [2.0] * 3
    assert len({request.seed for request, _ in world.source.asked}) == 6
    assert len({request.conversation for request, _ in world.source.asked}) == 3
    assert [turn.row for turn in rows.rows.turns] == [0, 0, 1, 1, 2, 2]


async def test_what_cannot_be_called_is_an_observation() -> None:
    broken = '<tool_call>\n{"name": "add", "arguments": {"n": 2}\n</tool_call>'
    unknown = '<tool_call>\n{"name": "remove", "arguments": {}}\n</tool_call>'
    world = World(Counter, broken, unknown, add(1) + broken, "Done.")
    rows = await world.run()
    contents = [m["content"] for m in world.messages(rows) if m["role"] == "tool"]
    assert contents[0].startswith("The tool call could not be read: the call is not valid JSON")
    assert "remove" in contents[1]
    assert contents[2].startswith("1\n\nThe tool call could not be read:")
    assert (rows.samples[0].ending, rows.samples[0].reward) == ("done", 1.0)
    assert world.setting.counts.tool_errors == 3
    assert len(rows.completions) == 1


async def test_a_class_with_step_gets_texts_and_gives_rewards_of_turns() -> None:
    world = World(Guess, "5", "7")
    rows = await world.run("A number? ", columns={"secret": "7"})
    assert world.messages(rows) == [
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "not 5"},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "not 7"},
    ]
    text = rows.samples[0]
    assert (text.ending, text.reward, text.turn_rewards, text.prompt_json) == ("done", -2.0, -2.0, "")
    assert [turn.reward for turn in rows.rows.turns] == [-1.0, -1.0]
    tokens = row_tokens(rows.completions[0])
    assert TOKENIZER.decode(tokens) == "A number? 5<|im_end|>not 57<|im_end|>"  # a text prompt: no template


async def test_several_classes_are_chosen_by_a_column() -> None:
    world = World(Counter, "Done.")
    world.setting = EpisodeSetting.of(run_spec(environment={"class": {"a": "f:A", "b": "f:B"}}), TOKENIZER)
    world.code = LocalCode({"a": Counter, "b": Guess})
    rows = await world.run(columns={"environment": "a", "start": 3})
    assert json.loads(rows.samples[0].prompt_json) == user("Count. It is 3 now.")
    world.turn_log = MemoryTurnLog()
    rows = await world.run(columns={"environment": "b", "secret": "Done."})
    assert (rows.samples[0].tools_json, rows.samples[0].turn_rewards) == ("", -1.0)
    world.turn_log = MemoryTurnLog()
    with pytest.raises(
        InvalidInput,
        match=r"column 'environment' is 'c', but environment.class has only 'a', 'b'",
    ):
        await world.run(columns={"environment": "c"})


@pytest.mark.parametrize(
    ("limits", "detail", "turns"),
    [
        ({"max_turns": 2}, "environment.max_turns 2", 2),
        ({"timeout_s": 1e-9}, "environment.timeout_s 1e-09", 1),
    ],
)
async def test_a_limit_truncates_and_the_environment_is_still_asked_for_its_reward(
    limits: dict[str, Any], detail: str, turns: int
) -> None:
    world = World(Counter, add(1), **limits)
    rows = await world.run()
    text = rows.samples[0]
    assert (text.ending, text.detail, text.reward) == ("truncated", detail, float(turns))
    assert len(rows.rows.turns) == turns


class Talker(Counter):
    def add(self, n: int) -> str:
        """
        Add.

        Args:
            n: what to add
        """
        return "word " * n


async def test_the_model_s_length_truncates_before_a_turn_without_room() -> None:
    world = World(Talker, add(10), add(150))
    policy = {"max_total_sequence_length": 450, "generation": {"max_new_tokens": 100}}
    world.setting = EpisodeSetting.of(run_spec(policy=policy), TOKENIZER)
    rows = await world.run()
    text = rows.samples[0]
    assert text.ending == "truncated"
    assert "leaves no room for a turn in policy.max_total_sequence_length 450" in text.detail
    assert len(row_tokens(rows.completions[0])) <= 450
    for request, _ in world.source.asked:
        assert len(request.prompt_ids) + request.params.max_new_tokens <= 450


async def test_a_turn_that_is_cut_off_ends_the_episode_as_truncated() -> None:
    world = World(Counter)
    world.source.say = says("I think that", reason="length")
    rows = await world.run()
    assert (rows.samples[0].ending, rows.completions[0].finish_reason) == ("truncated", "length")


async def test_a_prompt_without_room_is_refused_before_a_token_is_sampled() -> None:
    world = World(Counter, "x")
    with pytest.raises(PromptTooLong, match="leaves no room"):
        await world.run(user("x " * 5000))
    assert world.source.asked == []


async def test_long_answers_of_tools_are_cut_off_and_say_so() -> None:
    world = World(Talker, add(500), add(2), "Done.", max_tool_tokens=20)
    rows = await world.run()
    long, short = [m["content"] for m in world.messages(rows) if m["role"] == "tool"]
    assert long.endswith("\n[cut off after 20 tokens]")
    assert len(TOKENIZER(long, add_special_tokens=False)["input_ids"]) < 50
    assert short == "word word "


async def test_a_fault_ends_a_life_and_the_sample_is_given_up_alone() -> None:
    class Faulty(Counter):
        def get_reward(self) -> Any:
            raise RuntimeError("unused")

    class FaultyCode(LocalCode):
        async def open(self, name: str, columns: Any, time_left_s: float, deaths: Any) -> Any:
            instance, text = await super().open(name, columns, time_left_s, deaths)
            if number["opened"] % 2 == 0:
                instance.reward = refuse
            else:
                instance.reward = seven
            number["opened"] += 1
            return instance, text

    from paceline.environment.protocols import EnvironmentFailed

    async def refuse(time_left_s: float) -> float:
        raise EnvironmentFailed("get_reward raised RuntimeError: no scale")

    async def seven(time_left_s: float) -> float:
        return 7.0

    number = {"opened": 0}
    world = World(Faulty, add(1), "Done.", max_failures=1)
    world.code = FaultyCode({"": Faulty})
    rows = await world.run(num_samples=2)
    assert world.turn_log.ended == [(0, 1, "environment_failed", "get_reward raised RuntimeError: no scale", True)]
    assert (rows.rows.samples, rows.rows.num_samples) == ((1,), 2)
    assert [(text.ending, text.HasField("reward")) for text in rows.samples] == [
        ("failed", False),
        ("done", True),
    ]
    assert rows.samples[0].detail == "get_reward raised RuntimeError: no scale"
    again = await world.run(num_samples=2)  # by the next holder of the lease
    assert [text.ending for text in again.samples] == ["failed", "done"]
    assert turns_of(again) == turns_of(rows)

    number["opened"] = 0
    world = World(Faulty, add(1), "Done.", max_failures=2)
    world.code = FaultyCode({"": Faulty})
    rows = await world.run()
    assert [(life, reason, give_up) for _, life, reason, _, give_up in world.turn_log.ended] == [
        (1, "environment_failed", False)
    ]
    assert rows.samples[0].reward == 7.0
    assert len({request.seed for request, _ in world.source.asked}) == 3  # the second life samples anew


async def test_a_group_of_which_every_sample_was_given_up_has_no_rows() -> None:
    class Never(Counter):
        pass

    class NeverCode(LocalCode):
        async def open(self, name: str, columns: Any, time_left_s: float, deaths: Any) -> Any:
            from paceline.environment.protocols import EnvironmentFailed

            raise EnvironmentFailed("reset raised KeyError: 'task'")

    world = World(Never, "x")
    world.code = NeverCode({"": Never})
    rows = await world.run(num_samples=2)
    assert (rows.completions, rows.rows.num_samples, len(rows.prompt_ids)) == ([], 2, 0)
    assert [text.detail for text in rows.samples] == ["reset raised KeyError: 'task'"] * 2
    assert len(world.turn_log.ended) == 6


# Going on from a record


async def interrupted(world: World, records: int, **changes: Any) -> None:
    """Run until the lease is lost at a record."""
    world.turn_log.fail_at = world.turn_log.num_records + records
    with pytest.raises(LeaseLost):
        await world.run(**changes)
    world.turn_log.fail_at = None


def reset_script(world: World, already: int) -> None:
    """Let the script go on where the record ends, as a policy does that reads it."""
    say = world.source.say
    world.source = ScriptedSource(lambda request, number: say(request, number + already), TOKENIZER)


async def whole_run(cls: type, **environment: Any) -> tuple[World, FinishedGroup]:
    world = World(cls, add(2), add(3), add(4), "Done.", **environment)
    return world, await world.run(columns={"start": 1})


@pytest.mark.parametrize(
    ("cls", "environment", "how"),
    [
        (Repeatable, {}, "replayed"),
        (Counter, {"deterministic": True}, "replayed"),
        (Saved, {}, "restored"),
    ],
)
@pytest.mark.parametrize("turns", [1, 2, 3])
async def test_an_interrupted_episode_goes_on_as_if_nothing_had_been(
    cls: type, environment: dict[str, Any], how: str, turns: int
) -> None:
    _, expected = await whole_run(cls, **environment)
    world = World(cls, add(2), add(3), add(4), "Done.", **environment)
    await interrupted(world, turns, columns={"start": 1})
    reset_script(world, turns)
    rows = await world.run(columns={"start": 1})
    assert world.turn_log.ended == []
    assert turns_of(rows) == turns_of(expected)
    assert np.array_equal(row_tokens(rows.completions[0]), row_tokens(expected.completions[0]))
    assert rows.samples[0].reward == expected.samples[0].reward == 10.0
    assert rows.samples[0].messages_json == expected.samples[0].messages_json
    assert rows.samples[0].prompt_json == expected.samples[0].prompt_json
    counts = world.setting.counts
    assert (counts.replayed, counts.restored, counts.restarted) == (how == "replayed", how == "restored", 0)
    assert len(world.source.asked) == 4 - turns


@pytest.mark.parametrize("cls", [Counter, Changing])
async def test_an_episode_that_can_do_neither_begins_again_and_does_not_count(cls: type) -> None:
    world = World(cls, add(2), add(3), add(4), "Done.")
    await interrupted(world, 2)
    reset_script(world, 0)
    rows = await world.run()
    (ended,) = world.turn_log.ended
    assert ended[:3] == (0, 1, "restarted")
    assert ended[4] is False
    assert ("differently than recorded" in ended[3]) == (cls is Changing)
    assert (world.turn_log.samples[0].life, world.turn_log.samples[0].failures) == (2, 0)
    assert len(rows.rows.turns) == 4
    assert world.setting.counts.restarted == 1


async def test_finished_samples_are_kept_and_only_open_ones_go_on() -> None:
    world = World(Repeatable, add(2), "Done.")
    slow = asyncio.Event()

    async def before(request: TurnRequest) -> None:
        if request.conversation == "7/1":
            await slow.wait()

    world.source.before = before
    running = asyncio.create_task(world.run(num_samples=2))
    await world.turn_log.finished.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    world.source.before = None
    asked = len(world.source.asked)
    rows = await world.run(num_samples=2)
    assert {request.conversation for request, _ in world.source.asked[asked:]} == {"7/1"}
    assert [text.reward for text in rows.samples] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("fault", "pauses_s"), [(EnvironmentLost("gone"), []), (ServiceAway("the judge is away"), [5.0, 10.0])]
)
async def test_an_environment_that_is_lost_goes_on_in_this_worker(
    fault: Exception, pauses_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    paused_s: list[float] = []

    class Paused(ExponentialBackoff):
        def next_s(self) -> float:
            paused_s.append(super().next_s())
            return 0.0

    monkeypatch.setattr(episodes, "ExponentialBackoff", Paused)

    class LosingCode(LocalCode):
        lost = 0

        async def open(self, name: str, columns: Any, time_left_s: float, deaths: Any) -> Any:
            instance, text = await super().open(name, columns, time_left_s, deaths)
            tools = instance.tools

            async def lose(calls: Any, left_s: float) -> Any:
                if calls == [("add", {"n": 3})] and self.lost < 2:
                    self.lost += 1
                    raise fault
                return await tools(calls, left_s)

            instance.tools = lose
            return instance, text

    world = World(Repeatable, add(2), add(3), "Done.")
    world.code = LosingCode({"": Repeatable})
    script = {2: 1, 3: 1}  # the third and the fourth turn that is sampled are the second one again

    def say(request: TurnRequest, number: int) -> tuple[list[int], str]:
        return says(add(2), add(3), "Done.")(request, script.get(number, min(number, 2)) if number < 4 else 2)

    world.source.say = say
    rows = await world.run()
    assert (rows.samples[0].reward, world.turn_log.ended, world.setting.counts.replayed) == (5.0, [], 2)
    assert len(rows.rows.turns) == 3
    assert paused_s == pauses_s


async def test_a_lost_lease_ends_all_samples() -> None:
    world = World(Counter, add(2), "Done.")
    world.turn_log.fail_at = 1
    with pytest.raises(LeaseLost):
        await world.run(num_samples=4)


async def test_time_in_which_the_policy_is_waited_for_does_not_count() -> None:
    world = World(Counter, add(2), "Done.", timeout_s=5.0)
    now = {"s": 0.0}

    async def hours(request: TurnRequest) -> None:
        now["s"] += 7200.0

    world.source.before = hours
    from paceline.environment import class_episode

    original = class_episode.Stopwatch
    try:
        class_episode.Stopwatch = lambda limit_s: original(limit_s, lambda: now["s"])  # type: ignore[misc,assignment]
        rows = await world.run()
    finally:
        class_episode.Stopwatch = original  # type: ignore[misc]
    assert rows.samples[0].ending == "done"


def test_a_sampled_turn_is_what_sources_return() -> None:
    assert SampledTurn._fields == ("token_ids", "logprobs", "spans", "finish_reason", "text")
