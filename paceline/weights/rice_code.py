"""Ascending numbers as Golomb-Rice coded gaps, the shortest code by whole bits for gaps between independent events.

A gap g with parameter k is g >> k zeros and a one (the unary part), and the k low bits of g (the low part). The two parts of
many numbers are kept apart as arrays of bits, so that everything is a few operations on whole arrays. Source: Golomb,
"Run-length encodings" (1966); Rice and Plaunt (1971) for powers of two.

Axes: K numbers, U bits of the unary part, L = K·k bits of the low part. Bits are uint8 arrays of 0 and 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BitArray = npt.NDArray[np.uint8]
Ascending = npt.NDArray[np.int64]


def parameter(count: int, size: int) -> int:
    """The k with which `count` numbers below `size`, spread by chance, take the fewest bits.

    The rule is floor(1 + log2(log(φ - 1) / log(1 - p))) with p = count / size and the golden ratio φ (Kiely, "Selecting the Golomb
    parameter in Rice coding", 2004), with log(1 - p) taken as -p so that integers suffice: both sides must find the same.
    """
    return max(0, (9624 * size // (10_000 * max(1, count))).bit_length() - 1)


def to_bits(numbers_K: Ascending, k: int) -> tuple[BitArray, BitArray]:
    """([U] unary part, [L] low part) of numbers that are not negative and ascend without repeating."""
    gaps_K = _gaps(numbers_K)
    ends_K = np.cumsum((gaps_K >> k) + 1) - 1
    unary_U = np.zeros(int(ends_K[-1]) + 1 if len(ends_K) else 0, np.uint8)
    unary_U[ends_K] = 1
    low_L = ((gaps_K[:, None] >> np.arange(k)) & 1).astype(np.uint8).reshape(-1)
    return unary_U, low_L


def from_bits(unary_U: BitArray, low_L: BitArray, k: int) -> Ascending:
    """[K] numbers; K is how many ones the unary part has. Raises ValueError when the low part is not of K·k bits."""
    ends_K: npt.NDArray[Any] = np.flatnonzero(unary_U)
    if len(low_L) != len(ends_K) * k:
        raise ValueError(f"{len(low_L)} low bits for {len(ends_K)} gaps of {k}")
    gaps_K = (np.diff(ends_K, prepend=-1) - 1) << k
    if k:
        gaps_K += low_L.reshape(-1, k).astype(np.int64) @ (1 << np.arange(k, dtype=np.int64))
    return np.cumsum(gaps_K + 1, dtype=np.int64) - 1


def _gaps(numbers_K: Ascending) -> Ascending:
    return np.diff(numbers_K, prepend=-1) - 1
