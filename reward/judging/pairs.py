"""Pairs of a group's completions, and scores from their comparisons. Pure.

Suffix: C completions of a group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

PRIOR = 0.25
"""Wins that each side of a compared pair gets beforehand, so that a completion that always won has a finite strength."""
MAX_ROUNDS = 500
TOLERANCE = 1e-9

Pair = tuple[int, int]


def balanced_pairs(num_completions: int, max_pairs: int | None = None) -> list[Pair]:
    """Return up to `max_pairs` pairs i < j, neighbours on a circle first: every completion is compared about as often."""
    found: list[Pair] = []
    for distance in range(1, num_completions // 2 + 1):
        for first in range(num_completions):
            second = (first + distance) % num_completions
            pair = (min(first, second), max(first, second))
            if pair not in found[-num_completions:]:
                found.append(pair)
    return found[:max_pairs]


def win_rates(num_completions: int, results: Mapping[Pair, float]) -> list[float | None]:
    """Return [C] mean result of each completion's comparisons, a tie half; None for one that was never compared.

    results: for a pair (i, j) the share of wins of i, from 0 to 1.
    """
    shares: list[list[float]] = [[] for _ in range(num_completions)]
    for (first, second), share in results.items():
        shares[first].append(share)
        shares[second].append(1.0 - share)
    return [sum(each) / len(each) if each else None for each in shares]


def bradley_terry(num_completions: int, results: Mapping[Pair, float]) -> list[float | None]:
    """Return [C] the chance of each completion to beat another compared one of the group, averaged over those; None for one
    that was never compared.

    Strengths p maximise Σ w_ij log(p_i / (p_i + p_j)) (Bradley and Terry 1952) with PRIOR wins added to both sides of each
    compared pair, by the iteration of Hunter 2004, p_i = W_i / Σ_j n_ij / (p_i + p_j), which rises at every step.
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
