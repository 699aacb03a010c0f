"""Classes of elements by magnitude: they are a partition, and bounds that no encoder chooses are refused."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.weights.format.delta_codec import BLOCK, check_bounds, choose_bounds, listed

SIZE = BLOCK + 5000


def normal_bits() -> np.ndarray:
    values = np.random.default_rng(0).normal(0, 0.02, SIZE).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def test_classes_are_the_small_elements_once_each() -> None:
    bits = normal_bits()
    bounds = choose_bounds(bits)
    assert len(bounds) > 2
    exponents = bits >> 7 & 0xFF
    classes = listed(bits, bounds)
    for positions, high, low in zip(classes, bounds, (*bounds[1:], 0), strict=True):
        np.testing.assert_array_equal(positions, np.flatnonzero((exponents < high) & (exponents >= low)))
    assert sum(map(len, classes)) < 0.25 * SIZE
    shares = [len(positions) for positions in classes]
    assert sorted(shares, reverse=True) == shares


@pytest.mark.parametrize(
    "bits",
    [
        np.zeros(100, np.uint16),
        np.full(SIZE, 0x3F80, np.uint16),
        np.zeros(SIZE, np.uint16),
        np.zeros(SIZE, np.uint32),
        np.zeros(SIZE, np.uint8),
    ],
    ids=["few", "ones", "zeros", "float32", "bytes"],
)
def test_elements_that_have_no_classes_have_no_bounds(bits: np.ndarray) -> None:
    assert choose_bounds(bits) == ()
    assert listed(bits, ()) == []


@pytest.mark.parametrize("bounds", [(256,), (5, 5), (4, 6), tuple(range(9, 0, -1))])
def test_bounds_that_nobody_chooses_are_refused(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="class bounds"):
        check_bounds(bounds, np.zeros(10, np.uint16))
    with pytest.raises(ValueError, match="class bounds"):
        check_bounds((1,), np.zeros(10, np.uint32))
