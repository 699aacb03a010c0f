"""Numbers as files write them: texts that are numbers, and whether a text says what a column's value is. Pure.

Promise: a number is told from its text without loss, so nothing that was read as a number is compared in another form.
"""

from __future__ import annotations

import re
from typing import Any

WHOLE = re.compile(r"-?(0|[1-9]\d{0,999})", re.ASCII)
NUMBER = re.compile(r"-?(0|[1-9]\d{0,999})(\.\d{1,999})?([eE][+-]?\d{1,3})?", re.ASCII)


def number_of(text: str) -> int | float | None:
    """Return the number that a text is as JSON writes it, else None."""
    if WHOLE.fullmatch(text):
        return int(text)
    return float(text) if NUMBER.fullmatch(text) else None


def as_number(value: Any) -> Any:
    """Return the number of a cell whose form no number has (`0.50` in CSV); any other value as it is."""
    found = number_of(value) if isinstance(value, str) else None
    return value if found is None else found


def says(text: str, value: Any) -> bool:
    """Return whether a text is the one of a column's value. Truth values and numbers that are no integers have several texts in
    files, as `true` and `True`, or `0.5` and `0.50`; the value no longer tells which one it was."""
    if isinstance(value, bool):
        return text.lower() == str(value).lower()
    if isinstance(value, float) and number_of(text) == value:
        return True
    return text == str(value)
