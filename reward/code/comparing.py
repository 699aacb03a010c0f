"""Comparison of a program's output with the right one. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Literal

Compare = Literal["lines", "tokens", "decimals", "exact"]


def equal_outputs(found: str, right: str, compare: Compare = "lines", tolerance: float = 0.0) -> bool:
    """Return whether two outputs are equal: `exact`; `tokens`, the words between white space; `lines`, without white space at
    their ends and without empty lines at the end; or `decimals`, lines without white space on both sides, which may also be the
    same numbers (LiveCodeBench's `grade_stdio`). With a `tolerance` words that are numbers may differ by it, absolutely or
    relatively."""
    if compare == "exact":
        return found == right
    if compare == "decimals":
        lines, right_lines = ([line.strip() for line in text.strip().split("\n")] for text in (found, right))
        return len(lines) == len(right_lines) and all(map(_same_decimals, lines, right_lines))
    if compare == "tokens":
        return _equal_words(found.split(), right.split(), tolerance)
    lines, right_lines = _lines(found), _lines(right)
    if len(lines) != len(right_lines):
        return False
    if not tolerance:
        return lines == right_lines
    return all(
        _equal_words(a.split(" "), b.split(" "), tolerance) for a, b in zip(lines, right_lines, strict=True)
    )


def equal_values(found: Any, right: Any, tolerance: float = 0.0) -> bool:
    """Return whether a value that a function returned is the right one: both as JSON has them, so a tuple is a list and the keys of
    a mapping are texts; numbers and truth values as Python compares them."""
    if isinstance(right, list | tuple):
        return (
            isinstance(found, list)
            and len(found) == len(right)
            and all(equal_values(a, b, tolerance) for a, b in zip(found, right, strict=True))
        )
    if isinstance(right, Mapping):
        rights = {str(key): value for key, value in right.items()}
        return (
            isinstance(found, dict)
            and found.keys() == rights.keys()
            and all(equal_values(value, rights[key], tolerance) for key, value in found.items())
        )
    if tolerance and isinstance(found, int | float) and isinstance(right, int | float):
        return _is_near(str(found), str(right), tolerance) or found == right
    return bool(found == right)


def _same_decimals(found: str, right: str) -> bool:
    if found == right:
        return True
    try:
        return [Decimal(word) for word in found.split()] == [Decimal(word) for word in right.split()]
    except ArithmeticError:  # a word that is no number, or sNaN
        return False


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _equal_words(found: list[str], right: list[str], tolerance: float) -> bool:
    if len(found) != len(right):
        return False
    return all(a == b or _is_near(a, b, tolerance) for a, b in zip(found, right, strict=True))


def _is_near(found: str, right: str, tolerance: float) -> bool:
    if not tolerance:
        return False
    try:
        a, b = float(found), float(right)
    except ValueError:
        return False
    return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
