"""Golomb-Rice codes worked out by hand, and round trips."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.weights.rice_code import from_bits, parameter, to_bits


def test_gaps_are_zeros_up_to_a_one_and_low_bits() -> None:
    # Gaps 0, 2, 0, 15: halves 0, 1, 0, 7 in the unary part, and their last bits.
    unary_U, low_L = to_bits(np.array([0, 3, 4, 20]), 1)
    assert "".join(map(str, unary_U)) == "1" + "01" + "1" + "00000001"
    assert low_L.tolist() == [0, 0, 0, 1]
    assert from_bits(unary_U, low_L, 1).tolist() == [0, 3, 4, 20]


def test_low_bits_are_lowest_first() -> None:
    unary_U, low_L = to_bits(np.array([6]), 3)
    assert (unary_U.tolist(), low_L.tolist()) == ([1], [0, 1, 1])


@pytest.mark.parametrize("density", [1e-4, 1e-3, 0.01, 0.05, 0.2, 0.35, 0.5, 0.8])
def test_the_parameter_costs_little_more_than_entropy(density: float) -> None:
    size = 400_000
    numbers_K = np.flatnonzero(np.random.default_rng(0).random(size) < density)
    costs = [sum(map(len, to_bits(numbers_K, k))) for k in range(16)]
    found = costs[parameter(len(numbers_K), size)]
    assert found < 1.01 * min(costs)
    if density < 0.4:
        share = len(numbers_K) / size
        entropy = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
        assert found < 1.05 * entropy * size


def test_the_parameter_of_nothing_and_of_everything() -> None:
    assert parameter(0, 0) == 0
    assert parameter(7, 7) == 0
    assert parameter(1, 1 << 40) == 39


@given(st.sets(st.integers(0, 5000)), st.integers(0, 14))
def test_any_ascending_numbers_come_back(numbers: set[int], k: int) -> None:
    numbers_K = np.array(sorted(numbers), np.int64)
    np.testing.assert_array_equal(from_bits(*to_bits(numbers_K, k), k), numbers_K)


def test_low_bits_that_are_missing_are_refused() -> None:
    unary_U, low_L = to_bits(np.array([3, 9]), 2)
    with pytest.raises(ValueError, match="3 low bits for 2 gaps of 2"):
        from_bits(unary_U, low_L[:-1], 2)
