"""Rendering without a chat template: prompts are texts, and what an environment answers is appended as it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from environment.protocols import SampledTurn
from environment.rendering.protocol import Call, Conversation, Parsed
from paceline.chat.answer_reader import AnswerReader, read_answer
from paceline.chat.call_formats import CallFormat
from paceline.chat.messages import Json
from paceline.data.tokens import encode_prompt
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
        """Return the tokens of the new contents."""
        text = "".join(str(message["content"] or "") for message in new)
        return np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def parse(self, conversation: Conversation, prompt_ids: IntArray, turn: SampledTurn) -> Parsed:
        """Return the text, and its calls."""
        return read_turn(turn.text, AnswerReader(self.calls, tools=conversation.tools))

    def fault_message(self, fault: str) -> Json:
        """Return a message of a tool."""
        return {"role": "tool", "content": f"The tool call could not be read: {fault}"}


def read_turn(text: str, reader: AnswerReader) -> Parsed:
    """Return what a text says, by a new reader."""
    answer = read_answer(text, reader)
    return Parsed(
        answer.content,
        answer.reasoning,
        tuple(Call(call.name, json.loads(call.arguments)) for call in answer.calls),
        tuple(malformed.fault for malformed in answer.malformed),
    )
