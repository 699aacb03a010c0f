"""Reads the inputs of built-in functions: the text of a completion, and a column of the data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.chat.completion_texts import answer_of, message_text


class MissingColumn(LookupError):
    """The data set lacks a required column."""


def completion_text(completion: Any, *, in_reasoning: bool = False) -> str:
    """Return the model's text: `completion` itself, or its last assistant message by `message_text`.

    Raises TypeError unless `completion` is a text, or a list of chat messages with at least one of the assistant.
    """
    if isinstance(completion, str):
        return completion
    if isinstance(completion, list | tuple):
        for message in reversed(completion):
            if isinstance(message, Mapping) and message.get("role") == "assistant":
                return message_text(message, in_reasoning=in_reasoning)
    raise TypeError(
        f"a completion must be text or a list of chat messages with one of the assistant, not {_short(completion)}"
    )


def answer_text(completion: Any) -> str:
    return answer_of(completion_text(completion))


def column_values(columns: Mapping[str, Any], name: str) -> list[Any]:
    """Return column `name`, one value for each completion. Raises MissingColumn with the names of the existing columns."""
    if name not in columns:
        existing = ", ".join(sorted(columns)) or "none"
        raise MissingColumn(
            f"the data set has no column {name!r} (its columns: {existing}); set answer_column in kwargs"
        )
    return list(columns[name])


def _short(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:80]}"
