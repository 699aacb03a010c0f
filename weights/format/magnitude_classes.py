"""The elements of a tensor by magnitude, in few classes that reader and writer of a delta find alike from the base's bits.

A step of an optimizer is about as large for all weights, a unit in the last place is not, so small weights change their
bits far more often than large ones. Class 0 is the large ones, by far the most, and is never listed: its elements go by their positions.
The other classes are listed, each with a quarter of the elements of the one before, so listing them costs little.

The promise: equal bits and bounds give equal classes, on every machine.

Axes: N elements of the tensor, M of them in listed classes.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[Any]
"""[N] unsigned integers: the bits of a tensor's elements, 1, 2, 4 or 8 bytes each."""
Places = npt.NDArray[np.int32]

MAGNITUDE_BITS, MAGNITUDE_SHIFT = 0x7FFF, 7
"""Of a bfloat16 the shifted magnitude is the exponent; of float16 some bits that mean its magnitude as well."""
MOST_BOUNDS = 6
BLOCK = 1 << 17
"""Elements that are looked at together: what they need fits into a core's cache."""
_LISTED_SHARE, _NEXT_SHARE = 0.2, 0.3
_FEWEST_LISTED = 1024
"""A class has to be worth its counts and code tables."""
_SAMPLE = 1 << 14


def choose_bounds(bits_N: Bits) -> tuple[int, ...]:
    """Return the bounds for these bits, descending: class 0 is [bounds[0], ∞), class c [bounds[c], bounds[c - 1]), the last
    one goes down to 0. Empty where the elements are few or of no type with 16 bits."""
    if bits_N.dtype.itemsize != 2 or len(bits_N) < 8 * _FEWEST_LISTED:
        return ()
    sample = bits_N[:: max(1, len(bits_N) // _SAMPLE)]
    counts = np.bincount((sample & MAGNITUDE_BITS) >> MAGNITUDE_SHIFT, minlength=256)
    below = np.concatenate([[0], np.cumsum(counts)]) / len(sample)
    bounds: list[int] = []
    share = _LISTED_SHARE
    while len(bounds) < MOST_BOUNDS:
        bound = int(np.searchsorted(below, share, side="right")) - 1
        if below[bound] * len(bits_N) < _FEWEST_LISTED or (bounds and bound >= bounds[-1]):
            break
        bounds.append(bound)
        share = below[bound] * _NEXT_SHARE
    return tuple(bounds)


def check_bounds(bounds: tuple[int, ...], bits_N: Bits) -> None:
    """Raise ValueError for bounds that no `choose_bounds` returns."""
    descending = all(low < high for high, low in itertools.pairwise(bounds))
    highest = MAGNITUDE_BITS >> MAGNITUDE_SHIFT if bits_N.dtype.itemsize == 2 else 0
    if len(bounds) > MOST_BOUNDS or not descending or (bounds and bounds[0] > highest):
        raise ValueError(f"classes {bounds} of elements with {bits_N.dtype.itemsize} bytes")


def listed(bits_N: Bits, bounds: tuple[int, ...]) -> list[Places]:
    """Return the positions of the elements of each class but class 0, ascending."""
    if not bounds:
        return []
    num = min(BLOCK, len(bits_N))
    magnitudes, is_listed = np.empty(num, np.uint16), np.empty(num, np.bool_)
    limit = np.uint16(bounds[0] << MAGNITUDE_SHIFT)
    found: list[tuple[int, npt.NDArray[Any], npt.NDArray[Any]]] = []
    for begin in range(0, len(bits_N), BLOCK):
        block = bits_N[begin : begin + BLOCK]
        magnitudes_B = np.bitwise_and(block, MAGNITUDE_BITS, out=magnitudes[: len(block)])
        places = np.flatnonzero(np.less(magnitudes_B, limit, out=is_listed[: len(block)]))
        found.append((begin, places, magnitudes_B.take(places) >> MAGNITUDE_SHIFT))
    positions_M = np.empty(sum(len(places) for _, places, _ in found), np.int32)
    exponents_M = np.empty(len(positions_M), np.uint8)
    end = 0
    for begin, places, exponents in found:
        start, end = end, end + len(places)
        np.add(places, begin, out=positions_M[start:end], casting="unsafe")
        exponents_M[start:end] = exponents
    classes = []
    for bound in bounds[1:]:
        is_here_M = exponents_M >= bound
        classes.append(positions_M.take(is_here_M.nonzero()[0]))
        rest = np.logical_not(is_here_M, out=is_here_M).nonzero()[0]
        positions_M, exponents_M = positions_M.take(rest), exponents_M.take(rest)
    return [*classes, positions_M]
