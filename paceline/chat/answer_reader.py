"""Parses an answer's content, reasoning and tool calls from the model's text as it streams. Promise: the joined parts
do not depend on how the text was split, no text is lost except the marks and the white space beside them, and no
returned part changes later. A call is therefore returned when it is complete; text that begins like a call but is not
one becomes content, word for word."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.chat.call_formats import (
    CLOSE,
    OPEN,
    CallFormat,
    MalformedCall,
    NoCall,
    ToolCall,
    may_be_json_call,
    read_json_calls,
    read_marked_call,
)
from paceline.chat.completion_texts import END_THINK, THINK
from paceline.chat.messages import Json


class TextPart(NamedTuple):
    """Next piece of an answer's content, or of its reasoning."""

    text: str
    reasoning: bool = False


class Malformed(NamedTuple):
    """Text that began like a call and is not one; this text is also part of the content."""

    text: str
    fault: str
    """Reason why the text is not a call, for the model or a person."""


AnswerPart = TextPart | ToolCall


@dataclass
class AnswerReader:
    calls: CallFormat = "none"
    """Format of the calls to read; `none` leaves calls in the content."""
    reasons: bool = False
    """True when reasoning between `<think>` and `</think>` is not content."""
    in_reasoning: bool = False
    """True if the prompt ends within the reasoning."""
    tools: Sequence[Json] = ()
    max_calls: int | None = None
    """Largest number of calls to return; later calls are left out, because the client wants no more."""
    malformed: list[Malformed] = field(default_factory=list)
    num_calls: int = 0
    _held: str = ""
    _state: str = ""
    _trims: bool = False
    """True if white space at the beginning of the state's text is dropped."""
    _searched: int = 0
    """While a call is read: number of characters of the held text that have no valid closing mark in them."""
    _fault: str = ""
    """While a call is read: why the text up to the first closing mark is not a call."""
    _is_open: bool = False
    _gap: str = ""
    """White space before the text of a call; it is content if that text is not a call."""

    def __post_init__(self) -> None:
        state = "reasoning" if self.in_reasoning else "start" if self.reasons else "content"
        self._enter(state, trims=self.in_reasoning)

    def push(self, text: str) -> list[AnswerPart]:
        """Add text and return the parts that are now certain."""
        self._held += text
        parts: list[AnswerPart] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[AnswerPart]:
        """End the text, and return the remaining parts."""
        parts: list[AnswerPart] = []
        while self._state == "call":
            if not self._read_marked(len(self._held), parts):
                self._give_up(parts)
            while self._step(parts):
                pass
        held, self._held = self._held, ""
        match self._state:
            case "reasoning":
                _add(parts, (held.lstrip("\n") if self._trims else held).rstrip("\n"), reasoning=True)
            case "json":
                self._read_json(held, parts)
            case _:
                if self.num_calls:
                    held = held.rstrip()
                _add(parts, held.lstrip() if self._trims else held)
        return parts

    def _step(self, parts: list[AnswerPart]) -> bool:
        """Process the held text up to one mark; return whether to continue."""
        match self._state:
            case "start":
                return self._start()
            case "reasoning":
                return self._reason(parts)
            case "content":
                return self._say(parts)
            case "call":
                return self._call(parts)
            case _:
                return False

    def _start(self) -> bool:
        begun = self._held.lstrip()
        if begun.startswith(THINK):
            self._held = begun[len(THINK) :]
            self._enter("reasoning", trims=True)
            return True
        if THINK.startswith(begun):
            return False
        self._enter("content", trims=False)
        return True

    def _reason(self, parts: list[AnswerPart]) -> bool:
        text = self._held.lstrip("\n") if self._trims else self._held
        before, mark, after = text.partition(END_THINK)
        if mark:
            _add(parts, before.rstrip("\n"), reasoning=True)
            self._held = after
            self._enter("content", trims=True)
            return True
        keep = len(text) - len(_without_begun(text, END_THINK).rstrip("\n"))
        self._give(parts, text, keep, reasoning=True)
        return False

    def _say(self, parts: list[AnswerPart]) -> bool:
        text = self._held.lstrip() if self._trims else self._held
        if self._trims and not text:
            return False
        if self.calls == "json" and may_be_json_call(text):
            if text.strip():
                self._state = "json"
            return False
        if self.calls != "hermes":
            self.calls = "none"
            self._give(parts, text, 0)
            return False
        before, mark, after = text.partition(OPEN)
        if mark:
            content = before.rstrip()
            _add(parts, content)
            self._held = after
            self._enter("call", trims=False)
            self._gap = before[len(content) :]
            return True
        self._give(parts, text, len(text) - len(_without_begun(text, OPEN).rstrip()))
        return False

    def _call(self, parts: list[AnswerPart]) -> bool:
        """Read a call up to the first closing mark that is not part of a value."""
        while (end := self._held.find(CLOSE, self._searched)) >= 0:
            self._searched = end + len(CLOSE)
            if self._read_marked(end, parts):
                return True
            if not self._is_open:
                self._give_up(parts)
                return True
        return False

    def _read_marked(self, end: int, parts: list[AnswerPart]) -> bool:
        """Parse the held text up to `end` as a call; return whether this text is a call."""
        try:
            call = read_marked_call(self._held[:end], self.tools)
        except MalformedCall as error:
            self._fault = self._fault or str(error)
            self._is_open = error.is_open
            return False
        self._add_call(call, parts)
        self._held = self._held[end + len(CLOSE) :]
        self._enter("content", trims=True)
        return True

    def _give_up(self, parts: list[AnswerPart]) -> None:
        """Return the held text up to the first closing mark as content, because no call ends there or later."""
        body, closed, self._held = self._held.partition(CLOSE)
        text = OPEN + body + closed
        self.malformed.append(Malformed(text, self._fault))
        _add(parts, self._gap + text)
        self._enter("content", trims=self.num_calls > 0)

    def _read_json(self, text: str, parts: list[AnswerPart]) -> None:
        try:
            for call in read_json_calls(text, self.tools):
                self._add_call(call, parts)
        except NoCall:
            _add(parts, text)
        except MalformedCall as error:
            self.malformed.append(Malformed(text, str(error)))
            _add(parts, text)

    def _add_call(self, call: ToolCall, parts: list[AnswerPart]) -> None:
        self.num_calls += 1
        if self.max_calls is None or self.num_calls <= self.max_calls:
            parts.append(call)

    def _enter(self, state: str, *, trims: bool) -> None:
        self._state, self._trims = state, trims
        self._searched, self._fault, self._is_open = 0, "", False

    def _give(self, parts: list[AnswerPart], text: str, keep: int, *, reasoning: bool = False) -> None:
        """Add `text` to `parts`, but hold the last `keep` characters of the text."""
        certain = text[: len(text) - keep]
        self._held = text[len(text) - keep :]
        if certain:
            self._trims = False
            _add(parts, certain, reasoning=reasoning)


def read_answer(text: str, reader: AnswerReader) -> list[AnswerPart]:
    """Return the parts of a complete text, with neighbours of the same kind joined."""
    return joined([*reader.push(text), *reader.finish()])


def joined(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    result: list[AnswerPart] = []
    for part in parts:
        last = result[-1] if result else None
        if isinstance(part, TextPart) and isinstance(last, TextPart) and part.reasoning == last.reasoning:
            result[-1] = TextPart(last.text + part.text, part.reasoning)
        else:
            result.append(part)
    return result


def content_of(parts: Iterable[AnswerPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPart) and not part.reasoning)


def reasoning_of(parts: Iterable[AnswerPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPart) and part.reasoning)


def calls_of(parts: Iterable[AnswerPart]) -> list[ToolCall]:
    return [part for part in parts if isinstance(part, ToolCall)]


def _add(parts: list[AnswerPart], text: str, *, reasoning: bool = False) -> None:
    if text:
        parts.append(TextPart(text, reasoning))


def begun_chars(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


def _without_begun(text: str, mark: str) -> str:
    return text[: len(text) - begun_chars(text, mark)]
