"""Calls are read completely, or are malformed with a reason."""

import json
from typing import Any

import chat_templates
import pytest

from paceline.chat.answer_reader import AnswerReader, calls_of, read_answer
from paceline.chat.call_formats import MalformedCall, NoCall, ToolCall, read_json_calls, read_marked_call
from paceline.chat.rendering import Probe
from paceline.data.messages import read_message
from paceline.data.tokens import NO_KWARGS

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
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"name": "f", "arguments": {"n": NaN}}', "NaN is not a JSON number"),
        ('{"name": "f", "arguments": {"n": ' + "9" * 5000 + "}}", "not valid JSON"),
        ('{"name": "f", "arguments": [1]}', "must be an object"),
        ('{"name": "f", "arguments": "x"}', "not valid JSON"),
        ('{"name": "f", "arguments": {"s": "\\ud800"}}', "half a surrogate pair"),
        ('{"name": 1}', '"name" and "arguments"'),
        ('{"name": ""}', '"name" and "arguments"'),
        ("[]", '"name" and "arguments"'),
        ("<function=f>x</function>", "text outside its parameters"),
        ("<function=f><parameter=n>1</function>", "text outside its parameters"),
        ("<function=f></function>x", "text outside its parameters"),
        ("<function=", "names no function"),
    ],
)
def test_everything_else_is_malformed_with_a_reason(body: str, words: str) -> None:
    with pytest.raises(MalformedCall, match=words):
        read_marked_call(body)


NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
REFERENCE = {"$ref": "#/$defs/Deep"}
DEFS = {
    "Deep": {"allOf": [{"$ref": "#/definitions/flag"}, {"description": "d"}]},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "boolean"}]},
}

TEXTS: list[tuple[Any, str, Any]] = [
    # PrimeIntellect-ai/renderers#47, vllm#36032, #37831, sglang#27640, #30832, ollama#12621, dynamo#7847
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "False", False),
    ({"type": "boolean"}, "true", True),
    ({"type": "boolean"}, "TRUE", True),
    ({"type": "boolean"}, "maybe", "maybe"),
    ({"type": ["boolean", "null"]}, "False", False),
    ({"type": ["boolean", "null"]}, "None", None),
    ({"type": "null"}, "None", None),
    ({"type": "string"}, "None", "None"),
    ({"type": "string"}, "True", "True"),
    ({"type": "string"}, "5", "5"),
    ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
    ({"type": "string"}, "", ""),
    ({"type": "string"}, "  two\n  lines ", "  two\n  lines "),
    ({"type": "string"}, "\n\nx\n", "\n\nx\n"),
    ({"type": "string"}, "a</parameter>b", "a</parameter>b"),
    ({"type": "string"}, "<parameter=x>1", "<parameter=x>1"),
    ({"type": "string"}, "</function>", "</function>"),
    ({"type": "string"}, "1 &lt; 2 & <b>", "1 &lt; 2 & <b>"),
    ({"type": ["string", "null"]}, "None", None),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "12", "12"),
    (NULLABLE, "None", None),
    (NULLABLE, "true", "true"),
    ({"type": "string", "nullable": True}, "None", None),
    ({"type": ["string", "integer"]}, "12", 12),
    ({"type": ["string", "integer"]}, "1.5", "1.5"),
    ({"type": "integer"}, "5.0", 5),
    ({"type": "integer"}, "-3", -3),
    ({"type": "integer"}, "123456789012345678901234567890", 123456789012345678901234567890),
    ({"type": "integer"}, "None", None),
    ({"type": "number"}, "5", 5),
    ({"type": "number"}, "1e-07", 1e-7),
    ({"type": "number"}, "nan", "nan"),
    ({"type": "number"}, "1e999", "1e999"),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
    ({"oneOf": [{"type": "boolean"}, {"type": "string"}]}, "True", True),
    ({"oneOf": [{"type": "boolean"}, {"type": "string"}]}, "0", "0"),
    ({"anyOf": [{"type": "object", "properties": {}}, {"type": "object"}]}, '{"city": "Paris"}', {"city": "Paris"}),
    ({"allOf": [{"type": "boolean"}, {"description": "d"}]}, "False", False),
    (REFERENCE, "True", True),
    ({"$ref": "#/$defs/Loop"}, "True", True),
    ({"$ref": "https://example.com/schema"}, "True", True),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({"enum": ["None", "all"]}, "None", "None"),
    ({"enum": ["a", None]}, "None", None),
    ({"const": "true"}, "true", "true"),
    ({"type": "array"}, "['a', True, None]", ["a", True, None]),
    ({"type": "array"}, '["a", true]', ["a", True]),
    ({"items": {"type": "string"}}, "['1']", ["1"]),
    ({"type": "object"}, "{'a': {'b': 1.5}}", {"a": {"b": 1.5}}),
    ({"properties": {"a": {}}}, '{"a": "it\'s"}', {"a": "it's"}),
    ({"type": "object"}, "{'a'}", "{'a'}"),
    ({"type": "bool"}, "True", True),
    ({"type": "str"}, "1", "1"),
    ({"type": "no type of JSON"}, "1", 1),
    ({}, "True", True),
    ({}, "1", 1),
    ({}, "plain", "plain"),
    (True, "None", None),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text", "value"), TEXTS)
def test_plain_arguments_have_a_type_that_their_schema_allows(schema: Any, text: str, value: Any) -> None:
    parameters = {"properties": {"x": schema}, "$defs": DEFS, "definitions": {"flag": {"type": "boolean"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    body = f"<function=f>\n<parameter=x>\n{text}\n</parameter>\n<parameter=y>\n1\n</parameter>\n</function>"
    read = json.loads(read_marked_call(body, tools).arguments)
    assert read == {"x": value, "y": 1}
    assert type(read["x"]) is type(value)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("DIRECT_OK\n", "DIRECT_OK\n"),  # waybarrios/vllm-mlx#808
        ("\nDIRECT_OK\n\n", "DIRECT_OK\n"),
        ("\n    if x:\n        return 1\n\n", "    if x:\n        return 1\n"),  # vllm-project/vllm#48846
        ("\nx", "x"),
        (" x ", " x "),
        ("\n\n", ""),
        ("\n", ""),
        ("", ""),
    ],
)
def test_white_space_of_a_text_is_its_own(written: str, value: str) -> None:
    body = f"<function=f>\n<parameter=s>{written}</parameter>\n</function>"
    assert json.loads(read_marked_call(body, TOOLS).arguments) == {"s": value}


SENT: list[tuple[Any, Any]] = [
    ({"type": "boolean"}, True),
    ({"type": "boolean"}, False),
    ({"type": "integer"}, 0),
    ({"type": "integer"}, -(10**30)),
    ({"type": "number"}, 0.1),
    ({"type": "number"}, 1e22),
    ({"type": "number"}, 1e-9),
    ({"type": "number"}, 3),
    ({"type": "null"}, None),
    (NULLABLE, None),
    (NULLABLE, "text"),
    (NULLABLE, "17"),
    ({"type": ["integer", "null"]}, None),
    (REFERENCE, True),
    ({"type": "string"}, "True"),
    ({"type": "string"}, "None"),
    ({"type": "string"}, "00100"),
    ({"type": "string"}, ""),
    ({"type": "string"}, "\n a\n\tb \n"),
    ({"type": "string"}, "Zürich € 東京 \U0001f600"),
    ({"type": "string"}, "\"quoted\" \\ and 'single'"),
    ({"type": "string"}, "<a href='x'>1 < 2 && 3</a>"),
    ({"type": "string"}, "a </parameter> b </function> c"),
    ({"type": "string"}, "in <tool_call> marks </tool_call> too"),
    ({"type": "string"}, '{"json": [1, "text"]}'),
    ({"type": "array"}, [1, "2", None, True, [0.5], {"k": []}]),
    ({"type": "array"}, []),
    ({"type": "object"}, {"a": {"b": [True, None, "x"]}, "ä": "ö"}),
    ({"type": "object"}, {"mark": "</tool_call>"}),
    ({"type": "object"}, {}),
    ({"enum": ["low", "high"]}, "high"),
    ({"enum": ["1", "2"]}, "2"),
    ({"enum": [1, 2]}, 2),
]


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize(
    "template",
    [
        chat_templates.HERMES,
        chat_templates.FUNCTIONS,
        chat_templates.PYTHON_VALUES,
        chat_templates.JSON_CALLS,
    ],
    ids=["hermes", "functions", "python", "json"],
)
def test_a_call_of_the_history_comes_back_as_it_was(template: str, as_text: bool) -> None:
    tokenizer = chat_templates.character_tokenizer(template)
    for schema, value in SENT:
        for arguments in ({"x": value}, {"a": 1, "x": value, "b": "two"}):
            properties = {"a": {"type": "integer"}, "x": schema, "b": {"type": "string"}}
            parameters = {
                "properties": properties,
                "$defs": DEFS,
                "definitions": {"flag": {"type": "boolean"}},
            }
            tools: Any = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
            function = {"name": "f", "arguments": json.dumps(arguments) if as_text else arguments}
            sent = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]}
            text = Probe(tokenizer, template, tools, NO_KWARGS).answer(read_message(sent))
            calls = "json" if template == chat_templates.JSON_CALLS else "hermes"
            (call,) = calls_of(read_answer(text, AnswerReader(calls, tools=tools)))
            assert call.name == "f"
            assert json.loads(call.arguments) == arguments, text
            assert str(json.loads(call.arguments)) == str(arguments), "1 is not True"


OFFERED: Any = [{"type": "function", "function": {"name": name}} for name in "fg"]


def test_several_calls_may_be_a_whole_text() -> None:
    one, two = '{"name": "f", "parameters": {"n": 1}}', '{"name": "g", "arguments": "{}"}'
    expected = [ToolCall("f", '{"n": 1}'), ToolCall("g", "{}")]
    for text in (f"{one}; {two}", f"{one}\n{two};", f"[{one}, {two}]", f"<|python_tag|>{one};{two}"):
        assert read_json_calls(text, OFFERED) == expected
    for text in ("", ";", "print(1)", "[]"):
        with pytest.raises(NoCall):
            read_json_calls(text, OFFERED)
    with pytest.raises(MalformedCall, match="not valid JSON"):
        read_json_calls(f"{one} and", OFFERED)
    assert read_json_calls('<|python_tag|>{"name": "h"}', OFFERED) == [ToolCall("h", "{}")]
