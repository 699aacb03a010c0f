"""Gets the prompt and the columns for reward functions from a row of a data set. Pure. Promise: everything that a draw
reads was checked in the same way when the data set was opened. A row whose right answer is not among its answers
(`data.choices`) is refused, never scored. TRL's and NeMo RL's names of columns need no key."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import DataError
from paceline.spec import DataSection
from paceline.spec.sections.data import ChoicesSection
from paceline.spec.templates import as_lines, fill, placeholders


def conversation_key(row: Mapping[str, Any], data: DataSection) -> str | None:
    """Return the column of whole conversations: `data.messages_key`, or TRL's `messages` if a row has no prompt."""
    if data.messages_key is not None:
        return data.messages_key
    return "messages" if "messages" in row and data.prompt_key not in row else None


def has_text(row: Mapping[str, Any], data: DataSection) -> bool:
    """Return whether a row is TRL's text to imitate as a whole: it has the column `text` and no prompt."""
    return "text" in row and data.prompt_key not in row and data.messages_key is None


def with_keys_of_row(row: Mapping[str, Any], data: DataSection) -> DataSection:
    """Return `data` with NeMo RL's columns `input` and `output` as prompt and completion, if a row has only these."""
    if data.prompt_key == "prompt" and "prompt" not in row and {"input", "output"} <= row.keys():
        return data.model_copy(update={"prompt_key": "input", "completion_key": "output"})
    return data


LETTERS = string.ascii_uppercase
TEXTS, LETTER = "answer_choices", "answer_letter"
"""Columns that `with_choices` adds to a row."""


def with_choices(row: Mapping[str, Any], section: ChoicesSection) -> dict[str, Any]:
    """Return the row with its answers in the column `answer_choices` and the right letter in `answer_letter`. Raises
    DataError if a column is missing, if there are fewer than two answers, or if the right answer is not among them."""
    texts, labels = _answers(row, section.keys)
    if not 2 <= len(texts) <= len(LETTERS):
        raise DataError(
            f"columns {list(section.keys)} have {len(texts)} answers, but must have 2 to {len(LETTERS)}; correct the row"
        )
    right = 0 if section.answer_key is None else _right(row, section.answer_key, labels, len(texts))
    order = list(range(len(texts)))
    if section.shuffle:
        order.sort(key=lambda index: hashlib.sha256(f"{index}/{chr(0).join(texts)}".encode()).digest())
    return {**row, TEXTS: [texts[index] for index in order], LETTER: LETTERS[order.index(right)]}


def lettered(texts: Sequence[str]) -> str:
    """Return the list of answers for a prompt, one on each line: `A. …`."""
    return "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=False))


def _answers(row: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return the texts of the answers and their labels, which are empty if the row has none."""
    for key in keys:
        if key not in row:
            raise DataError(
                f"data.choices.keys names {key!r}, but the columns are {sorted(row)}; name the columns with the answers"
            )
    if len(keys) > 1:
        return [_text(row[key], key) for key in keys], []
    value, labels = row[keys[0]], []
    if isinstance(value, Mapping) and {"text", "label"} <= value.keys():
        value, labels = value["text"], [str(label) for label in value["label"]]
    if not isinstance(value, list | tuple):
        raise DataError(
            f"column {keys[0]!r} is {value!r:.80}, but must be a list of answers; name its column in data.choices.keys"
        )
    if labels and len(labels) != len(value):
        raise DataError(f"column {keys[0]!r} has {len(value)} texts and {len(labels)} labels; correct the row")
    return [_text(each, keys[0]) for each in value], labels


def _text(value: Any, key: str) -> str:
    text = "" if value is None else str(value).strip()
    if not text:
        raise DataError(f"column {key!r} has an answer without text; fill it, or remove the row")
    return text


def _right(row: Mapping[str, Any], key: str, labels: list[str], count: int) -> int:
    value = row.get(key)
    text = str(value).strip()
    if text in labels:
        return labels.index(text)
    if not labels and text.isdecimal() and int(text) < count:
        return int(text)
    if not labels and len(text) == 1 and text in LETTERS[:count]:
        return LETTERS.index(text)
    known = ", ".join(labels) if labels else f"0 to {count - 1}, or {LETTERS[0]} to {LETTERS[count - 1]}"
    raise DataError(f"column {key!r} is {value!r:.80}, but must name one of the {count} answers: {known}")


CHOICES = "choices"
"""Name that a template has in braces for the lettered list of answers."""


def is_made(data: DataSection) -> bool:
    """Return whether prompts or columns are made from a row, so that no single column shows whether the row is
    usable."""
    return data.prompt_template is not None or data.choices is not None


def prompt_of(row: Mapping[str, Any], data: DataSection) -> tuple[Any, dict[str, Any]]:
    """Return the prompt of a row, text or messages, and its other columns. An empty `prompt_key` without a template
    gives an empty conversation. Raises DataError."""
    columns = dict(row) if data.choices is None else with_choices(row, data.choices)
    if data.prompt_template is not None:
        return _filled(data.prompt_template, columns), columns
    if not data.prompt_key:
        return [], columns
    if data.prompt_key not in columns:
        raise DataError(
            f"data.prompt_key is {data.prompt_key!r}, but the columns are {sorted(row)}; set it to one of them"
        )
    return columns.pop(data.prompt_key), columns


def columns_of(columns: tuple[str, ...], data: DataSection) -> tuple[str, ...]:
    """Return the columns that reward functions get for rows with `columns`."""
    added = () if data.choices is None else (TEXTS, LETTER)
    own = (name for name in columns if data.prompt_template is not None or name != data.prompt_key)
    return (*own, *(name for name in added if name not in columns))


def read_columns(data: DataSection) -> tuple[str, ...]:
    """Return the columns of the data set that decide whether a row is usable."""
    found = placeholders(data.prompt_template or "") or {data.prompt_key}
    if data.choices is not None:
        found |= {*data.choices.keys, data.choices.answer_key or data.choices.keys[0]}
    return tuple(sorted(found))


def _filled(template: str, columns: Mapping[str, Any]) -> str:
    values = {**columns, CHOICES: lettered(columns[TEXTS])} if TEXTS in columns else columns
    for name in sorted(placeholders(template)):
        if name not in values:
            raise DataError(
                f"data.prompt_template names {{{name}}}, but the columns are {sorted(values)}; name one of them"
            )
        if values[name] is None:
            raise DataError(f"column {name!r} is null, and data.prompt_template names it; fill it, or remove the row")
    return fill(template, values, as_lines)
