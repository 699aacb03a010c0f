"""Messages keep all their fields, or are refused by name."""

from typing import Any

import pytest

from paceline.chat.messages import Message, Unsupported

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}


def rendered(message: Any) -> dict[str, Any]:
    read = Message.model_validate(message)
    return read.rendered()


def test_a_message_has_text_and_calls_have_objects() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert rendered({"role": "user", "content": parts}) == {"role": "user", "content": "ab"}
    called = rendered({"role": "assistant", "content": None, "tool_calls": [CALL]})
    assert called["content"] == ""
    assert called["tool_calls"][0]["function"]["arguments"] == {"x": 1}


def test_fields_that_say_nothing_are_left_out_and_reasoning_has_one_name() -> None:
    echoed = {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "annotations": [],
        "tool_calls": None,
        "audio": None,
    }
    assert rendered(echoed) == {"role": "assistant", "content": "a"}
    for fields in (
        {"reasoning": "r"},
        {"reasoning": "r", "reasoning_content": "r"},
        {"reasoning_content": "r"},
    ):
        reasoned = rendered({"role": "assistant", "content": None, **fields})
        assert reasoned == {"role": "assistant", "content": "", "reasoning_content": "r"}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": None}, "without content"),
        ({"role": "assistant"}, "without content or tool_calls"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "part of type 'image_url'"),
        ({"role": "user", "content": [{"type": "text"}]}, "part of type 'text'"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "only the assistant calls"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "another form than a function's"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "no name"),
        ({"role": "assistant", "tool_calls": [{**CALL, "id": 1}]}, "id is no text"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}, "no JSON"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]},
            "no JSON",
        ),
        ({"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b"}, "differ"),
    ],
)
def test_other_forms_are_refused(message: Any, words: str) -> None:
    with pytest.raises(Unsupported, match=words) as refused:
        rendered(message)
    assert refused.value.field == "messages"
