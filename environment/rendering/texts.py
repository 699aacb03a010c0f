"""Rendering without a chat template: prompts are texts, and what an environment answers is appended as it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.chat.answer_reader import AnswerReader, calls_of, content_of, read_answer, reasoning_of
from paceline.chat.call_formats import CallFormat
from paceline.chat.messages import Json
from paceline.data.tokens import encode_continuation, encode_prompt
from paceline.environment.protocols import SampledTurn
from paceline.environment.rendering.protocol import Call, Conversation, Parsed
from paceline.groups import IntArray


@dataclass(frozen=True)
class TextRendering:
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

    def fault_message(self, fault: str) -> Json:
        return {"role": "tool", "content": f"The tool call could not be read: {fault}"}


def read_turn(text: str, reader: AnswerReader) -> Parsed:
    """Return what a text says, by a new reader."""
    parts = read_answer(text, reader)
    return Parsed(
        content_of(parts),
        reasoning_of(parts),
        tuple(Call(call.name, json.loads(call.arguments)) for call in calls_of(parts)),
        tuple(malformed.fault for malformed in reader.malformed),
    )
