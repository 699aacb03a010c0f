"""Which earlier request a new one goes on from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.environment.agent_conversation import AnsweredRequest, History, read_messages
from paceline.environment.protocols import SampledTurn
from paceline.environment.rendering.protocol import Conversation
from paceline.errors import InvalidInput
from paceline.groups import VersionSpan

QUESTION = {"role": "user", "content": "one"}
MORE = {"role": "user", "content": "two"}


def answer(text: str = "yes", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}


def asked(sent: list[Any], said: dict[str, Any], token: int = 5, tools: list[Any] | None = None) -> AnsweredRequest:
    turn = SampledTurn(np.array([token], np.int32), np.zeros(1, np.float32), (VersionSpan(1, 0, 0, 1),), "stop", "")
    return AnsweredRequest(Conversation(sent, tools or []), np.array([1], np.int32), turn, said, sent, trains=True)


def parent(history: History, sent: list[Any], tools: list[Any] | None = None) -> tuple[AnsweredRequest, int] | None:
    return history.parent(sent, Conversation(sent, tools or []))


def test_the_longest_conversation_that_a_request_goes_on_from_is_its_parent() -> None:
    history = History()
    first = asked([QUESTION], answer())
    second = asked([QUESTION, answer(), MORE], answer("no"), 6)
    history.add(first)
    history.add(second)
    assert parent(history, [QUESTION, answer(), MORE]) == (first, 2)
    assert parent(history, [QUESTION, answer(), MORE, answer("no"), MORE]) == (second, 4)
    assert parent(history, [QUESTION, answer("maybe"), MORE]) is None
    assert parent(history, [MORE, answer(), MORE]) is None
    assert parent(history, [QUESTION]) is None
    assert parent(history, [QUESTION, answer(), MORE], [{"type": "function"}]) is None  # other tools, another prompt


@pytest.mark.parametrize(
    "written",
    [
        answer("", tool_calls=[call('{"b": 2, "a": 1}')]),
        {"role": "assistant", "content": None, "tool_calls": [call('{"a":1,"b":2}')]},
        {"role": "assistant", "tool_calls": [call({"a": 1, "b": 2})], "refusal": None},
        answer("", tool_calls=[call('{"a":1,"b":2}')], reasoning_content="hm"),
        {
            "role": "assistant",
            "content": [{"type": "text", "text": ""}],
            "tool_calls": [call('{"a":1,"b":2}')],
        },
    ],
)
def test_an_answer_is_known_in_every_way_that_clients_write_it(written: dict[str, Any]) -> None:
    history = History()
    first = asked([QUESTION], answer("", tool_calls=[call({"a": 1, "b": 2})], reasoning_content="let me see"))
    history.add(first)
    result = {"role": "tool", "tool_call_id": "c1", "content": "3"}
    assert parent(history, [QUESTION, written, result]) == (first, 2)


def test_several_parents_of_other_tokens_are_none() -> None:
    history = History()
    first = asked([QUESTION], answer())
    history.add(first)
    history.add(asked([QUESTION], answer()))
    assert parent(history, [QUESTION, answer(), MORE]) == (first, 2)  # the same tokens: rows decide
    history.add(asked([QUESTION], answer(), 6))
    assert parent(history, [QUESTION, answer(), MORE]) is None


def test_messages_that_are_none_are_refused() -> None:
    assert read_messages([QUESTION]) == [QUESTION]
    with pytest.raises(InvalidInput, match="an invalid message"):
        read_messages([{"content": "without a role"}])
    with pytest.raises(InvalidInput):
        read_messages([{"role": "user", "content": None}])
