"""Messages of a chat as the run's template takes them: a field is rendered, or refused by name.

A template ignores fields that its author did not foresee. Such a field would vanish from the prompt, and the client
would be answered as if it had been read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from paceline.errors import InvalidInput

Json = dict[str, Any]

OF_TOOL_RESULTS = ("tool_call_id", "name")
"""Fields that name the call of a tool result. A template that knows results may rely on their order instead."""


class Unsupported(InvalidInput):
    """A field of the API that this endpoint does not have."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class _Part(BaseModel):
    type: str
    text: str | None = None


class Message(BaseModel):
    """One message of a chat; the template decides on further fields."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[Json] | None = None

    def check(self) -> None:
        """Raises Unsupported for content that no template could render."""
        if self.content is None and not self.tool_calls:
            raise Unsupported(
                f"messages has one of the {self.role} without content or tool_calls", "messages"
            )
        for part in self.content if isinstance(self.content, list) else []:
            if part.type != "text" or part.text is None:
                raise Unsupported(f"messages has a part of type {part.type!r}; text only", "messages")
        for call in self.tool_calls or ():
            _rendered_call(call)

    def rendered(self) -> Json:
        """Return the message as templates take it: text content, arguments of calls as objects, and no empty field."""
        fields = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        calls = [_rendered_call(call) for call in self.tool_calls or ()]
        return {
            "role": self.role,
            "content": _text(self.content),
            **fields,
            **({"tool_calls": calls} if calls else {}),
        }


def check_template(messages: Sequence[Json], template: object) -> None:
    """Raises Unsupported for a field of rendered messages that the chat template `template` never names."""
    source = json.dumps(template) if isinstance(template, dict) else str(template or "")
    for message in messages:
        for name in message.keys() - {"role", "content"}:
            by_order = name in OF_TOOL_RESULTS and message["role"] == "tool" and _names(source, "tool")
            if not by_order and not _names(source, name):
                raise Unsupported(
                    f"messages has {name!r}, which the chat template of this model does not render; remove it, or train "
                    "a model whose template does",
                    "messages",
                )
        if message["role"] == "tool" and not _names(source, "tool"):
            raise Unsupported(
                "messages has one with the role 'tool', which the chat template of this model does not know",
                "messages",
            )


def _names(source: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", source) is not None


def _rendered_call(call: Json) -> Json:
    """Return a tool call with its arguments as an object: the API has them as text, templates write them as JSON
    themselves."""
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict) or "name" not in function:
        raise Unsupported(
            f"messages has tool_calls of another form than a function's: {call!r:.80}", "messages"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise Unsupported(
                f"messages has tool_calls whose arguments are no JSON: {error}", "messages"
            ) from None
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _text(content: str | list[_Part] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text or "" for part in content or ())
