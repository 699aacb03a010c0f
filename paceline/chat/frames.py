"""The interface of an answer's shape: whole, or as the events of a stream. Each route of the API has its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from paceline.chat.choices import Choice, Delta
from paceline.chat.messages import Json
from paceline.errors import PacelineError
from paceline.groups import VersionSpan


class Event(NamedTuple):
    """One server-sent event."""

    body: Json
    name: str = ""


class Frame(Protocol):
    """The shape of one answer."""

    ends_with_mark: bool
    """True when a stream ends with the line `[DONE]`."""

    def whole(self, choices: Sequence[Choice]) -> Json:
        """Return the answer to a request without `stream`."""

    def begin(self, num_choices: int) -> list[Event]:
        """Return the events before the first delta."""

    def add(self, delta: Delta) -> list[Event]:
        """Return the events of further parts and tokens of one choice."""

    def end(self, choice: Choice) -> list[Event]:
        """Return the events of a choice's end."""

    def finish(self, choices: Sequence[Choice]) -> list[Event]:
        """Return the events after the end of all choices."""

    def fail(self, error: PacelineError) -> list[Event]:
        """Return the events of an error after the stream has begun."""


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
    """Return version spans as the field `versions` has them."""
    return [list(span) for span in spans]
