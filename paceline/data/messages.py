"""Reads chat messages into the shape that templates take: the only reader for data sets, environments and the endpoint.

Promise: nothing of a message is dropped. A form that no template can take is refused by name. Read messages have text
as content (text parts are joined, because the templates of text models take only text), calls as `{"function": {"name",
"arguments"}}` with an object as arguments, reasoning as `reasoning_content`, and no field without a value. Reading a
read message changes nothing. `for_template` adapts read messages to one template:

| message | the template gets |
|---|---|
| a role that it does not know | its other name: `developer` is `system`, `function` is `tool`; else a refusal |
| reasoning | the field that it reads: `reasoning_content`, `reasoning` or `thinking`; a refusal if it reads none |
| calls | a refusal if it does not write them: it reads no `tool_calls`, or asks for a null content, which transformers leaves out |
| results of tools | in the order of their calls, if it reads no `tool_call_id` |
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from paceline.errors import DataError, InvalidInput

Json = dict[str, Any]

TOOLS_KEY = "tools"
"""Column with the definitions of tools for the chat template, as in TRL."""

SAYS_NOTHING: tuple[Any, ...] = (None, [], {}, "")
"""Values that mean that a field is absent: clients write them, and tables fill missing fields with null."""

CALL_FIELDS = ("tool_calls", "function_call")
"""Fields with calls: the API's field, and the API's older field for a single call."""

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names of the field with the reasoning of an answer."""

TEXT_PARTS = ("text", "input_text", "output_text")


def are_messages(value: Any) -> bool:
    """Return whether a value has the form of chat messages: a non-empty list of objects with role and content or calls."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(message, dict)
            and "role" in message
            and ("content" in message or any(message.get(name) for name in CALL_FIELDS))
            for message in value
        )
    )


def fault_of_messages(value: Any) -> str:
    """Return why a value is not a list of chat messages that a template can take; empty if there is no fault."""
    if not isinstance(value, list) or not value:
        return f"must be text or chat messages, not {value!r:.80}"
    for index, message in enumerate(value):
        if isinstance(message, dict) and {"from", "value"} <= message.keys() and "role" not in message:
            return "has messages with 'from' and 'value'; rename these keys to 'role' and 'content'"
        if not are_messages([message]):
            return f"must be text or chat messages (objects with role and content), not {value!r:.80}"
        try:
            read_message(message)
        except DataError as fault:
            return f"has a message {index} {fault}"
    return ""


def plain(value: Any) -> Any:
    """Return a prompt or completion with its messages read. `fault_of_messages` must be empty for a list."""
    return [read_message(message) for message in value] if isinstance(value, list) else value


def read_message(message: Mapping[str, Any]) -> Json:
    """Return a message as templates take it. Raises DataError with a fault that continues the words "a message"."""
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise DataError(f"with the role {role!r:.40}; a role is text such as 'user'")
    fields = {name: value for name, value in message.items() if value not in SAYS_NOTHING}
    calls = _read_calls(role, fields)
    reasoning = _read_reasoning(role, fields)
    content = _read_content(role, message.get("content"), optional=bool(calls or reasoning))
    return (
        {"role": role, "content": content}
        | {name: value for name, value in fields.items() if name not in ("role", "content")}
        | ({"reasoning_content": reasoning} if reasoning else {})
        | ({"tool_calls": calls} if calls else {})
    )


def api_message(message: Json) -> Json:
    """Return a read message in the API's form: arguments as text, and no content beside calls if it is empty."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}
        calls.append({"type": "function", **call, "function": function})
    return {**message, "content": message["content"] or None, "tool_calls": calls}


def _read_content(role: str, content: Any, *, optional: bool) -> str:
    if optional and content in SAYS_NOTHING:
        return ""
    if content is None:
        raise DataError(f"of the {role} without content or tool_calls; give it text")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        remedy = "write a result as JSON text" if role == "tool" else "content must be text"
        raise DataError(f"of the {role} whose content is {content!r:.40}; {remedy}")
    if not content:
        raise DataError(f"of the {role} whose content is an empty list; give it text")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            named = f"a part of type {kind!r:.40}" if isinstance(kind, str) else f"the part {part!r:.60}"
            raise DataError(f"of the {role} whose content has {named}; only text parts can be read")
    return "".join(part["text"] for part in content)


def _read_reasoning(role: str, fields: Json) -> str:
    """Remove the fields of REASONING_FIELDS from the fields of an answer, and return the reasoning."""
    names = [name for name in REASONING_FIELDS if role == "assistant" and isinstance(fields.get(name), str)]
    found = {name: fields.pop(name) for name in names}
    if len(set(found.values())) > 1:
        raise DataError(f"of the {role} whose {' and '.join(names)} differ; give one of them")
    return next(iter(found.values()), "")


def _read_calls(role: str, fields: Json) -> list[Json]:
    calls, single = (fields.pop(name, None) for name in CALL_FIELDS)
    if single is not None and calls is None:
        calls = [single]
    if isinstance(calls, str):
        calls = _read_field("tool_calls that", calls)
    if calls in SAYS_NOTHING:
        return []
    if role != "assistant":
        raise DataError(f"with tool_calls of the {role}; only the assistant calls")
    if not isinstance(calls, list):
        raise DataError(f"with tool_calls that are no list: {calls!r:.80}")
    return [_read_call(call) for call in calls]


def _read_call(call: Any) -> Json:
    """Return a call from the API's form, or from the function alone."""
    if not isinstance(call, dict):
        raise DataError(f"with a tool call that is no object: {call!r:.80}")
    call = {name: value for name, value in call.items() if value is not None}
    if "function" not in call and "name" in call:
        names = ("name", "arguments", "parameters")
        function = {name: call.pop(name) for name in names if name in call}
        if "parameters" in function:
            function.setdefault("arguments", function.pop("parameters"))
        call = {**call, "type": "function", "function": function}
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise DataError(f"with a tool call of another form than a function's: {call!r:.80}")
    name = function.get("name")
    if not isinstance(name, str) or not name or not isinstance(call.get("id"), str | None):
        raise DataError(f"with a tool call whose function has no name, or whose id is no text: {call!r:.80}")
    function = {field: value for field, value in function.items() if value is not None}
    return {**call, "function": {**function, "arguments": _read_arguments(function)}}


def _read_arguments(function: Json) -> Json:
    """Return the arguments as an object, which templates write as JSON. Text encoded twice is decoded twice."""
    arguments = function.get("arguments", {})
    for _ in range(2):
        if isinstance(arguments, str):
            arguments = _read_field("tool_calls whose arguments", arguments)
    if not isinstance(arguments, dict):
        raise DataError(f"with tool_calls whose arguments are no object: {arguments!r:.80}")
    return arguments


def _read_field(what: str, text: str) -> Any:
    try:
        return read_json(text) if text.strip() else {}
    except ValueError as error:
        raise DataError(f"with {what} are no JSON ({error}): {text!r:.80}") from None


# JSON


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text:.40} is too large")
    return number


def _object(pairs: list[tuple[str, Any]]) -> Json:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r:.40} is given twice")
    return made


STRICT_JSON = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_object)
"""Decoder that refuses what is ambiguous or not JSON: NaN, numbers beyond float64, repeated keys."""


def read_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError for invalid or too deeply nested JSON."""
    try:
        return STRICT_JSON.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


# Tools


def tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    """Return the definitions of tools of a row in the API's form, `{"type": "function", "function": {…}}`; None if the
    row has none. The column is a list of definitions or bare functions, each as an object or as JSON, or the whole
    list as JSON. Keys without a value, which tables add, are removed. Raises DataError for anything else."""
    value = row.get(TOOLS_KEY)
    if value in (None, "", [], "null"):
        return None
    tools = _parsed(value)
    if not isinstance(tools, list):
        raise _bad_tools(value)
    read = [_read_tool(_parsed(tool), value, filled=tools is value) for tool in tools]
    names = [tool["function"]["name"] for tool in read]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise DataError(f"column {TOOLS_KEY!r} has two functions with the name {twice!r:.60}; rename one")
    return read or None


def tools_of_prompt(prompt: Any, columns: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools for the chat template with a prompt. Return None if there are none, and for a text prompt,
    because its row may have any value in that column. Raises DataError."""
    return tools_of(columns) if isinstance(prompt, list) else None


def _read_tool(tool: Any, value: Any, *, filled: bool) -> Json:
    """Return a tool's definition in the API's form; `value` is the column's. `filled`: a table may have added nulls."""
    if not isinstance(tool, dict):
        raise _bad_tools(value)
    read: Json = _without_nulls(tool) if filled else tool
    if read.get("function") is None and "name" in read:
        bare = {key: item for key, item in read.items() if key not in ("type", "function")}
        read = {"type": "function", "function": bare}
    function = read.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(
            f"column {TOOLS_KEY!r} has a tool that is no function with a name: {read!r:.80}; correct it, or rename the column"
        )
    if not isinstance(function.get("parameters", {}), dict | None):
        raise DataError(
            f"column {TOOLS_KEY!r} has a function {function['name']!r:.60} whose parameters are no JSON schema; correct them"
        )
    return read


def _bad_tools(value: Any) -> DataError:
    return DataError(
        f"column {TOOLS_KEY!r} must be a list of JSON schemas of functions, or such a list as JSON, not {value!r:.80}; "
        "correct it, or rename the column"
    )


def _parsed(value: Any) -> Any:
    """Return the value of a JSON text, None for another text; anything else unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return read_json(value)
    except ValueError:
        return None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


ROLES = ("system", "user", "assistant", "tool")
OTHER_NAMES = {"developer": "system", "function": "tool"}
"""Maps older names of roles, and newer names that many templates do not have, to the names in ROLES."""

ASKS_FOR_NONE = re.compile(r"content['\"]?\]?\s+is\s+none\b")
_MARK = "Text 4713."


class NotRendered(InvalidInput):
    """Raised if the template would leave out a field that messages of a role have."""

    def __init__(self, role: str, name: str) -> None:
        super().__init__(
            f"messages of the {role} have {name!r}, which the chat template of the tokenizer does not write; remove it, or use a "
            "template that does"
        )
        self.role, self.name = role, name


def for_template(messages: Sequence[Any], source: str, write: Callable[[list[Json]], str | None]) -> list[Any]:
    """Return read messages in the form for the template with the text `source`. `write` renders a chat, or returns None
    if the template refuses it. Raises NotRendered, and InvalidInput for results of tools that belong to no call."""
    names: dict[str, str] = {}
    for role in {message.get("role", "") for message in messages} - set(ROLES):
        names[role] = role if _writes(role, write) else OTHER_NAMES.get(role, "")
        if not names[role]:
            raise NotRendered(role, "content")
    reasoning = next((name for name in REASONING_FIELDS if _reads(source, name)), None)
    has_calls = any(message.get("tool_calls") for message in messages)
    if has_calls and not (_reads(source, "tool_calls") and _writes_calls(source, write)):
        raise NotRendered("assistant", "tool_calls")
    adapted = []
    for message in messages:
        role = names.get(message.get("role", ""), message.get("role", ""))
        message = {**message, "role": role} if role != message.get("role", "") else message
        if role == "assistant" and "reasoning_content" in message and reasoning != "reasoning_content":
            if reasoning is None:
                raise NotRendered(role, "reasoning_content")
            message = {reasoning if key == "reasoning_content" else key: message[key] for key in message}
        adapted.append(message)
    return adapted if _reads(source, "tool_call_id") else in_order_of_calls(adapted)


def in_order_of_calls(messages: Sequence[Json]) -> list[Json]:
    """Return messages with the results of tools in the order of their calls, for a template that writes no ids. Raises
    InvalidInput if the results do not belong to the calls before them."""
    ordered: list[Json] = []
    block: list[Json] = []
    ids: list[Any] = []
    for message in [*messages, {"role": ""}]:
        if message["role"] == "tool":
            block.append(message)
            continue
        ordered += _in_order(block, ids)
        block, ids = [], [call.get("id") for call in message.get("tool_calls") or ()]
        ordered.append(message)
    return ordered[:-1]


def _in_order(results: list[Json], ids: list[Any]) -> list[Json]:
    named = [result.get("tool_call_id") for result in results]
    if not any(named) or not any(ids):
        return results  # they are in order already
    if sorted(map(str, named)) != sorted(map(str, ids)):
        raise InvalidInput(
            f"messages has results of tools with tool_call_id {named!r:.200} for calls with id {ids!r:.200}; give one result "
            "for each call of the message before them, because the chat template of this model writes no ids"
        )
    return sorted(results, key=lambda result: ids.index(result["tool_call_id"]))


def _writes(role: str, write: Callable[[list[Json]], str | None]) -> bool:
    asked: Json = {"role": "user", "content": "?"}
    said: Json = {"role": role, "content": _MARK}
    return any(_MARK in (write(chat) or "") for chat in ([said, asked], [asked, said]))


def _writes_calls(source: str, write: Callable[[list[Json]], str | None]) -> bool:
    if not ASKS_FOR_NONE.search(source):
        return True
    call: Json = {"id": "c47134713", "type": "function", "function": {"name": "compute4713", "arguments": {}}}
    text = write([{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}])
    return text is None or "compute4713" in text


@functools.lru_cache(maxsize=64)
def _reads(source: str, field: str) -> bool:
    """Return whether a template reads a field of messages, rather than just has the field's name in a text."""
    return re.search(rf"(?:\.|['\"]){field}\b", source) is not None
