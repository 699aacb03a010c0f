"""pass@k by all subsets, consensus by hand, intervals by their promise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from paceline.apps.evaluation.statistics import (
    SIGN_FLIPS,
    bootstrap_gap,
    bootstrap_means,
    consensus,
    estimate,
    paired_p,
    pass_at_k,
)


@pytest.mark.parametrize("n", range(1, 13))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_completion(n: int) -> None:
    for c in range(n + 1):
        correct = [index < c for index in range(n)]
        for k in range(1, n + 1):
            subsets = [any(subset) for subset in itertools.combinations(correct, k)]
            assert pass_at_k(n, c, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_pass_at_k_refuses_counts_that_cannot_be(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"n {n}, c {c}, k {k}"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("answers", "scores", "expected"),
    [
        (["7", "7", "8"], [1, 1, 0], 1.0),
        (["7", "8", "8"], [1, 0, 0], 0.0),
        (["7", "8"], [1, 0], 0.5),
        ([None, None, "8"], [0, 0, 1], 1.0),
        ([None, None], [0, 0], 0.0),
        (["7", "7", "8"], [1, 0, 0], 0.5),
    ],
)
def test_consensus_is_the_score_of_the_most_frequent_answer(
    answers: list[str | None], scores: list[float], expected: float
) -> None:
    assert consensus(answers, scores) == expected


def test_an_interval_holds_the_mean_and_is_a_function_of_the_seed() -> None:
    values = np.array([0.0, 1.0, 1.0, 0.0, 1.0] * 20)
    first = estimate(values, 3)
    assert first == estimate(values, 3)
    assert first != estimate(values, 4)
    assert first.low < first.value == 0.6 < first.high
    # The normal approximation: 1.96 * sqrt(0.6 * 0.4 / 100) = 0.096.
    assert (first.high - first.low) / 2 == pytest.approx(0.096, abs=0.015)


def test_resamples_of_many_problems_come_in_parts_of_bounded_memory() -> None:
    means = bootstrap_means(np.ones(5000), 0)
    assert means.shape == (2000,)
    assert set(means) == {1.0}


def test_no_problems_have_no_estimate() -> None:
    with pytest.raises(ValueError, match="at least one"):
        estimate(np.array([]), 0)


def test_a_gap_is_that_of_the_best_and_the_worst_group() -> None:
    groups = [np.ones(50), np.repeat([0.0, 1.0], 25), np.zeros(50)]
    assert tuple(bootstrap_gap(groups, 0)) == (1.0, 1.0, 1.0)
    value, low, high = bootstrap_gap(groups[:2], 0)
    assert value == 0.5
    assert low < 0.5 < high
    assert tuple(bootstrap_gap(groups[:1], 0)) == (0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="at least one group"):
        bootstrap_gap([], 0)


def test_the_paired_p_counts_signs_that_are_as_extreme() -> None:
    # Of the 16 signs of four equal differences, all + and all - have a sum as far from 0: p = 2/16.
    assert paired_p(np.ones(4), 0) == pytest.approx(2 / 16, abs=0.01)
    # 1, 1, 1, -1: besides those, one minus or one plus among four: (2 + 8) / 16.
    assert paired_p(np.array([1.0, 1.0, 1.0, -1.0]), 0) == pytest.approx(10 / 16, abs=0.02)
    assert paired_p(np.zeros(5), 0) == 1.0
    assert paired_p(np.full(40, 0.1), 0) == 1 / (1 + SIGN_FLIPS)
    with pytest.raises(ValueError, match="at least one problem"):
        paired_p(np.zeros(0), 0)
