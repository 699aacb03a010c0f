"""Rows with a question and several answers (`data.choices`): their texts, and the letter of the right one. Pure.

Promise: a row whose right answer is not among its answers is refused, never scored.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import DataError
from paceline.spec.sections.data import ChoicesSection

LETTERS = string.ascii_uppercase
TEXTS, LETTER = "answer_choices", "answer_letter"
"""Columns that a row gets."""


def with_choices(row: Mapping[str, Any], section: ChoicesSection) -> dict[str, Any]:
    """Return the row with its answers in the column `answer_choices` and the right letter in `answer_letter`. Raises DataError:
    no column, fewer than two answers, or a right answer that is not among them."""
    texts, labels = _answers(row, section.keys)
    if not 2 <= len(texts) <= len(LETTERS):
        raise DataError(
            f"columns {list(section.keys)} have {len(texts)} answers, must have 2 to {len(LETTERS)}; correct the row"
        )
    right = 0 if section.answer_key is None else _right(row, section.answer_key, labels, len(texts))
    order = list(range(len(texts)))
    if section.shuffle:
        order.sort(key=lambda index: hashlib.sha256(f"{index}/{chr(0).join(texts)}".encode()).digest())
    return {**row, TEXTS: [texts[index] for index in order], LETTER: LETTERS[order.index(right)]}


def lettered(texts: Sequence[str]) -> str:
    """Return the list of answers as a prompt shows it, a line each: `A. …`."""
    return "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=False))


def _answers(row: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return the texts of the answers and their labels, which are empty where the row has none."""
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
            f"column {keys[0]!r} is {value!r:.80}, must be a list of answers; name its column in data.choices.keys"
        )
    if labels and len(labels) != len(value):
        raise DataError(
            f"column {keys[0]!r} has {len(value)} texts and {len(labels)} labels; correct the row"
        )
    return [_text(each, keys[0]) for each in value], labels


def _text(value: Any, key: str) -> str:
    text = "" if value is None else str(value).strip()
    if not text:
        raise DataError(f"column {key!r} has an answer without text; fill it, or remove the row")
    return text


def _right(row: Mapping[str, Any], key: str, labels: list[str], count: int) -> int:
    """Return the index of the right answer."""
    value = row.get(key)
    text = str(value).strip()
    if text in labels:
        return labels.index(text)
    if not labels and text.isdecimal() and int(text) < count:
        return int(text)
    if not labels and len(text) == 1 and text in LETTERS[:count]:
        return LETTERS.index(text)
    known = ", ".join(labels) if labels else f"0 to {count - 1}, or {LETTERS[0]} to {LETTERS[count - 1]}"
    raise DataError(f"column {key!r} is {value!r:.80}, must name one of the {count} answers: {known}")
