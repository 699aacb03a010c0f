"""Chat messages of a data set: text is read, also as parts; every other content is named."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.data.messages import are_messages, fault_of_messages, plain

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([USER], ""),
        ([{"role": "user", "content": ""}], ""),
        ([{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}], ""),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "image": None}]}], ""),
        ([USER, {"role": "user", "content": None}], "message 1 of the user whose content is null"),
        ([{"role": 3, "content": "a"}], "message 0 with the role 3; a role is text"),
        ([{"role": "", "content": "a"}], "message 0 with the role ''"),
        ([{"role": "user", "content": 7}], "whose content is 7; a content is text"),
        ([{"role": "user", "content": []}], "whose content is an empty list"),
        ([{"role": "user", "content": ["a"]}], "the part 'a'; only text parts can be read"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "a part of type 'image'; only text"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "only text parts can be read"),
        ([{"from": "human", "value": "hi"}], "rename these keys to 'role' and 'content'"),
        ([], "has to be text or chat messages, not []"),
        (["hi"], "objects with role and content"),
        ({"role": "user"}, "has to be text or chat messages"),
    ],
)
def test_each_fault_of_messages_is_named(messages: Any, fault: str) -> None:
    found = fault_of_messages(messages)
    assert fault in found
    assert bool(found) == bool(fault)


def test_text_parts_become_one_text_and_everything_else_stays() -> None:
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    assert plain([{"role": "user", "content": parts}, USER]) == [{"role": "user", "content": "2+2?"}, USER]
    assert plain("text") == "text"


def test_the_form_of_messages_is_role_and_content() -> None:
    assert are_messages([{"role": 3, "content": None}])
    assert not are_messages([])
    assert not are_messages([{"role": "user"}])
