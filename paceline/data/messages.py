"""Chat messages of a data set: the forms that are read, and the faults of all others.

A message is an object with a role and a content, both text. The multimodal form of a content, a list of parts, is read
where every part is text: the parts are joined, because the templates of text models take text alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.errors import DataError

TOOLS_KEY = "tools"
"""Column with the definitions of tools that the chat template of a row gets, as TRL has it."""


def are_messages(value: Any) -> bool:
    """Return whether a value has the form of chat messages: a non-empty list of objects with role and content."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value)
    )


def fault_of_messages(value: Any) -> str:
    """Return why a value is no list of chat messages that a template can take; empty where it is one."""
    if not isinstance(value, list) or not value:
        return f"has to be text or chat messages, not {value!r:.80}"
    for index, message in enumerate(value):
        if isinstance(message, dict) and {"from", "value"} <= message.keys() and "role" not in message:
            return "has messages with 'from' and 'value'; rename these keys to 'role' and 'content'"
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            return f"has to be text or chat messages (objects with role and content), not {value!r:.80}"
        if fault := _fault_of_message(message):
            return f"has a message {index} {fault}"
    return ""


def plain(value: Any) -> Any:
    """Return a prompt or completion with every list of text parts joined to one text. `fault_of_messages` has to be
    empty for a list."""
    if not isinstance(value, list):
        return value
    return [
        {**message, "content": "".join(part["text"] for part in message["content"])}
        if isinstance(message["content"], list)
        else message
        for message in value
    ]


def _fault_of_message(message: dict[str, Any]) -> str:
    role, content = message["role"], message["content"]
    if not isinstance(role, str) or not role:
        return f"with the role {role!r:.40}; a role is text such as 'user'"
    if content is None:
        calls = role == "assistant" and message.get("tool_calls")
        return "" if calls else f"of the {role} whose content is null; give it text, or remove the row"
    if isinstance(content, list):
        return _fault_of_parts(role, content)
    if not isinstance(content, str):
        return f"of the {role} whose content is {content!r:.40}; a content is text"
    return ""


def _fault_of_parts(role: str, parts: list[Any]) -> str:
    if not parts:
        return f"of the {role} whose content is an empty list; give it text, or remove the row"
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            named = f"a part of type {kind!r:.40}" if isinstance(kind, str) else f"the part {part!r:.60}"
            return f"of the {role} whose content has {named}; only text parts can be read"
    return ""


def tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    """Return the definitions of tools of a row, JSON schemas of functions as a list or as JSON; None where it has none. Keys
    without a value, which tables add to objects of different keys, are left out. Raises DataError for anything else."""
    value = row.get(TOOLS_KEY)
    if value is None or value == "" or value == []:
        return None
    tools = value
    if isinstance(value, str):
        try:
            tools = json.loads(value)
        except ValueError:
            tools = None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(
            f"column {TOOLS_KEY!r} has to be a list of JSON schemas of functions, or such a list as JSON, not {value!r:.80}; "
            "correct it, or rename the column"
        )
    return [_without_nulls(tool) for tool in tools] or None


def tools_of_prompt(prompt: Any, columns: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools that the chat template gets with a prompt; None where there are none, and for a prompt of text, whose
    column of that name has any values. Raises DataError."""
    return tools_of(columns) if isinstance(prompt, list) else None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
