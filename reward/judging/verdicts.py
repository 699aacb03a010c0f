"""Verdicts in a judge's answers, and the result of several votes. Pure.

Promise: what is no clear verdict is None, never a number.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

MAX_TEXT = 1 << 16
"""Characters at the end of an answer that are searched."""
PREFERENCES = {"a": 1.0, "b": 0.0, "tie": 0.5}
"""Value of an answer for the completion that was shown first."""

Vote = Literal["mean", "median", "majority"]


class Verdict(NamedTuple):
    """A judge's verdict: a score on its scale, or 1, 0.5 or 0 for the first of a pair; with its reasons."""

    value: float
    reasoning: str


def score_verdict(text: str, min_score: float, max_score: float) -> Verdict | None:
    """Return the last JSON object of `text` that has a `score` on the scale; None without one."""

    def value_of(found: dict[str, Any]) -> float | None:
        score = found.get("score")
        if isinstance(score, str):
            try:
                score = float(score)
            except ValueError:
                return None
        if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
            return None
        return float(score) if min_score <= score <= max_score else None

    return _last(text, value_of)


def pair_verdict(text: str) -> Verdict | None:
    """Return the last JSON object of `text` whose `better` is A, B or tie; None without one."""

    def value_of(found: dict[str, Any]) -> float | None:
        better = found.get("better")
        return PREFERENCES.get(better.strip().lower()) if isinstance(better, str) else None

    return _last(text, value_of)


def combined(values: Sequence[float], vote: Vote) -> float:
    """Return the mean, the median or the most frequent of one or more values; of equally frequent ones their mean."""
    if vote == "mean":
        return statistics.fmean(values)
    if vote == "median":
        return float(statistics.median(values))
    counts = Counter(values)
    most = max(counts.values())
    return statistics.fmean(value for value, count in counts.items() if count == most)


def _last(text: str, value_of: Callable[[dict[str, Any]], float | None]) -> Verdict | None:
    found = None
    for item in _objects(text[-MAX_TEXT:]):
        value = value_of(item)
        if value is not None:
            reasoning = item.get("reasoning")
            found = Verdict(value, reasoning if isinstance(reasoning, str) else "")
    return found


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a text, from the front; what is inside of one is not looked at again."""
    decoder, position = json.JSONDecoder(), text.find("{")
    while position >= 0:
        try:
            found, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            end = position + 1
        else:
            if isinstance(found, dict):
                yield found
        position = text.find("{", end)
