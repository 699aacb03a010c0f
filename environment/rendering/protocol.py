"""What a rendering does, and the conversation that it works on.

Promise, of every rendering: what `bridge` returns is appended to the tokens that the model read and sampled, which stay as they
are; where a rendering cannot prove that the result is the conversation, it returns None and the conversation is rendered anew.
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
    """An object, or whatever the model wrote in its place."""


class Parsed(NamedTuple):
    """What the tokens of a turn say."""

    content: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    faults: tuple[str, ...] = ()
    """Why texts that began like calls are none."""

    def message(self, ids: str) -> Json:
        """Return the assistant's message as templates take it. The ids of its calls begin with `ids`."""
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
    """Messages up to a turn of the model, with the tools and arguments that their rendering has."""

    messages: Sequence[Json]
    tools: Sequence[Json] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def extended(self, messages: Sequence[Json]) -> Conversation:
        return replace(self, messages=[*self.messages, *messages])


class Rendering(Protocol):
    """A way from conversations to tokens and back."""

    def prompt(self, conversation: Conversation) -> IntArray:
        """Return [P] tokens of a conversation, opened for the model's turn. Raises InvalidInput."""

    def bridge(
        self, before: Conversation, prompt_ids: IntArray, turn: SampledTurn, answer: Json, new: Sequence[Json]
    ) -> IntArray | None:
        """Return [K] tokens that `new` messages add behind a turn, or None where that is not provably the conversation.

        `before` is what the model read as `prompt_ids`, `answer` the message of its turn.
        """

    def parse(self, conversation: Conversation, prompt_ids: IntArray, turn: SampledTurn) -> Parsed:
        """Return what a turn says."""

    def fault_message(self, fault: str) -> Json:
        """Return the message that tells the model about a call that could not be read: one of a tool, or as the template has it."""
        return {"role": "tool", "content": f"The tool call could not be read: {fault}"}


@dataclass(frozen=True)
class TextRendering(Rendering):
    """Rendering of text prompts. Tools are not shown to the model; calls are read where the spec names their format."""

    tokenizer: Any
    calls: CallFormat = "none"

    def prompt(self, conversation: Conversation) -> IntArray:
        """Return the tokens of all contents, one after another."""
        text = "".join(str(message["content"] or "") for message in conversation.messages)
        return encode_prompt(self.tokenizer, text, "never")

    def bridge(
        self, before: Conversation, prompt_ids: IntArray, turn: SampledTurn, answer: Json, new: Sequence[Json]
    ) -> IntArray | None:
        """Return the tokens of the new contents, as they are written behind the turn."""
        text = "".join(str(message["content"] or "") for message in new)
        return encode_continuation(self.tokenizer, [*prompt_ids[-1:], *turn.token_ids], text)

    def parse(self, conversation: Conversation, prompt_ids: IntArray, turn: SampledTurn) -> Parsed:
        return read_turn(turn.text, AnswerReader(self.calls, tools=conversation.tools))


def read_turn(text: str, reader: AnswerReader) -> Parsed:
    """Return what a text says, by a new reader."""
    parts = read_answer(text, reader)
    return Parsed(
        content_of(parts),
        reasoning_of(parts),
        tuple(Call(call.name, json.loads(call.arguments)) for call in calls_of(parts)),
        tuple(malformed.fault for malformed in reader.malformed),
    )
