"""Calls are read whole, or they are malformed with a reason."""

import json
from typing import Any

import pytest

from paceline.chat.call_formats import MalformedCall, ToolCall, read_json_calls, read_marked_call

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}},
        },
    }
]


def test_json_between_marks_is_a_call() -> None:
    assert read_marked_call(' {"name": "f", "arguments": {"s": "é"}} ') == ToolCall("f", '{"s": "é"}')
    assert read_marked_call('{"name": "f", "arguments": "{\\"n\\": 1}"}') == ToolCall("f", '{"n": 1}')
    assert read_marked_call('{"name": "f"}') == ToolCall("f", "{}")


def test_plain_arguments_have_the_declared_types() -> None:
    body = "<function=f>\n<parameter=n>\n3\n</parameter>\n<parameter=s>\n4\n</parameter>\n</function>"
    assert json.loads(read_marked_call(body, TOOLS).arguments) == {"n": 3, "s": "4"}
    assert json.loads(read_marked_call(body).arguments) == {"n": 3, "s": 4}
    several = "<function=g><parameter=text>\na\n\nb\n</parameter></function>"
    assert json.loads(read_marked_call(several, TOOLS).arguments) == {"text": "a\n\nb"}
    assert read_marked_call("<function=f>\n</function>\n") == ToolCall("f", "{}")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ('{"name": "f", "arguments": {"n": NaN}}', "NaN is no number of JSON"),
        ('{"name": "f", "arguments": {"n": ' + "9" * 5000 + "}}", "no JSON"),
        ('{"name": "f", "arguments": [1]}', "have to be an object"),
        ('{"name": "f", "arguments": "x"}', "no JSON"),
        ('{"name": "f", "arguments": {"s": "\\ud800"}}', "half a surrogate pair"),
        ('{"name": 1}', '"name" and "arguments"'),
        ('{"name": ""}', '"name" and "arguments"'),
        ("[]", '"name" and "arguments"'),
        ("<function=f>x</function>", "belongs to no parameter"),
        ("<function=f><parameter=n>1</function>", "belongs to no parameter"),
        ("<function=f></function>x", "belongs to no parameter"),
        ("<function=", "names no function"),
    ],
)
def test_everything_else_is_malformed_with_a_reason(body: str, words: str) -> None:
    with pytest.raises(MalformedCall, match=words):
        read_marked_call(body)


def test_several_calls_may_be_a_whole_text() -> None:
    one, two = '{"name": "f", "parameters": {"n": 1}}', '{"name": "g"}'
    expected = [ToolCall("f", '{"n": 1}'), ToolCall("g", "{}")]
    for text in (f"{one}; {two}", f"{one}\n{two};", f"[{one}, {two}]", f"<|python_tag|>{one};{two}"):
        assert read_json_calls(text) == expected
    for text in ("", ";", "print(1)", f"{one} and", "[]"):
        with pytest.raises(MalformedCall):
            read_json_calls(text)
