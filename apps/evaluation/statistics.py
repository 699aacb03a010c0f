"""Computes the statistics of an evaluation: pass@k, cons@k, gaps between groups, and bootstrap intervals over problems.
Pure.

Promise: the same numbers and seed give the same interval. Suffixes: G problems, C completions of a problem, B
resamples.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
SIGN_FLIPS = 20_000
LEVEL = 0.95
"""Share of resamples inside an interval."""

ROUNDING = 1e-6
"""Relative difference up to which numbers count as equal: rewards, whose means are compared, are in float32."""

CHUNK = 1 << 22
"""Largest number of indices that are drawn at a time."""

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Answer = TypeVar("Answer")


class Estimate(NamedTuple):
    value: float
    low: float
    high: float


def below(value: float, bound: float) -> bool:
    """Return whether a number is below a bound by more than ROUNDING times the larger magnitude of the two."""
    return value < bound and not math.isclose(value, bound, rel_tol=ROUNDING)


def differences(ours: Floats, theirs: Floats) -> Floats:
    """Return ours minus theirs, 0 if they are equal up to ROUNDING: means of equal numbers differ by rounding."""
    return np.where(np.isclose(ours, theirs, rtol=ROUNDING, atol=0.0), 0.0, ours - theirs)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that k of n completions, drawn without replacement, include at least one of the c correct
    ones.

    1 - C(n - c, k) / C(n, k): Chen et al., "Evaluating Large Language Models Trained on Code", 2021, equation 1. Raises
    ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, not n {n}, c {c}, k {k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def consensus(
    answers: Sequence[Answer | None], scores: Sequence[float], same: Callable[[Answer, Answer], bool] = operator.eq
) -> float:
    """Return the score of the most frequent answer, or the mean score of equally frequent ones; 0 without any answer.

    `answers` and `scores` are of one problem's completions. An answer joins the first vote whose first answer is equal
    to it by `same`. If the answers of a vote scored differently, the vote has their mean score.
    """
    votes: list[tuple[Answer, list[float]]] = []
    for answer, score in zip(answers, scores, strict=True):
        if answer is None:
            continue
        for first, found in votes:
            if same(first, answer):
                found.append(score)
                break
        else:
            votes.append((answer, [score]))
    if not votes:
        return 0.0
    most = max(len(found) for _, found in votes)
    means = [sum(found) / most for _, found in votes if len(found) == most]
    return sum(means) / len(means)


def drawn(num: int, seed: int) -> Iterator[Indices]:
    """Yield [rows, G] indices of RESAMPLES resamples of `num` items, drawn with replacement, CHUNK at a time."""
    random = np.random.default_rng(seed)
    rows = max(1, CHUNK // max(1, num))
    for start in range(0, RESAMPLES, rows):
        yield random.integers(0, num, (min(rows, RESAMPLES - start), num))


def bootstrap_means(values_G: Floats, seed: int) -> Floats:
    """Return [B] means of resamples of the problems, drawn with replacement."""
    return np.concatenate([values_G[indices].mean(axis=1) for indices in drawn(len(values_G), seed)])


def interval(value: float, resampled_B: Floats) -> Estimate:
    tail = (1.0 - LEVEL) / 2
    low, high = np.quantile(resampled_B, [tail, 1.0 - tail])
    return Estimate(value, float(low), float(high))


def estimate(values_G: Floats, seed: int) -> Estimate:
    """Return the mean of [G] values and its percentile interval over problems. Raises ValueError without values."""
    if not len(values_G):
        raise ValueError("an estimate needs at least one problem")
    return interval(float(values_G.mean()), bootstrap_means(values_G, seed))


def bootstrap_gap(groups: Sequence[Floats], seed: int) -> Estimate:
    """Return the highest mean of several groups of problems minus the lowest, with its interval over resamples within
    each group. Chance alone separates small groups: the interval of equal groups does not reach 0. Raises ValueError
    without groups."""
    if not groups:
        raise ValueError("a gap needs at least one group")
    means = [float(values.mean()) for values in groups]
    resampled = np.stack([bootstrap_means(values, seed + place) for place, values in enumerate(groups)])
    return interval(max(means) - min(means), resampled.max(axis=0) - resampled.min(axis=0))


def paired_p(differences_G: Floats, seed: int) -> float:
    """Return the two-sided p of [G] paired differences: the share of random signs with a sum at least as far from 0.

    p = (1 + extreme draws) / (1 + draws), so it is never 0. Fisher, "The Design of Experiments", 1935, section 21. Raises
    ValueError without differences.
    """
    if not len(differences_G):
        raise ValueError("a paired test needs at least one problem")
    observed, extreme = abs(float(differences_G.sum())) * (1 - ROUNDING), 0
    random, rows = np.random.default_rng(seed), max(1, CHUNK // len(differences_G))
    for start in range(0, SIGN_FLIPS, rows):
        signs = random.integers(0, 2, (min(rows, SIGN_FLIPS - start), len(differences_G))) * 2 - 1
        extreme += int((np.abs(signs @ differences_G) >= observed).sum())
    return (1 + extreme) / (1 + SIGN_FLIPS)
