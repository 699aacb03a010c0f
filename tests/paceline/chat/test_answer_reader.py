"""Parts of an answer do not depend on how its text was split, and nothing of it is lost."""

import random
from typing import Any

import pytest

from paceline.chat.answer_reader import (
    AnswerReader,
    Malformed,
    TextPart,
    joined,
    read_answer,
)
from paceline.chat.call_formats import CLOSE, OPEN, ToolCall

CALL = f'{OPEN}\n{{"name": "add", "arguments": {{"x": 1}}}}\n{CLOSE}'
ADD = ToolCall("add", '{"x": 1}')
BROKEN = f"{OPEN}{{bad}}{CLOSE}"
CUT = f'{OPEN}\n{{"name": "add", "argum'
HERMES: Any = {"calls": "hermes"}
REASONS: Any = {"calls": "hermes", "reasons": True}

CASES: list[tuple[str, dict[str, Any], tuple[str, str, tuple[ToolCall, ...]]]] = [
    ("  plain\n\n", {}, ("  plain\n\n", "", ())),
    ("  plain\n\n", REASONS, ("  plain\n\n", "", ())),
    (f"Adding.\n{CALL}\n{CALL}\n", HERMES, ("Adding.", "", (ADD, ADD))),
    (f"Adding.\n{CALL}", {}, (f"Adding.\n{CALL}", "", ())),
    (f"{CALL}\n{CALL}", {**HERMES, "max_calls": 1}, ("", "", (ADD,))),
    (CALL.removesuffix(CLOSE), HERMES, ("", "", (ADD,))),
    (f"a {CUT}", HERMES, (f"a{CUT}", "", ())),
    (f"{BROKEN} then", HERMES, (f"{BROKEN} then", "", ())),
    ("1 <tool_cal", HERMES, ("1 <tool_cal", "", ())),
    (f"<think>\na\n\nb\n</think>\n\n{CALL}", REASONS, ("", "a\n\nb", (ADD,))),
    ("<think>\n\n</think>\n\nyes", REASONS, ("yes", "", ())),
    ("<think>\nnever ended\n", REASONS, ("", "never ended", ())),
    ("<think>a</think>b", HERMES, ("<think>a</think>b", "", ())),
    ("a\n</think>\nb</think>", {**REASONS, "in_reasoning": True}, ("b</think>", "a", ())),
    (f"a {CALL}", {**REASONS, "in_reasoning": True}, ("", f"a {CALL}", ())),
    ("<thinker>", REASONS, ("<thinker>", "", ())),
    ("", REASONS, ("", "", ())),
    (' {"name": "add", "parameters": {"x": 1}}; {"name": "add", "arguments": {"x": 1}}', {"calls": "json"}, ("", "", (ADD, ADD))),
    ('[{"name": "add", "parameters": {"x": 1}}]', {"calls": "json"}, ("", "", (ADD,))),
    ('<|python_tag|>{"name": "add", "parameters": {"x": 1}}', {"calls": "json"}, ("", "", (ADD,))),
    (' {"answer": 1} ', {"calls": "json"}, (' {"answer": 1} ', "", ())),
    ('Say {"name": "add"}', {"calls": "json"}, ('Say {"name": "add"}', "", ())),
]  # fmt: skip


@pytest.mark.parametrize(("text", "settings", "expected"), CASES)
def test_an_answer_is_read_alike_however_it_comes(text: str, settings: Any, expected: Any) -> None:
    whole = read_answer(text, AnswerReader(**settings))
    assert (whole.content, whole.reasoning, tuple(whole.calls)) == expected
    numbers = random.Random(0)
    for _ in range(50):
        reader, parts, position = AnswerReader(**settings), [], 0
        while position < len(text):
            size = numbers.randint(1, 6)
            parts += reader.push(text[position : position + size])
            position += size
        parts += reader.finish()
        assert (tuple(joined(parts)), tuple(reader.malformed)) == (whole.parts, whole.malformed)


def malformed_of(text: str, calls: Any) -> list[Malformed]:
    return list(read_answer(text, AnswerReader(calls)).malformed)


def test_what_begins_like_a_call_and_is_none_is_named() -> None:
    (malformed,) = malformed_of(BROKEN, "hermes")
    assert malformed.text == BROKEN
    assert "no JSON" in malformed.fault
    assert malformed_of('{"name": "add", "parameters": [1]}', "json") == [
        Malformed('{"name": "add", "parameters": [1]}', "the \"arguments\" of 'add' have to be an object")
    ]
    assert malformed_of('{"answer": 1}', "json") == []


def test_a_call_comes_as_soon_as_it_is_whole_and_content_as_soon_as_it_is_certain() -> None:
    reader = AnswerReader("hermes")
    assert reader.push("I add. <tool") == [TextPart("I add.")]
    assert reader.push(CALL[len("<tool") : -1]) == []
    assert reader.push(">") == [ADD]
    assert reader.push("\n") == []
    assert reader.finish() == []
