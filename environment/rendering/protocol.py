"""Defines renderings and the conversations that they convert.

Promise of every rendering: the tokens of `bridge` are appended to the tokens that the model read and sampled, and those
do not change. If a rendering cannot prove that the result is the conversation, `bridge` returns None, and the whole
conversation is rendered again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from paceline.chat.answer_reader import AnswerReader, calls_of, content_of, read_answer, reasoning_of
from paceline.chat.call_formats import CallFormat
from paceline.chat.messages import Json
from paceline.data.tokens import encode_continuation, encode_prompt
from paceline.environment.protocols import SampledTurn
from paceline.groups import IntArray


class Call(NamedTuple):
    """A tool call that the model made."""

    name: str
    arguments: Any
    """Arguments of the call: an object if the model wrote one, else the model's text."""


class Parsed(NamedTuple):
    """The parsed tokens of a turn."""

    content: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    faults: tuple[str, ...] = ()
    """Reasons why texts that looked like calls could not be parsed."""

    def message(self, ids: str) -> Json:
        """Return the assistant's message as templates take it. `ids` is the prefix of the ids of its calls."""
        message: Json = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": f"{ids}_{number}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(self.calls)
            ]
        return message


@dataclass(frozen=True)
class Conversation:
    """Messages up to a turn of the model, with their tools and template arguments."""

    messages: Sequence[Json]
    tools: Sequence[Json] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def extended(self, messages: Sequence[Json]) -> Conversation:
        return replace(self, messages=[*self.messages, *messages])


class Rendering(Protocol):
    """Converts conversations to tokens and back."""

    def prompt(self, conversation: Conversation) -> IntArray:
        """Return the [P] tokens of a conversation, ending with the opening of the model's turn. Raises InvalidInput."""

    def bridge(
        self, before: Conversation, prompt_ids: IntArray, turn: SampledTurn, answer: Json, new: Sequence[Json]
    ) -> IntArray | None:
        """Return the [K] tokens that the `new` messages add after a turn; None if these tokens are not certain.
        `before` is the conversation of `prompt_ids`, `answer` the message of the turn."""

    def parse(self, conversation: Conversation, prompt_ids: IntArray, turn: SampledTurn) -> Parsed:
        """Return the content, reasoning and calls of a turn."""

    def fault_message(self, fault: str) -> Json:
        """Return the message that reports an unreadable call to the model: a tool message, or one of another role."""
        return {"role": "tool", "content": f"The tool call could not be read: {fault}"}


@dataclass(frozen=True)
class TextRendering(Rendering):
    """Renders text prompts. The model does not see the tools; calls are parsed if the spec names their format."""

    tokenizer: Any
    calls: CallFormat = "none"

    def prompt(self, conversation: Conversation) -> IntArray:
        text = "".join(str(message["content"] or "") for message in conversation.messages)
        return encode_prompt(self.tokenizer, text, "never")

    def bridge(
        self, before: Conversation, prompt_ids: IntArray, turn: SampledTurn, answer: Json, new: Sequence[Json]
    ) -> IntArray | None:
        text = "".join(str(message["content"] or "") for message in new)
        return encode_continuation(self.tokenizer, [*prompt_ids[-1:], *turn.token_ids], text)

    def parse(self, conversation: Conversation, prompt_ids: IntArray, turn: SampledTurn) -> Parsed:
        return read_turn(turn.text, AnswerReader(self.calls, tools=conversation.tools))


def read_turn(text: str, reader: AnswerReader) -> Parsed:
    """Return the parsed `text` of a turn. `reader` must be new."""
    parts = read_answer(text, reader)
    return Parsed(
        content_of(parts),
        reasoning_of(parts),
        tuple(Call(call.name, json.loads(call.arguments)) for call in calls_of(parts)),
        tuple(malformed.fault for malformed in reader.malformed),
    )
