"""Messages of a chat in the shape of the OpenAI API, read into the shape that chat templates take.

Promise: nothing of a message is dropped on the way. A form that no template can take is refused by name; what the template
itself would leave out is refused by `paceline/chat/rendering.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from paceline.errors import InvalidInput

Json = dict[str, Any]

MAX_MESSAGES = 10_000

SAYS_NOTHING: tuple[Any, ...] = (None, [], {}, "")
"""Values of a further field that stand for its absence, as clients write them when they echo an answer."""


class Unsupported(InvalidInput):
    """A field of the API that is not supported here, or not with this value."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class Part(BaseModel):
    """Part of a content in the list form."""

    type: str
    text: str | None = None


class Message(BaseModel):
    """One message of a chat. The template decides on further fields."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[Part] | None = None
    tool_calls: list[Json] | None = None

    def check(self) -> None:
        """Raises Unsupported for content that no template could render."""
        if self.content is None and not self.tool_calls and not self._reasons:
            raise Unsupported(
                f"messages has one of the {self.role} without content or tool_calls", "messages"
            )
        for part in self.content if isinstance(self.content, list) else []:
            if part.type not in ("text", "input_text", "output_text") or part.text is None:
                raise Unsupported(f"messages has a part of type {part.type!r}; text only", "messages")
        if self.tool_calls and self.role != "assistant":
            raise Unsupported(
                f"messages has tool_calls of the {self.role}; only the assistant calls", "messages"
            )
        for call in self.tool_calls or ():
            _rendered_call(call)

    @property
    def _reasons(self) -> bool:
        """Return whether it is an answer that was cut off before its content."""
        extra = self.model_extra or {}
        return self.role == "assistant" and bool(extra.get("reasoning_content") or extra.get("reasoning"))

    def rendered(self) -> Json:
        """Return the message as templates take it: text content, arguments of calls as objects, and no empty field.

        Raises Unsupported for calls of another form.
        """
        extra = self.model_extra or {}
        fields = {name: value for name, value in extra.items() if value not in SAYS_NOTHING}
        reasoning = fields.pop("reasoning", None)  # the other name of the same field
        if reasoning is not None and fields.setdefault("reasoning_content", reasoning) != reasoning:
            raise Unsupported(
                "messages has reasoning and reasoning_content that differ; give one of them", "messages"
            )
        calls = [_rendered_call(call) for call in self.tool_calls or ()]
        return {
            "role": self.role,
            "content": text_of(self.content),
            **fields,
            **({"tool_calls": calls} if calls else {}),
        }


def text_of(content: str | Sequence[Part] | None) -> str:
    """Return a content as one text; none is the empty text."""
    return content if isinstance(content, str) else "".join(part.text or "" for part in content or ())


def in_order_of_calls(messages: Sequence[Json]) -> list[Json]:
    """Return rendered messages with the results of tools in the order of their calls.

    For a template that does not write ids: its model knows the results by their order alone. Raises Unsupported where some
    calls of a message have results and others have none.
    """
    ordered: list[Json] = []
    block: list[Json] = []
    ids: list[Any] = []
    for message in [*messages, {"role": ""}]:
        if message["role"] == "tool":
            block.append(message)
            continue
        ordered += _in_order(block, ids)
        block, ids = [], [call.get("id") for call in message.get("tool_calls", ())]
        ordered.append(message)
    return ordered[:-1]


def _in_order(results: list[Json], ids: list[Any]) -> list[Json]:
    named = [result.get("tool_call_id") for result in results]
    if not any(named):
        return results  # they are given by order already
    if sorted(map(str, named)) != sorted(map(str, ids)):
        raise Unsupported(
            f"messages has results of tools with tool_call_id {named!r:.200} for calls with id {ids!r:.200}; give one result "
            "for each call of the message before them, because the chat template of this model writes no ids",
            "messages",
        )
    return sorted(results, key=lambda result: ids.index(result["tool_call_id"]))


def _rendered_call(call: Json) -> Json:
    """Return a tool call with its arguments as an object: the API has them as text, templates write them as JSON
    themselves."""
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        raise Unsupported(
            f"messages has tool_calls of another form than a function's: {call!r:.80}", "messages"
        )
    if not isinstance(function.get("name"), str) or not isinstance(call.get("id"), str | None):
        raise Unsupported(
            f"messages has tool_calls whose function has no name, or whose id is no text: {call!r:.80}",
            "messages",
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise Unsupported(
                f"messages has tool_calls whose arguments are no JSON: {error}", "messages"
            ) from None
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}
