"""Gaps of ascending numbers: round trips, sizes, and input that no encoder has made."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.weights.format.delta_codec import Gaps, decode_gaps, encode_gaps, parameter


class Recorded:
    """What an encoder made, as a source."""

    def __init__(self, gaps: Gaps | None) -> None:
        self._numbers = [] if gaps is None else [gaps.num_unary]
        self._parts = [] if gaps is None else [gaps.unary, gaps.low]

    def number(self) -> int:
        return self._numbers.pop(0)

    def part(self, num_bytes: int) -> np.ndarray:
        if not self._parts:
            return np.empty(0, np.uint8)
        part = self._parts.pop(0)
        if len(part) != num_bytes:
            raise ValueError(f"{len(part)} bytes, not {num_bytes}")
        return part


def size_bits(gaps: Gaps) -> int:
    return 8 * (len(gaps.unary) + len(gaps.low))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_any_numbers_come_back(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 3000))
    numbers = np.array(sorted(data.draw(st.sets(st.integers(0, size - 1)))), np.int64)
    np.testing.assert_array_equal(decode_gaps(Recorded(encode_gaps(numbers, size)), len(numbers), size), numbers)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_numbers_far_apart_come_back(dtype: type) -> None:
    numbers = np.array([0, 5, 2**31 - 2], dtype)
    np.testing.assert_array_equal(decode_gaps(Recorded(encode_gaps(numbers, 2**31)), 3, 2**31), numbers)


def test_none_and_all_cost_nothing() -> None:
    assert encode_gaps(np.empty(0, np.int64), 100) is None
    assert encode_gaps(np.arange(100), 100) is None
    np.testing.assert_array_equal(decode_gaps(Recorded(None), 100, 100), np.arange(100))


@pytest.mark.parametrize("density", [0.003, 0.05, 0.3, 0.7, 0.95])
def test_the_size_is_near_the_entropy(density: float) -> None:
    size = 200_000
    numbers = np.flatnonzero(np.random.default_rng(0).random(size) < density)
    share = len(numbers) / size
    entropy = -size * (share * np.log2(share) + (1 - share) * np.log2(1 - share))
    gaps = encode_gaps(numbers, size)
    assert gaps is not None
    assert entropy <= size_bits(gaps) < 1.07 * entropy


def test_input_that_cannot_be_right_is_refused() -> None:
    gaps = encode_gaps(np.array([3, 700, 900]), 1000)
    assert gaps is not None
    for broken, count, size in (
        (gaps._replace(num_unary=10**9), 3, 1000),
        (gaps, 4, 1000),
        (gaps, 3, 10),
        (gaps._replace(low=gaps.low[:-1]), 3, 1000),
        (gaps._replace(unary=gaps.unary & 0), 3, 1000),
        (gaps, 1001, 1000),
    ):
        with pytest.raises(ValueError, match=r"bits|gaps|bytes|elements|number"):
            decode_gaps(Recorded(broken), count, size)


@pytest.mark.parametrize("density", [1e-4, 1e-3, 0.01, 0.05, 0.2, 0.35, 0.5])
def test_the_parameter_costs_little_more_than_the_best_one(density: float) -> None:
    size = 400_000
    numbers = np.flatnonzero(np.random.default_rng(0).random(size) < density)
    gaps = np.diff(numbers, prepend=-1) - 1
    costs = [int((gaps >> k).sum()) + len(gaps) * (1 + k) for k in range(16)]
    assert costs[parameter(len(numbers), size)] < 1.01 * min(costs)


def test_the_parameter_of_nothing_and_of_everything() -> None:
    assert parameter(0, 0) == 0
    assert parameter(7, 7) == 0
    assert parameter(1, 1 << 40) == 39


def test_gaps_are_zeros_up_to_a_one_and_low_bits_lowest_first() -> None:
    # k is 3 for 3 of 30: gaps 0, 5 and 13 are quotients 0, 0 and 1, and low parts 000, 101 and 101.
    gaps = encode_gaps(np.array([0, 6, 20]), 30)
    assert gaps is not None
    assert parameter(3, 30) == 3
    assert gaps.num_unary == 4
    assert np.unpackbits(gaps.unary).tolist() == [1, 1, 0, 1, 0, 0, 0, 0]
    assert [np.unpackbits(plane)[:3].tolist() for plane in gaps.low[:, None]] == [
        [0, 1, 1],
        [0, 0, 0],
        [0, 1, 1],
    ]
