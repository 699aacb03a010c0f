"""Parses tool calls that models write as text.

| format | the model writes |
|---|---|
| `hermes` | `<tool_call>` … `</tool_call>` around `{"name": …, "arguments": {…}}` (Hermes, Qwen 2.5 and 3), or around `<function=…>` with a `<parameter=…>` for each argument (Qwen 3 Coder) |
| `json` | the whole text is `{"name": …, "parameters": {…}}`, several separated by `;` or a new line (Llama 3) |
| `none` | calls are not read |

A call is complete or malformed; nothing is guessed. JSON without a mark is a call only if it has arguments and names an
offered tool. Numbers outside JSON (NaN) and repeated arguments are malformed.

An argument of `<parameter=…>` is plain text: templates write strings unchanged, objects and lists as JSON, other values
as JSON or Python (`True`, `None`). It is converted to the type that the tool's schema declares.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from paceline.data.json_schemas import fits, parameters_of, property_of, types_of
from paceline.data.messages import STRICT_JSON, Json, read_json

CallFormat = Literal["hermes", "json", "none"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""Marks around a call of `hermes`."""

_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
JSON_MARKS = ("<|python_tag|>", "[TOOL_CALLS]")
"""Special tokens that some models write before JSON calls; not part of the JSON."""


class ToolCall(NamedTuple):
    name: str
    arguments: str
    """Arguments, as the text of a JSON object."""
    id: str = ""
    """Id of the call; empty if the enclosing answer assigns it."""


class MalformedCall(Exception):
    """Text that begins like a call and is not one; the message says why, for a person or a model."""

    is_open = False
    """True if the text ends within a value: a mark behind it may belong to the value."""


class NoCall(Exception):
    """Raised for a text that is not a call in JSON."""


def read_marked_call(body: str, tools: Sequence[Json] = ()) -> ToolCall:
    """Return the call between `hermes` marks; `tools` declare types of plain-text arguments. Raises MalformedCall."""
    body = body.strip()
    if body.startswith(_FUNCTION):
        return _read_function(body, tools)
    return _call_of(_read_json(body))


def read_json_calls(text: str, tools: Sequence[Json]) -> list[ToolCall]:
    """Return the calls in a text in the format `json`. The calls must be of `tools`, unless the text begins with a mark
    (JSON_MARKS). Raises NoCall, and MalformedCall for an unreadable text that names one of the tools."""
    text = text.strip()
    mark = next((mark for mark in JSON_MARKS if text.startswith(mark)), "")
    marked = bool(mark)
    names = {tool.get("function", tool).get("name") for tool in tools}
    rest, values = text.removeprefix(mark), list[Any]()
    try:
        while rest := rest.strip().lstrip(";").lstrip():
            value, end = STRICT_JSON.raw_decode(rest)
            values += value if isinstance(value, list) else [value]
            rest = rest[end:]
    except (ValueError, RecursionError) as error:
        named = re.search(r'"name"\s*:\s*"([^"]*)"', text)
        if named and (marked or named[1] in names):
            raise MalformedCall(f"the call is not valid JSON: {error}") from None
        raise NoCall from None
    if not values or not all(marked or _is_call_of(value, names) for value in values):
        raise NoCall
    return [_call_of(value) for value in values]


def _is_call_of(value: Any, names: set[Any]) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    return value["name"] in names and ("arguments" in value or "parameters" in value)


def may_be_json_call(text: str) -> bool:
    """Return whether a text could begin a call in the format `json`."""
    text = text.lstrip()
    return (
        not text
        or text.startswith(("{", "[{"))
        or text == "["
        or any(mark.startswith(text[: len(mark)]) for mark in JSON_MARKS)
    )


def _read_json(text: str) -> Any:
    try:
        return read_json(text)
    except ValueError as error:
        malformed = MalformedCall(f"the call is not valid JSON: {error}")
        malformed.is_open = str(error).startswith("Unterminated string")
        raise malformed from None


def _call_of(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise MalformedCall('the call must be an object with "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object as a string
        arguments = _read_json(arguments)
    if not isinstance(arguments, dict):
        raise MalformedCall(f'the "arguments" of {value["name"]!r} must be an object')
    return ToolCall(value["name"], _written(arguments))


def _read_function(body: str, tools: Sequence[Json]) -> ToolCall:
    name, closed, rest = body.removeprefix(_FUNCTION).partition(">")
    if not closed or not name.strip():
        raise MalformedCall("the call names no function")
    name = name.strip()
    schema = parameters_of(name, tools)
    arguments: Json = {}
    is_ended = rest.endswith(_END_FUNCTION)
    rest = rest.removesuffix(_END_FUNCTION).strip()
    while rest:
        begun = rest.removeprefix(_PARAMETER)
        key, _, text = begun.partition(">")
        ended = _END_OF_VALUE.search(text)
        if begun == rest or ended is None:
            malformed = MalformedCall(f"the call has text outside its parameters: {rest!r:.80}")
            malformed.is_open = begun != rest and not is_ended
            raise malformed
        key = key.strip()
        if key in arguments:
            raise MalformedCall(f"the call gives the parameter {key!r:.80} twice")
        arguments[key] = _value(text[: ended.start()], property_of(schema, schema, key), schema)
        rest = text[ended.end() :].strip()
    return ToolCall(name, _written(arguments))


_END_OF_VALUE = re.compile(rf"{_END_PARAMETER}(?=\s*(?:{_PARAMETER}|\Z))")
"""End of a parameter's value, which may contain the mark: another parameter or the function's end must follow."""


def _value(text: str, declared: Sequence[Any], root: Json) -> Any:
    if text.startswith("\n"):  # the template writes a value on separate lines
        text = text[1:].removesuffix("\n")
    types = types_of({"anyOf": list(declared)}, root) if declared else None
    if types == frozenset({"string"}):
        return text
    try:
        value = _written_value(text, types or frozenset())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text
    if types is not None and not fits(value, types):
        return text if "string" in types else value
    if isinstance(value, float) and types and "integer" in types and value.is_integer():
        return value if "number" in types else int(value)
    return value


def _written_value(text: str, types: frozenset[str]) -> Any:
    """Return the value of a JSON or Python literal. Raises as `ast.literal_eval`."""
    words = {"True": True, "False": False, "None": None}
    if text.strip() in words:
        return words[text.strip()]
    if "boolean" in types and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    try:
        return read_json(text)
    except ValueError:
        if not text.lstrip().startswith(("[", "{")):
            raise
        return read_json(json.dumps(ast.literal_eval(text.strip()), allow_nan=False))


def _written(arguments: Json) -> str:
    try:
        text = json.dumps(arguments, ensure_ascii=False)
        text.encode()
    except RecursionError:
        raise MalformedCall("the call is nested too deeply") from None
    except UnicodeEncodeError:
        raise MalformedCall("the call has half a surrogate pair, which is not valid text") from None
    return text
