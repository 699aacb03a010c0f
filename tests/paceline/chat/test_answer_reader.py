"""Parts of an answer do not depend on how its text was split, and no text is lost."""

import random
from typing import Any

import pytest

from paceline.chat.answer_reader import (
    AnswerReader,
    Malformed,
    TextPart,
    calls_of,
    content_of,
    joined,
    read_answer,
    reasoning_of,
)
from paceline.chat.call_formats import CLOSE, OPEN, ToolCall

CALL = f'{OPEN}\n{{"name": "add", "arguments": {{"x": 1}}}}\n{CLOSE}'
ADD = ToolCall("add", '{"x": 1}')
BROKEN = f"{OPEN}{{bad}}{CLOSE}"
CUT = f'{OPEN}\n{{"name": "add", "argum'
HERMES: Any = {"calls": "hermes"}
REASONS: Any = {"calls": "hermes", "reasons": True}
TOOLS: Any = [{"type": "function", "function": {"name": "add"}}]
JSON: Any = {"calls": "json", "tools": TOOLS}

CASES: list[tuple[str, dict[str, Any], tuple[str, str, tuple[ToolCall, ...]]]] = [
    ("  plain\n\n", {}, ("  plain\n\n", "", ())),
    ("  plain\n\n", REASONS, ("  plain\n\n", "", ())),
    (f"Adding.\n{CALL}\n{CALL}\n", HERMES, ("Adding.", "", (ADD, ADD))),
    (f"Adding.\n{CALL}", {}, (f"Adding.\n{CALL}", "", ())),
    (f"{CALL}\n{CALL}", {**HERMES, "max_calls": 1}, ("", "", (ADD,))),
    (CALL.removesuffix(CLOSE), HERMES, ("", "", (ADD,))),
    (f"a {CUT}", HERMES, (f"a {CUT}", "", ())),
    (f"Adding.\n\n{BROKEN}\n{CALL}", HERMES, (f"Adding.\n\n{BROKEN}", "", (ADD,))),
    (f"{CALL} {BROKEN}", HERMES, (BROKEN, "", (ADD,))),
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
    (' {"name": "add", "parameters": {"x": 1}}; {"name": "add", "arguments": {"x": 1}}', JSON, ("", "", (ADD, ADD))),
    ('[{"name": "add", "parameters": {"x": 1}}]', JSON, ("", "", (ADD,))),
    ('<|python_tag|>{"name": "add", "parameters": {"x": 1}}', JSON, ("", "", (ADD,))),
    (' {"answer": 1} ', JSON, (' {"answer": 1} ', "", ())),
    ('Say {"name": "add"}', JSON, ('Say {"name": "add"}', "", ())),
]  # fmt: skip


@pytest.mark.parametrize(("text", "settings", "expected"), CASES)
def test_an_answer_is_read_alike_however_it_comes(text: str, settings: Any, expected: Any) -> None:
    reader = AnswerReader(**settings)
    whole = read_answer(text, reader)
    assert (content_of(whole), reasoning_of(whole), tuple(calls_of(whole))) == expected
    malformed = reader.malformed
    numbers = random.Random(0)
    for _ in range(50):
        reader, parts, position = AnswerReader(**settings), [], 0
        while position < len(text):
            size = numbers.randint(1, 6)
            parts += reader.push(text[position : position + size])
            position += size
        parts += reader.finish()
        assert joined(parts) == whole
        assert reader.malformed == malformed


def malformed_of(text: str, calls: Any) -> list[Malformed]:
    reader = AnswerReader(calls, tools=TOOLS)
    read_answer(text, reader)
    return reader.malformed


def test_text_that_only_begins_like_a_call_is_malformed() -> None:
    (malformed,) = malformed_of(BROKEN, "hermes")
    assert malformed.text == BROKEN
    assert "not valid JSON" in malformed.fault
    assert malformed_of('{"name": "add", "parameters": [1]}', "json") == [
        Malformed('{"name": "add", "parameters": [1]}', "the \"arguments\" of 'add' must be an object")
    ]
    assert malformed_of('{"answer": 1}', "json") == []
    assert malformed_of('{"name": "Ada", "parameters": [1]}', "json") == []


def test_a_call_comes_as_soon_as_it_is_whole_and_content_as_soon_as_it_is_certain() -> None:
    reader = AnswerReader("hermes")
    assert reader.push("I add. <tool") == [TextPart("I add.")]
    assert reader.push(CALL[len("<tool") : -1]) == []
    assert reader.push(">") == [ADD]
    assert reader.push("\n") == []
    assert reader.finish() == []


ADDED = '{"name": "add", "parameters": {"x": 1}}'
NAMED = '{"name": "Ada Lovelace", "born": 1815}'

UNMARKED: list[tuple[str, bool]] = [
    # raullenchai/Rapid-MLX#703, ggml-org/llama.cpp#18183, #16710, sglang#35562, ollama#17616
    (NAMED, False),
    ('{"name": "Ada", "arguments": {"x": 1}}', False),
    ('{"name": "add"}', False),
    ('{"name": "add", "result": 3}', False),
    ('{"name": "ADD", "parameters": {"x": 1}}', False),
    ('{"name": ["add"], "parameters": {}}', False),
    ('{"function": "add", "parameters": {}}', False),
    ('{"parameters": {"x": 1}}', False),
    (f"[{ADDED}, {NAMED}]", False),
    (f"{ADDED}; {NAMED}", False),
    (f"{ADDED} is how I would call it", False),
    (f"Call {ADDED}", False),
    (f"```json\n{ADDED}\n```", False),
    ('{"name": "add", "parameters": [1]}', False),
    ('{"name": "add", "parameters": null}', False),
    ('{"name": "add", "parameters": "x"}', False),
    ('{"name": "add", "parameters": {"x": NaN}}', False),
    ('{"name": "add", "parameters": {"x": 1, "x": 2}}', False),
    ('{"name": "add", "parameters": {"x": 1}', False),
    ("{}", False),
    ("[]", False),
    ("[1, 2]", False),
    ('{"a": 1} is a dict', False),
    ("{not json", False),
    ('"add"', False),
    ("[[" + ADDED + "]]", False),
    (ADDED, True),
    (f" \n{ADDED}\n ", True),
    (f"[{ADDED}]", True),
    (f"{ADDED}{ADDED}", True),
    ('{"name": "add", "arguments": "{\\"x\\": 1}"}', True),
    ('{"type": "function", "name": "add", "parameters": {"x": 1}}', True),
    ('<|python_tag|>{"name": "add", "parameters": {"x": 1}}', True),
]


@pytest.mark.parametrize(("text", "is_call"), UNMARKED)
def test_json_without_a_mark_is_a_call_of_an_offered_tool_with_arguments(text: str, is_call: bool) -> None:
    for tools in (TOOLS, []):
        parts = read_answer(text, AnswerReader("json", tools=tools))
        if is_call and (tools or text.startswith("<|")):
            assert set(calls_of(parts)) == {ADD}
            assert content_of(parts) == ""
        else:
            assert calls_of(parts) == []
            assert content_of(parts) == text
        reader = AnswerReader("json", tools=tools)
        letters = [part for letter in text for part in reader.push(letter)]
        assert joined([*letters, *reader.finish()]) == parts


OPEN_VALUE = f'{OPEN}{{"name": "add", "arguments": {{"x": "{CLOSE} and {OPEN}"}}}}{CLOSE}'
OPEN_TEXT = f"{OPEN}\n<function=add>\n<parameter=x>\n{CLOSE}\n</parameter>\n</function>\n{CLOSE}"
ENDLESS = f'{OPEN}{{"name": "add", "arguments": {{"x": "1{CLOSE}'
UNENDED = f"{OPEN}\n<function=add>\n<parameter=x>\n1\n</function>\n{CLOSE}"
MARKED: list[tuple[str, str, list[str]]] = [
    (OPEN_VALUE, "", [f'{{"x": "{CLOSE} and {OPEN}"}}']),
    (f"{OPEN_VALUE}\n{CALL}", "", [f'{{"x": "{CLOSE} and {OPEN}"}}', '{"x": 1}']),
    (OPEN_TEXT, "", [f'{{"x": "{CLOSE}"}}']),
    (OPEN_TEXT.removesuffix(CLOSE), "", [f'{{"x": "{CLOSE}"}}']),
    (f"{OPEN_TEXT}{CALL}", "", [f'{{"x": "{CLOSE}"}}', '{"x": 1}']),
    (ENDLESS, ENDLESS, []),
    (f"{ENDLESS} then {CLOSE}", f"{ENDLESS} then {CLOSE}", []),
    (f"{ENDLESS}\n{CALL}", ENDLESS, ['{"x": 1}']),
    (f"{ENDLESS}{ENDLESS}{CALL}", ENDLESS + ENDLESS, ['{"x": 1}']),
    (f"{UNENDED}\n{CALL}", UNENDED, ['{"x": 1}']),
    (f"{UNENDED}\n{OPEN_TEXT}", UNENDED, [f'{{"x": "{CLOSE}"}}']),
    (f"{BROKEN}{CALL}", BROKEN, ['{"x": 1}']),
    (f'{OPEN}{{"name": "unknown", "arguments": {{}}}}{CLOSE}', "", ["{}"]),
    (f"{OPEN}<function=add><parameter=x>1</parameter><parameter=x>2</parameter></function>{CLOSE}",) * 2 + ([],),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "arguments"), MARKED)
def test_a_mark_within_a_value_does_not_end_the_call(text: str, content: str, arguments: list[str]) -> None:
    parts = read_answer(text, AnswerReader("hermes", tools=TOOLS))
    assert [call.arguments for call in calls_of(parts)] == arguments
    assert content_of(parts) == content
    for size in (1, 3, 7):
        reader = AnswerReader("hermes", tools=TOOLS)
        pieces = [part for i in range(0, len(text), size) for part in reader.push(text[i : i + size])]
        assert joined([*pieces, *reader.finish()]) == parts
