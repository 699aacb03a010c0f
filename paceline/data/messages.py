"""Chat messages of a data set: the forms that are read, and the faults of all others.

A message is an object with a role and a content, both text. The multimodal form of a content, a list of parts, is read
where every part is text: the parts are joined, because the templates of text models take text alone.
"""

from __future__ import annotations

from typing import Any


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
