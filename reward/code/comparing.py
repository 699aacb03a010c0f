"""Comparison of a program's output with the right one. Pure."""

from __future__ import annotations

import math
from typing import Literal

Compare = Literal["lines", "tokens", "exact"]


def equal_outputs(found: str, right: str, compare: Compare = "lines", tolerance: float = 0.0) -> bool:
    """Return whether two outputs are equal: `exact`; `tokens`, the words between white space; or `lines`, without white space
    at their ends and without empty lines at the end. With a `tolerance` words that are numbers may differ by it, absolutely or
    relatively."""
    if compare == "exact":
        return found == right
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
