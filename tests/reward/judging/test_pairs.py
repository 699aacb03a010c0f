"""Pairs and scores from comparisons, with numbers worked out by hand."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest

from paceline.reward.judging.verdicts import PRIOR, balanced_pairs, bradley_terry, win_rates


@pytest.mark.parametrize("num", [0, 1, 2, 3, 4, 7, 8])
def test_all_pairs_once(num: int) -> None:
    assert sorted(balanced_pairs(num)) == list(itertools.combinations(range(num), 2))


def test_fewer_pairs_are_spread_evenly() -> None:
    counts = Counter(itertools.chain.from_iterable(balanced_pairs(8, 16)))
    assert set(counts.values()) == {4}
    assert len(counts) == 8


def test_win_rates_count_ties_half_and_leave_out_what_was_not_compared() -> None:
    assert win_rates(4, {(0, 1): 1.0, (0, 2): 0.5}) == [0.75, 0.0, 0.5, None]


def test_strengths_of_two() -> None:
    # p0 / p1 = (1 + prior) / prior, so the chance of the winner is (1 + prior) / (1 + 2 · prior).
    first, second = bradley_terry(2, {(0, 1): 1.0})
    assert first == pytest.approx((1 + PRIOR) / (1 + 2 * PRIOR), abs=1e-6)
    assert second == pytest.approx(PRIOR / (1 + 2 * PRIOR), abs=1e-6)


def test_strengths_make_the_likelihood_greatest() -> None:
    results = {(0, 1): 1.0, (1, 2): 0.5, (0, 2): 1.0, (2, 3): 1.0, (0, 3): 0.0}
    scores = bradley_terry(4, results)

    def loss(logits: list[float]) -> float:
        def chance(i: int, j: int) -> float:
            return 1 / (1 + math.exp(logits[j] - logits[i]))

        return -sum(
            (share + PRIOR) * math.log(chance(i, j)) + (1 - share + PRIOR) * math.log(chance(j, i))
            for (i, j), share in results.items()
        )

    logits = [0.0] * 4
    for _ in range(20_000):  # plain gradient descent by differences
        gradient = []
        for i in range(4):
            up, down = list(logits), list(logits)
            up[i], down[i] = up[i] + 1e-5, down[i] - 1e-5
            gradient.append((loss(up) - loss(down)) / 2e-5)
        logits = [x - 0.1 * g for x, g in zip(logits, gradient, strict=True)]
        if max(map(abs, gradient)) < 1e-7:
            break
    expected = [sum(1 / (1 + math.exp(logits[j] - logits[i])) for j in range(4) if j != i) / 3 for i in range(4)]
    assert scores == pytest.approx(expected, abs=1e-5)


def test_who_was_never_compared_has_no_score_and_disturbs_nobody() -> None:
    assert bradley_terry(3, {}) == [None, None, None]
    assert bradley_terry(3, {(0, 1): 0.5}) == [pytest.approx(0.5), pytest.approx(0.5), None]
