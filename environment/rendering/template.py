"""Renders conversations with the tokenizer's chat template, and bridges turns by the difference of two renderings.

The text after a turn is the rendering of the conversation with the answer and the new messages, minus the rendering
that ends with the answer. This is correct only if the template extends what it has written, so both renderings must
begin alike:

    H = render(history)                     what the model read, without the opening of its turn
    A = render(history + answer)            begins with H; E is the end of the answer in it
    B = render(history + answer + new)      begins with A up to E; what follows is the bridge

E is where the template writes, after H, the token that ended the turn. A turn without an end (it reached its length or
a stop string) is closed with the tokenizer's end of sequence, as the template does. If the renderings do not begin alike, there is
no bridge.

If the template writes no calls, the messages have the calls as text in the format of the spec.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.chat.answer_reader import AnswerReader
from paceline.chat.call_formats import CallFormat
from paceline.chat.completion_texts import message_text
from paceline.chat.messages import Json
from paceline.chat.rendering import ChatTemplate
from paceline.data.tokens import render_chat
from paceline.environment.protocols import SampledTurn
from paceline.environment.rendering.protocol import Conversation, Parsed, Rendering, read_turn
from paceline.errors import InvalidInput
from paceline.groups import IntArray

MAX_OPENINGS = 64


@dataclass(frozen=True)
class TemplateRendering(Rendering):
    tokenizer: Any
    template_kwargs: Mapping[str, Any]
    """Template arguments of the spec. Arguments of a conversation take precedence."""
    calls: CallFormat | None = None
    """Format of tool calls; None means the template's format. With another format the model sees the tools only if the
    template renders them."""
    _openings: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    def prompt(self, conversation: Conversation) -> IntArray:
        """Return [P] tokens. Raises InvalidInput if the template cannot render the conversation."""
        kwargs = {**self.template_kwargs, **conversation.template_kwargs}
        return self.template.encode(self._written(conversation.messages), self._shown(conversation), kwargs)

    def bridge(
        self, before: Conversation, prompt_ids: IntArray, turn: SampledTurn, answer: Json, new: Sequence[Json]
    ) -> IntArray | None:
        tools = self._shown(before)
        kwargs = {**self.template_kwargs, **before.template_kwargs}
        try:
            checked = self.template.checked(self._written([*before.messages, answer, *new]), tools, kwargs)
            history, with_answer = checked[: len(before.messages)], checked[: len(before.messages) + 1]
            opened = self._render(history, tools, kwargs, opens=True)
            closed = self._render(with_answer, tools, kwargs, opens=False)
            after = self._render(checked, tools, kwargs, opens=True)
            begin = self._begin(history, tools, kwargs, opened)
        except InvalidInput:
            return None
        if not closed.startswith(opened[:begin]):
            return None
        position, written = self._end(closed, begin, turn)
        if position < 0 or not after.startswith(closed[:position]):
            return None
        text = written + after[position:]
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if written:
            if not ids or ids[0] != int(turn.token_ids[-1]):
                return None
            ids = ids[1:]
        return np.array(ids, np.int32) if ids else None

    def parse(self, conversation: Conversation, prompt_ids: IntArray, turn: SampledTurn) -> Parsed:
        answers = self.template.answer_format
        reader = AnswerReader(
            self.calls if self.calls is not None else answers.calls,
            answers.reasons,
            self.template.opens_reasoning(prompt_ids, conversation.messages),
            self._shown(conversation) or conversation.tools,
        )
        return read_turn(turn.text, reader)

    def fault_message(self, fault: str) -> Json:
        """Return a tool message if the format has no call ids, else a user message."""
        by_order = self.template.answer_format.calls == "hermes"
        return super().fault_message(fault) | ({} if by_order else {"role": "user"})

    def _shown(self, conversation: Conversation) -> Sequence[Json]:
        if self.calls is None or not conversation.tools:
            return conversation.tools
        try:
            self.template.checked([{"role": "user", "content": "?"}], conversation.tools, {})
        except InvalidInput:
            return ()
        return conversation.tools

    def _written(self, messages: Sequence[Json]) -> Sequence[Json]:
        """Return the messages. Calls become text if the template writes no calls and the spec has their format."""
        if self.calls is None or self.template.writes_calls:
            return messages
        of_results = "tool" if self.template.writes_results else "user"
        return [
            {"role": of_results, "content": message["content"]}
            if message["role"] == "tool"
            else {"role": "assistant", "content": self._with_calls(message)}
            if message.get("tool_calls")
            else message
            for message in messages
        ]

    def _with_calls(self, message: Json) -> str:
        if self.calls != "json":
            return message_text({name: message[name] for name in ("content", "tool_calls")})
        functions = [call["function"] for call in message["tool_calls"]]
        texts = [
            json.dumps({name: each[name] for name in ("name", "arguments")}, ensure_ascii=False) for each in functions
        ]
        return "\n".join(filter(None, [message["content"], *texts]))

    def _render(
        self, messages: Sequence[Json], tools: Sequence[Json], kwargs: Mapping[str, Any], *, opens: bool
    ) -> str:
        return render_chat(self.tokenizer, list(messages), kwargs, list(tools) or None, add_generation_prompt=opens)

    def _begin(self, history: Sequence[Json], tools: Sequence[Json], kwargs: Mapping[str, Any], opened: str) -> int:
        key = json.dumps([list(tools), dict(kwargs)], sort_keys=True, default=str)
        opening = self._openings.get(key)
        if opening is None or not opened.endswith(opening):
            plain = self._render(history, tools, kwargs, opens=False)
            if not opened.startswith(plain):
                raise InvalidInput("the template does not open the model's turn after the text that it has written")
            opening = opened[len(plain) :]
            if len(self._openings) < MAX_OPENINGS:
                self._openings[key] = opening
        return len(opened) - len(opening)

    def _end(self, closed: str, begin: int, turn: SampledTurn) -> tuple[int, str]:
        """Return the index behind the answer in `closed`, searched from `begin` on (-1: not found), and the text of the
        token that ended the turn (empty if the bridge must write the end)."""
        last = int(turn.token_ids[-1])
        if turn.finish_reason == "stop" and last in self.tokenizer.all_special_ids:
            mark = str(self.tokenizer.convert_ids_to_tokens(last))
            position = closed.rfind(mark, begin)
            return (position if position < 0 else position + len(mark)), mark
        mark = self.tokenizer.eos_token or ""
        return (closed.rfind(mark, begin) if mark else -1), ""
