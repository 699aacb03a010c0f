"""A choice of an answer, and the interface for each route's shape of answers: whole, or as the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.chat.answer_reader import AnswerPart, calls_of, content_of, reasoning_of
from paceline.chat.call_formats import ToolCall
from paceline.chat.messages import Json
from paceline.errors import PacelineError
from paceline.groups import IntArray, Version, VersionSpan
from paceline.services.common.serving.json_http import error_answer


@dataclass(frozen=True)
class Echo:
    """The prompt as a part of an answer, with its log-probabilities if they were requested."""

    logprobs: Sequence[float] | None = None
    """[P] log-probabilities of the prompt's tokens at temperature 1; the first value is NaN."""
    top_ids: Sequence[int] = ()
    """[P] id of the likeliest token at each position; the first id is -1."""
    top_logprobs: Sequence[float] = ()
    """[P] log-probabilities of `top_ids`."""
    version: tuple[int, ...] | None = None
    """Version that computed the log-probabilities."""


@dataclass(frozen=True)
class Choice:
    """A finished completion, up to and including its stop string if it has one."""

    index: int
    prompt_ids: IntArray
    parts: Sequence[AnswerPart]
    """Content, reasoning and calls, in order."""
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    spans: tuple[VersionSpan, ...]
    finish_reason: str
    """`stop` or `length`."""
    text: str
    """The whole completion, as reward functions read it."""
    echo: Echo | None = None
    """The prompt, if the answer begins with it."""

    @property
    def content(self) -> str:
        return content_of(self.parts)

    @property
    def reasoning(self) -> str:
        return reasoning_of(self.parts)

    @property
    def calls(self) -> list[ToolCall]:
        return calls_of(self.parts)


@dataclass(frozen=True)
class Delta:
    """New parts and tokens since the last delta of the same choice."""

    index: int
    parts: Sequence[AnswerPart]
    token_ids: list[int]
    logprobs: list[float]
    offset: int
    """Number of characters of content before `parts`."""
    num_calls: int
    """Number of calls before `parts`."""
    spans: tuple[VersionSpan, ...]
    """Version spans of the whole choice so far."""


def version_name(version: tuple[int, ...]) -> str:
    return f"{version[0]}.{version[1]}"


def model_name(run_id: str, version: tuple[int, ...]) -> str:
    return f"{run_id}@{version_name(version)}"


class Event(NamedTuple):
    """One server-sent event."""

    body: Json
    name: str = ""


class Frame:
    """The shape of one answer."""

    ends_with_mark = True
    """True if a stream ends with the line `[DONE]`."""

    def __init__(self, answer_id: str, run_id: str, at_first: Version) -> None:
        """`at_first` is the version when the request arrived."""
        self._id, self._run_id, self._at_first = answer_id, run_id, at_first
        self._created_s = int(time.time())

    def whole(self, choices: Sequence[Choice]) -> Json:
        """Return the answer to a request without `stream`."""
        raise NotImplementedError

    def begin(self, num_choices: int) -> list[Event]:
        """Return the events before the first delta."""
        return []

    def add(self, delta: Delta) -> list[Event]:
        """Return the events for `delta`: the new parts and tokens of one choice."""
        raise NotImplementedError

    def end(self, choice: Choice) -> list[Event]:
        """Return the events at the end of a choice."""
        raise NotImplementedError

    def finish(self, choices: Sequence[Choice]) -> list[Event]:
        """Return the events at the end of the answer."""
        raise NotImplementedError

    def fail(self, error: PacelineError) -> list[Event]:
        """Return the events of an error in a stream."""
        return [Event(error_answer(error)[1])]


def usage(choices: Sequence[Choice]) -> Json:
    """Return token counts; a prompt that several choices share counts once."""
    prompts = {id(choice.prompt_ids): len(choice.prompt_ids) for choice in choices}
    prompt_tokens = sum(prompts.values())
    completion_tokens = sum(len(choice.token_ids) for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def ranges(spans: Iterable[VersionSpan]) -> list[list[int]]:
    """Return version spans in the form of the field `versions`."""
    return [list(span[:4]) for span in spans]
