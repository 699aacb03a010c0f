"""Parses numbers as files write them, and decides whether a text is the value of a column. Pure. Promise: a number is
recognised without loss, so nothing that was read as a number is compared in another form."""

from __future__ import annotations

import re
from typing import Any

WHOLE = re.compile(r"-?(0|[1-9]\d{0,999})", re.ASCII)
NUMBER = re.compile(r"-?(0|[1-9]\d{0,999})(\.\d{1,999})?([eE][+-]?\d{1,3})?", re.ASCII)


def number_of(text: str) -> int | float | None:
    """Return the number if a text is one in JSON's spelling, else None."""
    if WHOLE.fullmatch(text):
        return int(text)
    return float(text) if NUMBER.fullmatch(text) else None


def as_number(value: Any) -> Any:
    """Return the number in a cell that is text because of its spelling (`0.50` in CSV); any other value unchanged."""
    found = number_of(value) if isinstance(value, str) else None
    return value if found is None else found


def says(text: str, value: Any) -> bool:
    """Return whether a text is a column's value, however the file spells it: `true` or `True`, `0.5` or `0.50`."""
    if isinstance(value, bool):
        return text.lower() == str(value).lower()
    if isinstance(value, float) and number_of(text) == value:
        return True
    return text == str(value)
