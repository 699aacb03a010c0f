"""Rows of traces: every form, and the sentence about a row that cannot be used."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.data.traces import TraceKeys, format_of, read_trace
from paceline.errors import DataError

KEYS = TraceKeys()
TOKENS = {"prompt_ids": [1, 2], "token_ids": [3], "logprobs": [-0.5]}


def text(prompt: Any, completion: str, reward: float | None) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, "final_reward": reward}


def test_the_completion_of_a_chat_is_the_assistants_message() -> None:
    chat = [{"role": "user", "content": "2+2?"}]
    trace = read_trace(text(chat, "4", 1.0), KEYS)
    assert trace == (chat, [{"role": "assistant", "content": "4"}], 1.0, None, None, None)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"final_reward": "good"}, "column 'final_reward' must be a finite number, not 'good'"),
        ({"final_reward": float("inf")}, "not inf"),
        ({"prompt": ""}, "column 'prompt' is empty"),
        ({"completion": None}, "column 'completion' is null"),
        ({**TOKENS, "logprobs": [-0.5, -0.5]}, "1 tokens, 'logprobs' has 2 values"),
        ({**TOKENS, "logprobs": [0.5]}, "no log-probability"),
        ({**TOKENS, "logprobs": "[-0.5]"}, "lists of numbers"),
        ({**TOKENS, "messages": "[]"}, "run without an environment"),
    ],
)
def test_a_row_that_is_no_trace_is_refused_by_its_column(change: dict[str, Any], named: str) -> None:
    with pytest.raises(DataError, match=named.replace("[", r"\[")):
        read_trace({**text("a", "b", 1.0), **change}, KEYS)


def test_a_row_without_a_reward_column_is_told_the_key() -> None:
    with pytest.raises(DataError, match=r"offline_grpo\.reward_keys"):
        read_trace({"prompt": "a", "completion": "b"}, KEYS)


def test_verifiers_results_have_a_reward() -> None:
    chat = [{"role": "user", "content": "2+2?"}]
    row = {
        "example_id": 3,
        "prompt": chat,
        "completion": [{"role": "assistant", "content": "4"}],
        "reward": 1,
    }
    assert read_trace(row, KEYS) == (chat, row["completion"], 1.0, None, None, None)
    assert format_of(row) == "verifiers"


def test_messages_of_others_in_a_completion_are_refused() -> None:
    turns = [{"role": "assistant", "content": "?"}, {"role": "tool", "content": "!"}]
    with pytest.raises(DataError, match=r"'completion' has a message 1 of the tool, which the model did not write"):
        read_trace({"prompt": "a", "completion": turns, "final_reward": 1.0}, KEYS)
