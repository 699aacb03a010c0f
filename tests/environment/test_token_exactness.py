"""Random conversations with tools: every row has exactly the tokens that the engine was given and gave, and nothing trains
that it did not sample."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from episode_world import (
    FORGETFUL,
    HERMES,
    LocalCode,
    ScriptedSource,
    lease,
    merged_tokenizer,
    run_group,
    run_spec,
    spelled,
    user,
)

from paceline.environment.protocols import FinishedGroup, TurnRequest
from paceline.environment.setting import EpisodeSetting

TALK = ("I add. ", "Let me see: 15 plus 92\n\n", "  ", "", "Résumé 漢字 ☃ ", "the tool_call is <next> ")


class Tools:
    """Adds, complains, and talks much."""

    def reset(self, seed: int, **columns: Any) -> str | None:
        self.dice = random.Random(seed)
        return self.dice.choice([None, " Use the tools.", "\n"])

    def add(self, a: int, b: int) -> str:
        """
        Add two numbers.

        Args:
            a: the first
            b: the second
        """
        if a == 0:
            raise ValueError("a is 0 <tool_call> user")
        return self.dice.choice([str(a + b), f"{a} + {b} = {a + b}\n", "", "☃ <|im_end|> x", "numbers and " * 40])


def call(dice: random.Random) -> str:
    """A call as a model may write it: with spaces that no template writes, or broken."""
    arguments = {"a": dice.randint(0, 20), "b": dice.randint(0, 99)}
    text = json.dumps(
        {"name": "add", "arguments": arguments},
        separators=dice.choice([(",", ":"), (", ", ": "), (" ,", ":  ")]),
    )
    match dice.randint(0, 9):
        case 0:
            text = text[:-1]
        case 1:
            text = text.replace("add", "subtract")
        case 2:
            text = "\n" + text + "\n"
    return f"<tool_call>{text}</tool_call>"


def random_turn(request: TurnRequest, number: int, tokenizer: Any) -> tuple[list[int], str]:
    dice = random.Random(request.seed)
    text = dice.choice(TALK)
    for _ in range(dice.choice([0, 1, 1, 1, 2]) if number < 5 else 0):
        text += call(dice)
    ids = spelled(text, tokenizer, dice)
    match dice.randint(0, 7):
        case 0 if ids:
            return ids, "length"
        case _:
            return [*ids, tokenizer.eos_token_id], "stop"


def check(rows: FinishedGroup, source: ScriptedSource) -> tuple[int, int]:
    """Compare a group with what the engine saw; return its turns and the turns that began a further row."""
    asked = {
        (int(r.conversation.partition("/")[2]), r.prompt_ids.tobytes(), t.token_ids.tobytes()): (r, t)
        for r, t in source.asked
    }
    for number, completion in enumerate(rows.completions):
        assert completion.prompt_ids is not None
        assert completion.sampled_T is not None
        tokens = np.concatenate([completion.prompt_ids, completion.token_ids])
        offset = len(completion.prompt_ids)
        steps_T = np.full(len(completion.token_ids), -1)
        for span in completion.spans:
            steps_T[span.start : span.end] = span.step
        sampled_T = np.zeros(len(completion.token_ids), bool)
        for turn in (turn for turn in rows.rows.turns if turn.row == number):
            prompt, sampled = tokens[: offset + turn.start], tokens[offset + turn.start : offset + turn.end]
            _, given = asked[rows.rows.samples[number], prompt.tobytes(), sampled.tobytes()]  # id by id
            assert np.array_equal(completion.logprobs[turn.start : turn.end], given.logprobs)
            assert set(steps_T[turn.start : turn.end]) == {given.spans[0].step}
            sampled_T[turn.start : turn.end] = True
        assert np.array_equal(sampled_T, completion.sampled_T)
        assert (steps_T >= 0).tolist() == sampled_T.tolist()
        assert not completion.logprobs[~sampled_T].any()
    sampled = sum(len(turn.token_ids) for _, turn in source.asked)
    assert sum(completion.num_sampled for completion in rows.completions) == sampled
    return len(rows.rows.turns), len(rows.completions) - rows.rows.num_samples


async def conversations(count: int, template: str) -> tuple[int, int]:
    """Run random conversations; return the number of turns, and of those that began a further row."""
    tokenizer = merged_tokenizer(template)
    spec = run_spec(environment={"max_turns": 6, "max_tool_tokens": 64})
    setting, code = EpisodeSetting.of(spec, tokenizer), LocalCode({"": Tools})
    turns = breaks = 0
    for seed in range(0, count, 8):
        source = ScriptedSource(lambda request, number: random_turn(request, number, tokenizer), tokenizer)
        leased = lease(user(f"{seed} numbers, please"), 8, seed=seed, group_id=seed, columns={"seed": seed})
        rows = await run_group(setting, source, code, leased)
        assert [text.ending in ("done", "truncated") for text in rows.samples] == [True] * 8
        own_turns, own_breaks = check(rows, source)
        turns, breaks = turns + own_turns, breaks + own_breaks
    assert code.num_open == 0
    assert setting.counts.bridge_breaks >= breaks
    return turns, breaks


async def test_conversations_are_one_row_each_where_the_template_extends_itself() -> None:
    turns, breaks = await conversations(240, HERMES)
    assert turns > 2 * 240
    assert breaks == 0


async def test_a_template_that_rewrites_its_history_begins_rows_of_exact_tokens() -> None:
    turns, breaks = await conversations(80, FORGETFUL)
    assert turns > 2 * 80
    assert breaks > 40


@pytest.mark.slow
async def test_ten_thousand_conversations() -> None:
    turns, breaks = await conversations(10_000, HERMES)
    assert turns > 20_000
    assert breaks == 0
