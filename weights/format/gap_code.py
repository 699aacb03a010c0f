"""Ascending numbers below a known size as Rice-coded gaps, in parts that whole-array operations read at a few ns a number.

A gap g with parameter k is g >> k zeros and a one (the unary part), and k low bits (the low part: the lowest bits of all
gaps, then the second ones, …), eight bits a byte. Where more than half of all numbers are there, the missing ones are
coded instead. Sources: Golomb, "Run-length encodings" (1966); Rice and Plaunt (1971) for powers of two.

The promise: `decode` returns what `encode` got, for the same count and size, or raises ValueError; it sets aside no more
memory than `size` justifies.

Axes: K numbers, M of them or of the missing ones coded, U bits of the unary part.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Ascending = npt.NDArray[np.signedinteger[Any]]
Bytes = npt.NDArray[np.uint8]

_NO_BYTES: Bytes = np.empty(0, np.uint8)


class Gaps(NamedTuple):
    """The coded gaps of ascending numbers."""

    num_unary: int
    """U."""
    unary: Bytes
    """[ceil(U / 8)] the unary part."""
    low: Bytes
    """[k · ceil(M / 8)] the low part."""


class Source(Protocol):
    """Reader of coded gaps. Both methods raise ValueError."""

    def number(self) -> int:
        """Return the next number."""

    def part(self, num_bytes: int) -> Bytes:
        """Return the next [num_bytes] bytes."""


def parameter(count: int, size: int) -> int:
    """The k with which `count` numbers below `size`, spread by chance, take the fewest bits.

    The rule is floor(1 + log2(log(φ - 1) / log(1 - p))) with p = count / size and the golden ratio φ (Kiely, "Selecting the Golomb
    parameter in Rice coding", 2004), with log(1 - p) taken as -p so that integers suffice: both sides must find the same.
    """
    return max(0, (9624 * size // (10_000 * max(1, count))).bit_length() - 1)


def encode(numbers_K: Ascending, size: int) -> Gaps | None:
    """Encode numbers of [0, size) that ascend without repeating; None where count and size alone say which they are."""
    if 2 * len(numbers_K) > size:
        numbers_K = _missing(numbers_K, size)
    if not len(numbers_K):
        return None
    k = parameter(len(numbers_K), size)
    gaps_M = np.diff(numbers_K, prepend=numbers_K.dtype.type(-1))
    gaps_M -= 1
    ends_M = np.cumsum(gaps_M >> k, dtype=np.int64)
    ends_M += np.arange(len(ends_M))
    num_unary = int(ends_M[-1]) + 1
    unary_U = np.zeros(num_unary, np.uint8)
    unary_U[ends_M] = 1
    low = [np.packbits(gaps_M & (1 << bit)) for bit in range(k)]
    return Gaps(num_unary, np.packbits(unary_U), np.concatenate([_NO_BYTES, *low]))


def decode(source: Source, count: int, size: int) -> Ascending:
    """Return the `count` numbers that `encode` got. Raises ValueError."""
    if count > size:
        raise ValueError(f"{count} of {size} elements")
    if 2 * count > size:
        return _missing(_decode(source, size - count, size), size)
    return _decode(source, count, size)


def _decode(source: Source, count: int, size: int) -> Ascending:
    if not count:
        return np.empty(0, np.int64)
    k, num_unary = parameter(count, size), source.number()
    if num_unary > count + (size >> k):
        raise ValueError(f"{num_unary} bits for {count} of {size} elements")
    bits_U = np.unpackbits(source.part(-(-num_unary // 8)), count=num_unary)
    numbers_M = np.flatnonzero(bits_U.view(np.bool_))
    if len(numbers_M) != count:
        raise ValueError(f"{len(numbers_M)} gaps for {count} of {size} elements")
    if k:
        # With quotients q, number i is the sum of the gaps (q << k) + low and of the i elements before it.
        numbers_M -= np.arange(count)
        numbers_M <<= k
        steps_M = np.ones(count, np.int64)
        length = -(-count // 8)
        planes = source.part(k * length).reshape(k, length)
        for first in range(0, k, 8):
            byte_M = np.zeros(count, np.uint8)
            for bit, plane in enumerate(planes[first : first + 8]):
                byte_M |= np.unpackbits(plane, count=count) << bit
            steps_M += byte_M if not first else byte_M.astype(np.int64) << first
        numbers_M += np.cumsum(steps_M, out=steps_M)
        numbers_M -= 1
    if numbers_M[-1] >= size:
        raise ValueError(f"number {numbers_M[-1]} of {size} elements")
    return numbers_M


def _missing(numbers_K: Ascending, size: int) -> Ascending:
    is_missing = np.ones(size, np.bool_)
    is_missing[numbers_K] = False
    return np.flatnonzero(is_missing)
