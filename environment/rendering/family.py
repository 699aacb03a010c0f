"""Renders conversations with the package `renderers` (extra `environments`), which has code for each family of models.

Promise: a bridge of the package is used only if it begins with exactly the tokens that the model read and sampled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.chat.answer_reader import AnswerReader
from paceline.chat.call_formats import MalformedCall, read_marked_call
from paceline.chat.messages import Json
from paceline.environment.protocols import SampledTurn
from paceline.environment.rendering.protocol import Call, Conversation, Parsed, Rendering, read_turn
from paceline.errors import InvalidInput, error_text, is_about_input
from paceline.groups import IntArray

MISSING = (
    "the package 'renderers' (with httpx) is not installed; install paceline[environments], or set environment.renderer to "
    "template"
)
MAX_RENDERERS = 16


def family_of(model_name: str) -> str:
    """Return the family of a model by its exact name; empty if the name is unknown or the package is missing."""
    try:
        from renderers.base import MODEL_RENDERER_MAP
    except ImportError:
        return ""
    return str(MODEL_RENDERER_MAP.get(model_name, ""))


@dataclass(frozen=True)
class FamilyRendering(Rendering):
    tokenizer: Any
    family: str
    template_kwargs: Mapping[str, Any]
    """Template arguments of the spec. Arguments of a conversation take precedence."""
    _renderers: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        """Create the renderer. Raises InvalidInput if the family is unknown, if it does not accept the arguments, if
        the tokenizer lacks the family's control tokens, or if the package is missing."""
        self._renderer({})

    def prompt(self, conversation: Conversation) -> IntArray:
        """Return [P] tokens. Raises InvalidInput if the renderer refuses the conversation."""
        renderer = self._renderer(conversation.template_kwargs)
        messages, tools = list(conversation.messages), _tools(conversation)
        try:
            ids = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
        except BaseException as error:
            if not is_about_input(error):
                raise
            raise InvalidInput(f"the renderer {self.family!r} raised {error_text(error)}") from error
        return np.array(ids, np.int32)

    def bridge(
        self, before: Conversation, prompt_ids: IntArray, turn: SampledTurn, answer: Json, new: Sequence[Json]
    ) -> IntArray | None:
        """Return [K] tokens; None if the renderer has no bridge or the bridge does not extend the tokens."""
        renderer = self._renderer(before.template_kwargs)
        try:
            bridged = renderer.bridge_to_next_turn(
                prompt_ids.tolist(), turn.token_ids.tolist(), list(new), tools=_tools(before)
            )
        except BaseException as error:
            if not is_about_input(error):
                raise
            return None
        if bridged is None:
            return None
        ids = np.array(bridged.token_ids, np.int32)
        read = np.concatenate([prompt_ids, turn.token_ids])
        if len(ids) <= len(read) or not np.array_equal(ids[: len(read)], read):
            return None
        return ids[len(read) :]

    def parse(self, conversation: Conversation, prompt_ids: IntArray, turn: SampledTurn) -> Parsed:
        """Return the content, reasoning and calls of a turn. Two cases are parsed here, because the package reads any
        JSON with a name as a call of Llama 3, and strips white space in `<parameter=…>` without reading Python's
        literals."""
        if self.family == "llama-3":
            return read_turn(turn.text, AnswerReader("json", tools=conversation.tools))
        renderer = self._renderer(conversation.template_kwargs)
        parsed = renderer.parse_response(
            turn.token_ids.tolist(), tools=_tools(conversation), prompt_ids=prompt_ids.tolist()
        )
        read = [_read(call, conversation.tools) for call in parsed.tool_calls]
        return Parsed(
            parsed.content,
            parsed.reasoning_content or "",
            tuple(call for call in read if isinstance(call, Call)),
            tuple(fault for fault in read if isinstance(fault, str)),
        )

    def _renderer(self, template_kwargs: Mapping[str, Any]) -> Any:
        kwargs = {**self.template_kwargs, **template_kwargs}
        key = json.dumps(kwargs, sort_keys=True, default=str)
        if key not in self._renderers:
            made = self._make(kwargs)
            if len(self._renderers) >= MAX_RENDERERS:
                return made
            self._renderers[key] = made
        return self._renderers[key]

    def _make(self, kwargs: Mapping[str, Any]) -> Any:
        try:
            from renderers import config_from_name, create_renderer
        except ImportError:
            raise InvalidInput(f"environment.renderer {self.family!r}: {MISSING}") from None
        try:
            return create_renderer(
                self.tokenizer, config_from_name(self.family), chat_template_kwargs=dict(kwargs) or None
            )
        except Exception as error:  # from the package, its configuration or the tokenizer
            raise InvalidInput(
                f"environment.renderer {self.family!r} cannot be used with this tokenizer and data.chat_template_kwargs "
                f"{dict(kwargs)}: {error_text(error)}"
            ) from error


def _read(call: Any, tools: Sequence[Json]) -> Call | str:
    """Return the call that the package has parsed, or why it is invalid."""
    status = str(call.status).replace("_", " ")
    if call.status in ("ok", "invalid_json") and call.raw.lstrip().startswith("<function="):
        try:
            marked = read_marked_call(call.raw, tools)
            return Call(marked.name, json.loads(marked.arguments))
        except MalformedCall as error:
            status = str(error)
    elif call.status == "ok" and call.name and isinstance(call.arguments, dict | None):
        return Call(call.name, call.arguments if call.arguments is not None else {})
    return f"{status}: {call.raw[:200]}"


def _tools(conversation: Conversation) -> list[Any] | None:
    return [tool["function"] for tool in conversation.tools] or None
