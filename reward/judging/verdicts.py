"""Parses a judge's verdicts, combines votes, and computes scores from comparisons of pairs. Pure.

Promise: an unclear verdict is None, never a number. Suffix: C completions of a group.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

MAX_TEXT = 1 << 16
"""Number of characters at the end of an answer that are searched for a verdict."""
PREFERENCES = {"a": 1.0, "b": 0.0, "tie": 0.5}
"""Maps a judge's preference to the score of the completion that was shown first."""

Vote = Literal["mean", "median", "majority"]


class Verdict(NamedTuple):
    """A judge's verdict with its reasons: a score on the scale, or 1, 0.5 or 0 for the first completion of a pair."""

    value: float
    reasoning: str


def score_verdict(text: str, min_score: float, max_score: float) -> Verdict | None:
    """Return the verdict of the last JSON object in `text` with a `score` on the scale; None if there is none."""

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
    """Return the verdict of the last JSON object in `text` whose `better` is A, B or tie; None if there is none."""

    def value_of(found: dict[str, Any]) -> float | None:
        better = found.get("better")
        return PREFERENCES.get(better.strip().lower()) if isinstance(better, str) else None

    return _last(text, value_of)


def combined(values: Sequence[float], vote: Vote) -> float:
    """Return the mean, median or most frequent of the values; of several equally frequent values, their mean."""
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


PRIOR = 0.25
"""Number of wins that each completion of a compared pair gets in advance, so that every strength is finite."""
MAX_ROUNDS = 500
TOLERANCE = 1e-9

Pair = tuple[int, int]


def balanced_pairs(num_completions: int, max_pairs: int | None = None) -> list[Pair]:
    """Return up to `max_pairs` pairs i < j, neighbours on a circle first, so that each item is compared about equally
    often."""
    found: list[Pair] = []
    for distance in range(1, num_completions // 2 + 1):
        for first in range(num_completions):
            second = (first + distance) % num_completions
            pair = (min(first, second), max(first, second))
            if pair not in found[-num_completions:]:
                found.append(pair)
    return found[:max_pairs]


def win_rates(num_completions: int, results: Mapping[Pair, float]) -> list[float | None]:
    """Return [C] mean result of each completion's comparisons, a tie as half a win; None for one without comparisons.

    results: for a pair (i, j) the share of wins of i, from 0 to 1.
    """
    shares: list[list[float]] = [[] for _ in range(num_completions)]
    for (first, second), share in results.items():
        shares[first].append(share)
        shares[second].append(1.0 - share)
    return [sum(each) / len(each) if each else None for each in shares]


def bradley_terry(num_completions: int, results: Mapping[Pair, float]) -> list[float | None]:
    """Return [C] each completion's mean chance to beat another compared completion; None if it was never compared.

    Strengths p maximise Σ w_ij log(p_i / (p_i + p_j)) (Bradley and Terry 1952) with PRIOR wins added to both sides of
    each compared pair, by the iteration of Hunter 2004, p_i = W_i / Σ_j n_ij / (p_i + p_j), which rises at every step.
    """
    wins, games = [0.0] * num_completions, 1.0 + 2 * PRIOR
    rivals: list[list[int]] = [[] for _ in range(num_completions)]
    for (first, second), share in results.items():
        wins[first] += share + PRIOR
        wins[second] += 1.0 - share + PRIOR
        rivals[first].append(second)
        rivals[second].append(first)
    compared = [i for i in range(num_completions) if rivals[i]]
    strengths = [1.0] * num_completions
    for _ in range(MAX_ROUNDS):
        before = list(strengths)
        for i in compared:
            strengths[i] = wins[i] / sum(games / (before[i] + before[j]) for j in rivals[i])
        scale = math.exp(sum(math.log(strengths[i]) for i in compared) / max(1, len(compared)))
        strengths = [strength / scale for strength in strengths]
        if all(abs(strengths[i] - before[i]) <= TOLERANCE * before[i] for i in compared):
            break
    return [
        sum(strengths[i] / (strengths[i] + strengths[j]) for j in compared if j != i) / (len(compared) - 1)
        if rivals[i]
        else None
        for i in range(num_completions)
    ]
