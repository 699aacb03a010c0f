"""From a row of a data set to its prompt and to the columns that reward functions get. Pure.

Promise: what is read here at the time of a draw was checked, in the same way, when the data set was opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.data.choices import LETTER, TEXTS, lettered, with_choices
from paceline.errors import DataError
from paceline.spec import DataSection
from paceline.spec.templates import as_lines, fill, placeholders

CHOICES = "choices"
"""Name in a template for the lettered list of answers."""


def is_made(data: DataSection) -> bool:
    """Return whether prompts or columns are made from a row, so that its column alone does not say whether it is usable."""
    return data.prompt_template is not None or data.choices is not None


def prompt_of(row: Mapping[str, Any], data: DataSection) -> tuple[Any, dict[str, Any]]:
    """Return the prompt of a row, a text or messages, and its other columns; an empty `prompt_key` without a template gives an
    empty conversation. Raises DataError."""
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
    """Return the columns that reward functions get of rows with `columns`."""
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
            raise DataError(
                f"column {name!r} is null, and data.prompt_template names it; fill it, or remove the row"
            )
    return fill(template, values, as_lines)
