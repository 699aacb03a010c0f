"""Chat messages of a data set: text is read, also as parts; every other content is named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.data.messages import api_message, are_messages, fault_of_messages, plain, read_message, tools_of
from paceline.errors import DataError

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([USER], ""),
        ([{"role": "user", "content": ""}], ""),
        ([{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}], ""),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "image": None}]}], ""),
        ([USER, {"role": "user", "content": None}], "message 1 of the user without content or tool_calls"),
        ([{"role": 3, "content": "a"}], "message 0 with the role 3; a role is text"),
        ([{"role": "", "content": "a"}], "message 0 with the role ''"),
        ([{"role": "user", "content": 7}], "whose content is 7; content must be text"),
        ([{"role": "user", "content": []}], "whose content is an empty list"),
        ([{"role": "user", "content": ["a"]}], "the part 'a'; only text parts can be read"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "a part of type 'image'; only text"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "only text parts can be read"),
        ([{"from": "human", "value": "hi"}], "rename these keys to 'role' and 'content'"),
        ([], "must be text or chat messages, not []"),
        (["hi"], "objects with role and content"),
        ({"role": "user"}, "must be text or chat messages"),
    ],
)
def test_each_fault_of_messages_is_named(messages: Any, fault: str) -> None:
    found = fault_of_messages(messages)
    assert fault in found
    assert bool(found) == bool(fault)


def call(arguments: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}, **fields}


def calling(*calls: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


def called(arguments: Any, **fields: Any) -> dict[str, Any]:
    return {**calling(call(arguments, **fields)), "content": ""}


READ: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # huggingface/trl#3911 and oumi-ai/oumi#2599: the API has arguments as text
    (calling(call('{"city": "Rome"}', id="c")), called({"city": "Rome"}, id="c")),
    (calling(call({"city": "Rome"})), called({"city": "Rome"})),
    (calling(call('"{\\"city\\": \\"Rome\\"}"')), called({"city": "Rome"})),
    (calling(call("")), called({})),
    (calling(call(" ")), called({})),
    (calling(call(None)), called({})),
    (calling({"function": {"name": "f"}}), {**calling({"function": {"name": "f", "arguments": {}}}), "content": ""}),
    (calling(call("{}", id=None, index=None)), called({})),
    (calling({"name": "f", "arguments": {"a": 1}}), called({"a": 1})),
    (calling({"name": "f", "parameters": '{"a": 1}', "id": "c"}), called({"a": 1}, id="c")),
    (calling({**call(None), "name": None, "arguments": None}), called({})),
    (calling({"function": None, "id": None, "name": "f", "arguments": "{}"}), called({})),
    (calling(call('{"a": null, "b": [null]}')), called({"a": None, "b": [None]})),
    (calling(call('{"a": "\\u00e9\\ud83d\\ude00"}')), called({"a": "é\U0001f600"})),
    (calling(call({"b": 1, "a": 10**30})), called({"b": 1, "a": 10**30})),
    ({"role": "assistant", "tool_calls": [call("{}")]}, called({})),
    ({"role": "assistant", "content": [], "tool_calls": [call("{}")]}, called({})),
    ({"role": "assistant", "content": "x", "tool_calls": '[{"name": "f", "type": "function", "arguments": {"a": 1}}]'}, {**called({"a": 1}), "content": "x"}),
    ({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}, called({"a": 1})),
    ({"role": "user", "content": "x", "tool_calls": None, "tool_call_id": None, "name": None}, {"role": "user", "content": "x"}),
    ({"role": "user", "content": "x", "tool_calls": []}, {"role": "user", "content": "x"}),
    ({"role": "user", "content": "x", "name": "Ann", "weight": 0}, {"role": "user", "content": "x", "name": "Ann", "weight": 0}),
    ({"role": "tool", "content": "{}", "tool_call_id": "c", "name": "f"}, {"role": "tool", "content": "{}", "tool_call_id": "c", "name": "f"}),
    ({"role": "tool", "content": [{"type": "text", "text": "2"}]}, {"role": "tool", "content": "2"}),
    ({"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]}, {"role": "user", "content": "ab"}),
    ({"role": "assistant", "content": "x", "reasoning": "r"}, {"role": "assistant", "content": "x", "reasoning_content": "r"}),
    ({"role": "assistant", "content": "x", "thinking": "r"}, {"role": "assistant", "content": "x", "reasoning_content": "r"}),
    ({"role": "assistant", "content": None, "reasoning_content": "r"}, {"role": "assistant", "content": "", "reasoning_content": "r"}),
    ({"role": "assistant", "content": "", "reasoning": "r", "reasoning_content": "r"}, {"role": "assistant", "content": "", "reasoning_content": "r"}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "expected"), READ)
def test_every_form_of_a_message_is_read_into_one(message: dict[str, Any], expected: dict[str, Any]) -> None:
    assert fault_of_messages([message]) == ""
    assert are_messages([message])
    assert read_message(message) == expected
    assert read_message(expected) == expected, "what is read is read again as itself"


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (calling(call("{city: Rome}")), "whose arguments are no JSON (Expecting property name"),
        (calling(call("plain")), "whose arguments are no JSON"),
        (calling(call("[1]")), "whose arguments are no object: [1]"),
        (calling(call("3")), "whose arguments are no object: 3"),
        (calling(call([1])), "whose arguments are no object"),
        (calling(call('{"a": NaN}')), "NaN is not a JSON number"),
        (calling(call('{"a": -Infinity}')), "-Infinity is not a JSON number"),
        (calling(call('{"a": 1e999}')), "the number 1e999 is too large"),
        (calling(call('{"a": 1, "a": 2}')), "the key 'a' is given twice"),
        (calling(call("[" * 100_000)), "nested too deeply"),
        (calling(call("{}", id=7)), "whose id is no text"),
        (calling({"function": {"name": None}}), "whose function has no name"),
        (calling({"type": "custom", "custom": {}}), "another form than a function's"),
        (calling("f()"), "a tool call that is no object: 'f()'"),
        ({**calling(), "tool_calls": "f(1)"}, "with tool_calls that are no JSON"),
        ({**calling(), "tool_calls": {"name": "f"}}, "with tool_calls that are no list"),
        ({**USER, "tool_calls": [call("{}")]}, "with tool_calls of the user; only the assistant calls"),
        ({"role": "assistant", "content": None}, "without content or tool_calls"),
        ({"role": "tool", "content": {"result": 1}}, "write a result as JSON text"),
        ({"role": "assistant", "content": "x", "reasoning": "a", "thinking": "b"}, "reasoning and thinking differ"),
    ],
)  # fmt: skip
def test_a_message_that_could_mean_something_else_is_refused(message: dict[str, Any], fault: str) -> None:
    assert fault in fault_of_messages([USER, message])
    assert fault_of_messages([USER, message]).startswith("has a message 1 ")


def test_a_read_message_goes_back_to_the_form_of_the_api() -> None:
    sent = calling(call('{"a": "é", "b": null}', id="c"))
    assert api_message(read_message(sent)) == sent
    assert api_message(USER) == USER
    assert api_message(called({}))["tool_calls"][0] == {
        "type": "function",
        "function": {"name": "f", "arguments": "{}"},
    }


FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.mark.parametrize(
    ("column", "tools"),
    [
        (None, None),
        ([], None),
        ("[]", None),
        ("null", None),
        ([TOOL], [TOOL]),
        ([FUNCTION], [TOOL]),
        (json.dumps([TOOL]), [TOOL]),
        (json.dumps([FUNCTION]), [TOOL]),
        ([json.dumps(TOOL)], [TOOL]),
        ([{**TOOL, "function": {**FUNCTION, "strict": None}}], [TOOL]),
        (json.dumps([{"name": "f", "default": None}]), [{"type": "function", "function": {"name": "f", "default": None}}]),
    ],
)  # fmt: skip
def test_tools_have_the_form_of_the_api(column: Any, tools: Any) -> None:
    assert tools_of({"tools": column}) == tools


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("f", "must be a list of JSON schemas"),
        ([1], "must be a list of JSON schemas"),
        ("{}", "must be a list of JSON schemas"),
        ([TOOL, FUNCTION], "two functions with the name 'f'; rename one"),
        ([{"type": "function"}], "no function with a name"),
        ([{"type": "function", "function": {"name": ""}}], "no function with a name"),
        ([{**FUNCTION, "parameters": "x"}], "whose parameters are no JSON schema"),
        ('[{"name": "f", "name": "g"}]', "must be a list of JSON schemas"),
    ],
)
def test_tools_of_another_form_are_refused(column: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        tools_of({"tools": column})


def test_text_parts_become_one_text_and_everything_else_stays() -> None:
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]
    assert plain([{"role": "user", "content": parts}, USER]) == [{"role": "user", "content": "2+2?"}, USER]
    assert plain("text") == "text"


def test_the_form_of_messages_is_role_and_content() -> None:
    assert are_messages([{"role": 3, "content": None}])
    assert not are_messages([])
    assert not are_messages([{"role": "user"}])
