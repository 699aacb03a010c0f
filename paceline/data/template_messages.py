"""Read messages in the shape of one chat template, where templates differ.

| message | the template gets |
|---|---|
| a role that it does not write | its other name: `developer` is `system`, `function` is `tool`; else a refusal |
| reasoning | the name that it reads, `reasoning_content`, `reasoning` or `thinking`; none: a refusal |
| calls | a refusal where it does not write them: it reads no `tool_calls`, or asks for a null content, which transformers leaves out |
| results of tools | in the order of their calls, where it reads no `tool_call_id` |
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from paceline.data.messages import REASONING_FIELDS, Json
from paceline.errors import InvalidInput

ROLES = ("system", "user", "assistant", "tool")
OTHER_NAMES = {"developer": "system", "function": "tool"}
"""Older names of roles, and newer ones, that many templates do not have."""

ASKS_FOR_NONE = re.compile(r"content['\"]?\]?\s+is\s+none\b")
_MARK = "Text 4713."


class NotRendered(InvalidInput):
    """The template would leave out a field of messages of a role."""

    def __init__(self, role: str, name: str) -> None:
        super().__init__(
            f"messages of the {role} have {name!r}, which the chat template of the tokenizer does not write; remove it, or use a "
            "template that does"
        )
        self.role, self.name = role, name


def for_template(
    messages: Sequence[Any], source: str, write: Callable[[list[Json]], str | None]
) -> list[Any]:
    """Return read messages as the template with the text `source` takes them. `write` renders a chat, and returns None for one that
    the template refuses. Raises NotRendered, and InvalidInput for results of tools that belong to no call."""
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
    """Return messages with the results of tools in the order of their calls.

    For a template that does not write ids: its model knows the results by their order alone. Raises InvalidInput where results are
    not those of the calls before them.
    """
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
        return results  # they are given by order already
    if sorted(map(str, named)) != sorted(map(str, ids)):
        raise InvalidInput(
            f"messages has results of tools with tool_call_id {named!r:.200} for calls with id {ids!r:.200}; give one result "
            "for each call of the message before them, because the chat template of this model writes no ids"
        )
    return sorted(results, key=lambda result: ids.index(result["tool_call_id"]))


def _writes(role: str, write: Callable[[list[Json]], str | None]) -> bool:
    """Return whether the template writes messages of a role."""
    asked: Json = {"role": "user", "content": "?"}
    said: Json = {"role": role, "content": _MARK}
    return any(_MARK in (write(chat) or "") for chat in ([said, asked], [asked, said]))


def _writes_calls(source: str, write: Callable[[list[Json]], str | None]) -> bool:
    if not ASKS_FOR_NONE.search(source):
        return True
    call: Json = {"id": "c47134713", "type": "function", "function": {"name": "compute4713", "arguments": {}}}
    text = write(
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    )
    return text is None or "compute4713" in text


@functools.lru_cache(maxsize=64)
def _reads(source: str, field: str) -> bool:
    """Return whether a template has a field of a message, not just the word in its text."""
    return re.search(rf"(?:\.|['\"]){field}\b", source) is not None
