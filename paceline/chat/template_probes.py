"""What a chat template renders, seen by renderings that differ, and how its model writes answers.

A probe is a short chat made for the purpose. A template may refuse it; then nothing is proven by it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.chat.call_formats import (
    CLOSE,
    OPEN,
    CallFormat,
    MalformedCall,
    NoCall,
    read_json_calls,
    read_marked_call,
)
from paceline.chat.completion_texts import END_THINK, THINK, special_tokens
from paceline.chat.messages import Json
from paceline.data.tokens import NO_KWARGS, render_chat
from paceline.errors import InvalidInput

BY_ORDER = ("tool_call_id", "name")
"""Fields that name the call of a tool's result. A template that writes results may rely on their order instead."""

BESIDE_CALLS = "content beside tool_calls"
"""Stands for a content that has calls beside it, which some templates then leave out."""

_QUESTION, _ANSWER = "Question 4711?", "Answer 4712."
_CALL: Json = {
    "id": "c47134713",
    "type": "function",
    "function": {"name": "compute4714", "arguments": {"x4715": 4716}},
}
_TOOL: Json = {
    "type": "function",
    "function": {
        "name": "compute4714",
        "description": "Computes.",
        "parameters": {"type": "object", "properties": {"x4715": {"type": "integer"}}, "required": ["x4715"]},
    },
}


@dataclass(frozen=True)
class AnswerFormat:
    """How the model of a template writes what is not plain content."""

    calls: CallFormat
    """Format of tool calls; `none` where the template writes none, or in an unknown format."""
    reasons: bool
    """True when the template writes `reasoning_content` between `<think>` and `</think>`."""
    opening: str = ""
    """Text that begins a call, before the function's name; empty where it is unknown."""
    after_name: str = ""
    """Text between a function's name and its arguments."""


@dataclass(frozen=True)
class Probe:
    """Renderings that differ where a template reads a field."""

    tokenizer: Any
    source: str
    tools: list[Json]
    kwargs: Mapping[str, Any]

    def renders(self, messages: Sequence[Json], role: str, name: str) -> bool:
        """Return whether the field `name` of messages of `role` changes the rendering."""
        if name in BY_ORDER and role == "tool" and mentions(self.source, "tool"):
            return True
        first = next(m for m in messages if m["role"] == role and says(m, name))
        short = _short_chat(first, name)
        if (with_it := self._text(short)) is not None and with_it != self._text(_without(short, role, name)):
            return True
        # Either the template refuses so short a chat, or it writes the field in some places only.
        with_it = render_chat(self.tokenizer, list(messages), self.kwargs, self.tools)
        return with_it != self._text(_without(messages, role, name))

    def renders_tools(self) -> bool:
        """Return whether the template writes the definitions of tools."""
        chat = [{"role": "user", "content": _QUESTION}]
        with_them = self._text(chat)
        return with_them is not None and with_them != Probe(
            self.tokenizer, self.source, [], self.kwargs
        )._text(chat)

    def renders_call_ids(self) -> bool:
        """Return whether the template writes the ids of results."""
        chat = _short_chat({"role": "tool", "content": _ANSWER, "tool_call_id": "c47134713"}, "tool_call_id")
        with_it = self._text(chat)
        return with_it is not None and with_it != self._text(_without(chat, "tool", "tool_call_id"))

    def answer(self, message: Json) -> str:
        """Return what the template writes for an assistant's message, without what comes before and after its text."""
        asked = [{"role": "user", "content": _QUESTION}]
        whole = self._text([*asked, message]) or ""
        opened = self._text(asked, add_generation_prompt=True) or ""
        if (opened_thinking := opened.find(THINK, opened.rfind(_QUESTION))) >= 0:
            opened = opened[:opened_thinking]
        same = next((i for i, (a, b) in enumerate(zip(whole, opened, strict=False)) if a != b), len(opened))
        text = whole[same:]
        for mark in special_tokens(self.tokenizer).marks.values():
            text = text.split(mark)[0]
        return text

    def _text(self, messages: Sequence[Json], **options: Any) -> str | None:
        try:
            return render_chat(self.tokenizer, list(messages), self.kwargs, self.tools or None, **options)
        except InvalidInput:
            return None  # the template does not take this chat


def answer_format_of(tokenizer: Any, source: str) -> AnswerFormat:
    """Return the format of answers that the template's own renderings prove: a call that it writes is read back."""
    probe, plain = (Probe(tokenizer, source, tools, NO_KWARGS) for tools in ([_TOOL], []))
    message = {"role": "assistant", "content": _ANSWER, "reasoning_content": _QUESTION[:8]}
    reasoning = re.compile(f"{THINK}\\s*{_QUESTION[:8]}\\s*{END_THINK}")
    reasons = any(reasoning.search(each.answer(message)) for each in (plain, probe))
    text = probe.answer({"role": "assistant", "content": "", "tool_calls": [_CALL]})
    text = text.rpartition(END_THINK)[2].lstrip()
    name, arguments = _CALL["function"]["name"], _CALL["function"]["arguments"]
    calls: CallFormat = "none"
    try:
        if OPEN in text and CLOSE in text:
            read = [read_marked_call(text[text.index(OPEN) + len(OPEN) : text.index(CLOSE)], [_TOOL])]
            text, found = text[text.index(OPEN) :], "hermes"
        else:
            read, found = read_json_calls(text, [_TOOL]), "json"
        if [(call.name, json.loads(call.arguments)) for call in read] == [(name, arguments)]:
            calls = found  # type: ignore[assignment]
    except (MalformedCall, NoCall):
        pass
    if calls == "none":
        return AnswerFormat("none", reasons)
    opening, _, rest = text.partition(name)
    argument = re.search(r'\{\s*"x4715"|<parameter=x4715>', rest)
    return AnswerFormat(calls, reasons, opening, rest[: argument.start()] if argument else "")


def says(message: Json, name: str) -> bool:
    """Return whether a message has the field `name`, with a value."""
    if name == BESIDE_CALLS:
        return "tool_calls" in message and says(message, "content")
    value = message.get(name)
    return bool(value.strip()) if name == "content" and isinstance(value, str) else value is not None


def _short_chat(message: Json, name: str) -> list[Json]:
    """Return a chat in which a message of this role, with this field, may stand."""
    made: Json = {"role": message["role"], "content": "" if name == "tool_calls" else _ANSWER}
    if name == BESIDE_CALLS:
        made["tool_calls"] = [_CALL]
    elif name != "content":
        made[name] = message[name]
    asked: Json = {"role": "user", "content": _QUESTION}
    match message["role"]:
        case "user":
            return [made]
        case "system" | "developer":
            return [made, asked]
        case "tool":
            made.setdefault("tool_call_id", _CALL["id"])
            return [asked, {"role": "assistant", "content": "", "tool_calls": [_CALL]}, made]
        case _:
            return [asked, made]


def _without(messages: Sequence[Json], role: str, name: str) -> list[Json]:
    changed = []
    for message in messages:
        if message["role"] == role and says(message, name):
            cleared = name in ("content", BESIDE_CALLS)
            message = {key: value for key, value in message.items() if key != name}
            message |= {"content": ""} if cleared else {}
        changed.append(message)
    return changed


def mentions(source: str, word: str) -> bool:
    """Return whether a template's text has a word: without it, it cannot read a field or an argument of that name."""
    return re.search(rf"\b{re.escape(word)}\b", source) is not None
