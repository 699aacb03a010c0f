"""How models write tool calls as text, and how such a text is read.

| format | the model writes |
|---|---|
| `hermes` | `<tool_call>` … `</tool_call>` around `{"name": …, "arguments": {…}}` (Hermes, Qwen 2.5 and 3), or around `<function=…>` with a `<parameter=…>` for each argument (Qwen 3 Coder) |
| `json` | the whole text is `{"name": …, "parameters": {…}}`, several separated by `;` or a new line (Llama 3) |
| `none` | calls are not read |

A call is read whole or it is malformed; nothing is guessed. Numbers that JSON does not have (NaN) are malformed too,
because the answer could not be written as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

from paceline.chat.messages import Json

CallFormat = Literal["hermes", "json", "none"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""Marks around a call of `hermes`."""

_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_PYTHON_TAG = "<|python_tag|>"


class ToolCall(NamedTuple):
    """A call that the model made."""

    name: str
    arguments: str
    """JSON object as text."""
    id: str = ""
    """Empty where the answer that the call is part of names it."""


class MalformedCall(Exception):
    """A text that begins like a call and is none; the message says why, for a person or a model."""


def read_marked_call(body: str, tools: Sequence[Json] = ()) -> ToolCall:
    """Return the call between the marks of `hermes`. `tools` give the types of arguments that are written as plain text.
    Raises MalformedCall."""
    body = body.strip()
    if body.startswith(_FUNCTION):
        return _read_function(body, tools)
    return _call_of(_read_json(body))


def read_json_calls(text: str) -> list[ToolCall]:
    """Return the calls of a text in the format `json`. Raises MalformedCall."""
    text = text.strip().removeprefix(_PYTHON_TAG)
    values: list[Any] = []
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    try:
        while text := text.strip().lstrip(";").lstrip():
            value, end = decoder.raw_decode(text)
            values += value if isinstance(value, list) else [value]
            text = text[end:]
    except (ValueError, RecursionError) as error:
        raise MalformedCall(f"the call is no JSON: {error}") from None
    if not values:
        raise MalformedCall("the call is empty")
    return [_call_of(value) for value in values]


def may_be_json_call(text: str) -> bool:
    """Return whether a text could begin a call in the format `json`."""
    text = text.lstrip()
    return (
        not text
        or text.startswith(("{", "[{"))
        or text == "["
        or _PYTHON_TAG.startswith(text[: len(_PYTHON_TAG)])
    )


def _read_json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedCall(f"the call is no JSON: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _call_of(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise MalformedCall('the call has to be an object with "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object as a text
        arguments = _read_json(arguments)
    if not isinstance(arguments, dict):
        raise MalformedCall(f'the "arguments" of {value["name"]!r} have to be an object')
    return ToolCall(value["name"], _written(arguments))


def _read_function(body: str, tools: Sequence[Json]) -> ToolCall:
    name, closed, rest = body.removeprefix(_FUNCTION).partition(">")
    if not closed or not name.strip():
        raise MalformedCall("the call names no function")
    name = name.strip()
    types = _types(name, tools)
    arguments: Json = {}
    rest = rest.removesuffix(_END_FUNCTION).strip()
    while rest:
        begun = rest.removeprefix(_PARAMETER)
        key, _, text = begun.partition(">")
        value, ended, after = text.partition(_END_PARAMETER)
        if begun == rest or not ended:
            raise MalformedCall(f"the call has text that belongs to no parameter: {rest!r:.80}")
        arguments[key.strip()] = _value(value, types.get(key.strip()))
        rest = after.strip()
    return ToolCall(name, _written(arguments))


def _types(name: str, tools: Sequence[Json]) -> Mapping[str, Any]:
    """Return the declared type of each parameter of a function, where there is one."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            if isinstance(properties, dict):
                return {key: each.get("type") for key, each in properties.items() if isinstance(each, dict)}
    return {}


def _value(text: str, declared: Any) -> Any:
    """Return an argument that is written as plain text: JSON where its declared type says so, or where none is declared."""
    text = text.removeprefix("\n").removesuffix("\n")
    if declared == "string":
        return text
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return text


def _written(arguments: Json) -> str:
    try:
        text = json.dumps(arguments, ensure_ascii=False)
        text.encode()
    except RecursionError:
        raise MalformedCall("the call is nested too deeply") from None
    except UnicodeEncodeError:
        raise MalformedCall("the call has half a surrogate pair, which no text can hold") from None
    return text
