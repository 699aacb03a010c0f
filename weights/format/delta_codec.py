"""Encodes the changed elements of a flat tensor, and decodes them, at a few nanoseconds an element on one core.

The elements are classed by magnitude, and the positions of the changed ones are coded for each class separately
(`Gaps`): an optimizer step is about equally large for all weights, but a unit in the last place is not, so small
weights change their bits far more often than large ones. The result is a few percent larger than its information
content. Class 0 has the large weights, by far the most, and is never listed: its elements are counted by position. Each
other class has a quarter of the elements of the class before, so listing them is cheap. Equal bits and bounds give
equal classes on every machine.

New values are coded relative to the base's bits: an Adam step with a small learning rate moves a bf16 weight by one
unit in the last place or not at all. So most differences are only a sign. The few elements that moved further are
listed by class like the changed elements, and their distances are coded in planes (all lowest bytes, then all second
ones, …) with zstd.

The promise: `decode` returns plain overwrites (positions and new bits) for the base that `find_changes` saw; the caller
checks that it has that base. Applying overwrites twice has the same effect as once. Input that `encode` cannot have
made raises WireError, and never makes `decode` allocate more memory than the tensor's own elements justify. All
functions may run in several threads.

Axes: N elements of the tensor, K changed ones, ordered by class, then by rank: the index among the class's elements (in
class 0: among all elements). F of them moved by more than one unit.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

from paceline.errors import WireError

Bits = npt.NDArray[Any]
"""[N] unsigned integers: the bits of a tensor's elements, 1, 2, 4 or 8 bytes each."""
Places = npt.NDArray[np.int32]

MAGNITUDE_BITS, MAGNITUDE_SHIFT = 0x7FFF, 7
"""Mask and shift that give an element's class: the exponent of a bfloat16; of a float16 also some bits of the mantissa.
"""
MOST_BOUNDS = 6
BLOCK = 1 << 17
"""Number of elements that are compared at a time: their working memory fits into a core's cache."""
_LISTED_SHARE, _NEXT_SHARE = 0.2, 0.3
_FEWEST_LISTED = 1024
"""Least number of elements of a class; counts and code table of a smaller class would cost more than the class
saves."""
_SAMPLE = 1 << 14


def choose_bounds(bits_N: Bits) -> tuple[int, ...]:
    """Return the descending bounds of the magnitude classes for these bits: class 0 is [bounds[0], ∞), class c is
    [bounds[c], bounds[c - 1]), the last class goes down to 0. Empty for few elements, or for a type that does not have
    16 bits."""
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
    """Raise ValueError for bounds that `choose_bounds` never returns."""
    descending = all(low < high for high, low in itertools.pairwise(bounds))
    highest = MAGNITUDE_BITS >> MAGNITUDE_SHIFT if bits_N.dtype.itemsize == 2 else 0
    if len(bounds) > MOST_BOUNDS or not descending or (bounds and bounds[0] > highest):
        raise ValueError(f"the class bounds {bounds} are impossible for elements with {bits_N.dtype.itemsize} bytes")


def listed(bits_N: Bits, bounds: tuple[int, ...]) -> list[Places]:
    """Return the ascending positions of the elements of each class, without class 0."""
    if not bounds:
        return []
    num = min(BLOCK, len(bits_N))
    magnitudes, is_listed = np.empty(num, np.uint16), np.empty(num, np.bool_)
    limit = np.uint16(bounds[0] << MAGNITUDE_SHIFT)
    blocks: list[tuple[int, npt.NDArray[Any], npt.NDArray[Any]]] = []
    for begin in range(0, len(bits_N), BLOCK):
        block = bits_N[begin : begin + BLOCK]
        magnitudes_B = np.bitwise_and(block, MAGNITUDE_BITS, out=magnitudes[: len(block)])
        positions_B = np.flatnonzero(np.less(magnitudes_B, limit, out=is_listed[: len(block)]))
        blocks.append((begin, positions_B, magnitudes_B.take(positions_B) >> MAGNITUDE_SHIFT))
    positions_M = np.empty(sum(len(positions_B) for _, positions_B, _ in blocks), np.int32)
    exponents_M = np.empty(len(positions_M), np.uint8)
    end = 0
    for begin, positions_B, exponents in blocks:
        start, end = end, end + len(positions_B)
        np.add(positions_B, begin, out=positions_M[start:end], casting="unsafe")
        exponents_M[start:end] = exponents
    classes = []
    for bound in bounds[1:]:
        is_here_M = exponents_M >= bound
        classes.append(positions_M.take(is_here_M.nonzero()[0]))
        rest = np.logical_not(is_here_M, out=is_here_M).nonzero()[0]
        positions_M, exponents_M = positions_M.take(rest), exponents_M.take(rest)
    return [*classes, positions_M]


Positions = npt.NDArray[np.signedinteger[Any]]

_RAW, _ZSTD = 0, 1
_WORTH_TRYING_BYTES = 64


@dataclass(frozen=True)
class Changes:
    """Changed elements of a tensor, as a comparison on any device finds them."""

    bounds: tuple[int, ...]
    sizes: tuple[int, ...]
    """For each class, the number of elements that its ranks count: N for class 0, else the class's size."""
    ranks: tuple[Positions, ...]
    """For each class, the ascending ranks of its changed elements."""
    base_K: Bits
    new_K: Bits


def encode(base_N: Bits, new_N: Bits) -> bytes | None:
    """Encode the elements that differ; return None if none does."""
    changes = find_changes(base_N, new_N)
    return None if changes is None else pack(changes)


def find_changes(base_N: Bits, new_N: Bits) -> Changes | None:
    """Return the differences between two tensors of equal type and size; None if the tensors are equal."""
    is_changed_N = np.empty(len(base_N), np.bool_)
    blocks = []
    for begin in range(0, len(base_N), BLOCK):
        end = begin + BLOCK
        changed_B = np.flatnonzero(np.not_equal(base_N[begin:end], new_N[begin:end], out=is_changed_N[begin:end]))
        if len(changed_B):
            changed_B += begin
            blocks.append(changed_B)
    if not blocks:
        return None
    changed_K = np.concatenate(blocks)
    bounds = choose_bounds(base_N)
    first_K = changed_K
    if bounds:
        first_K = changed_K[(base_N[changed_K] & MAGNITUDE_BITS) >= bounds[0] << MAGNITUDE_SHIFT]
    ranks: list[Positions] = [first_K]
    order: list[Positions] = [first_K]
    sizes = [len(base_N)]
    for positions in listed(base_N, bounds):
        ranks.append(np.flatnonzero(is_changed_N.take(positions)))
        order.append(positions[ranks[-1]])
        sizes.append(len(positions))
    order_K = np.concatenate(order)
    return Changes(bounds, tuple(sizes), tuple(ranks), base_N[order_K], new_N[order_K])


def pack(changes: Changes) -> bytes:
    """Return the changes as encoded bytes. There must be at least one change."""
    parts = _Writer()
    parts.number(len(changes.bounds))
    for number in (*changes.bounds, *map(len, changes.ranks)):
        parts.number(number)
    downs_K, further_K = _split(_ordered(changes.new_K) - _ordered(changes.base_K))
    end = 0
    for ranks, size in zip(changes.ranks, changes.sizes, strict=True):
        parts.gaps(encode_gaps(ranks, size))
        begin, end = end, end + len(ranks)
        far = np.flatnonzero(further_K[begin:end])
        parts.number(len(far))
        parts.gaps(encode_gaps(far, len(ranks)))
    parts.part(np.packbits(downs_K))
    far_F = further_K[np.flatnonzero(further_K)] - further_K.dtype.type(1)
    planes = far_F.view(np.uint8).reshape(-1, far_F.dtype.itemsize)
    for plane in range(planes.shape[1]):
        parts.packed(np.ascontiguousarray(planes[:, plane]))
    return parts.bytes()


def decode(data: bytes | memoryview, base_N: Bits) -> tuple[Positions, Bits]:
    """Decode the result of `encode` with the same base into ([K] positions, [K] new bits). Raises WireError."""
    try:
        return _decode(memoryview(data), base_N)
    except (ValueError, zstandard.ZstdError) as error:
        raise WireError(f"delta of {len(data)} bytes for {len(base_N)} elements cannot be decoded: {error}") from None


def _decode(data: memoryview, base_N: Bits) -> tuple[Positions, Bits]:
    parts = _Parts(data)
    num_bounds = parts.number()
    if num_bounds > len(data):
        raise ValueError(f"{len(data)} bytes cannot have {num_bounds} bounds")
    bounds = tuple(parts.number() for _ in range(num_bounds))
    check_bounds(bounds, base_N)
    counts = [parts.number() for _ in range(num_bounds + 1)]
    if not 0 < sum(counts) <= len(base_N):
        raise ValueError(f"the numbers of changed elements by class, {counts}, must have a sum from 1 to {len(base_N)}")
    order: list[Positions] = []
    far: list[Positions] = []
    begin = 0
    for count, positions in zip(counts, (None, *listed(base_N, bounds)), strict=True):
        ranks = decode_gaps(parts, count, len(base_N) if positions is None else len(positions))
        order.append(ranks if positions is None else positions.take(ranks))
        far.append(decode_gaps(parts, parts.number(), count) + begin)
        begin += count
    order_K, far_F = np.concatenate(order), np.concatenate(far)
    downs_K = np.unpackbits(parts.part(-(-len(order_K) // 8)), count=len(order_K)).view(np.bool_)
    planes = np.empty((len(far_F), base_N.dtype.itemsize), np.uint8)
    for plane in range(planes.shape[1]):
        planes[:, plane] = parts.packed(len(far_F))
    parts.end()
    further_K = np.zeros(len(order_K), base_N.dtype)
    further_K[far_F] = planes.reshape(-1).view(base_N.dtype) + base_N.dtype.type(1)
    return order_K, _bits(_ordered(base_N.take(order_K)) + _joined(downs_K, further_K))


def _ordered(bits_K: Bits) -> Bits:
    """Return integers that grow by one from each floating-point value to the next, through zero."""
    ordered_K: Bits = bits_K ^ (_all_of_sign(bits_K) | _sign_bit(bits_K))
    return ordered_K


def _bits(ordered_K: Bits) -> Bits:
    bits_K: Bits = ordered_K ^ (~_all_of_sign(ordered_K) | _sign_bit(ordered_K))
    return bits_K


def _split(difference_K: Bits) -> tuple[npt.NDArray[np.bool_], Bits]:
    """Return whether the value falls, and by how many units more than one, for nonzero differences that wrap around."""
    falls_K = _all_of_sign(difference_K)
    further_K = (difference_K ^ falls_K) - (falls_K + difference_K.dtype.type(1))
    return falls_K.astype(np.bool_), further_K


def _joined(downs_K: npt.NDArray[np.bool_], further_K: Bits) -> Bits:
    falls_K = downs_K.astype(further_K.dtype)
    np.negative(falls_K, out=falls_K)
    difference_K: Bits = (further_K + (falls_K + further_K.dtype.type(1))) ^ falls_K
    return difference_K


def _sign_bit(bits_K: Bits) -> Any:
    return bits_K.dtype.type(1 << 8 * bits_K.dtype.itemsize - 1)


def _all_of_sign(bits_K: Bits) -> Bits:
    """Return all bits set where the highest bit is set, else no bits."""
    signed_K = bits_K.view(bits_K.dtype.str.replace("u", "i"))
    return (signed_K >> (8 * bits_K.dtype.itemsize - 1)).view(bits_K.dtype)


class _Coders(threading.local):
    def __init__(self) -> None:
        # The numbers have no repetitions; a search for long matches would leave them to zstd's Huffman coder anyway.
        entropy_only = zstandard.ZstdCompressionParameters(
            window_log=17, chain_log=6, hash_log=6, search_log=1, min_match=7, strategy=zstandard.STRATEGY_FAST
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=entropy_only)
        self.decompressor = zstandard.ZstdDecompressor()


_coders = _Coders()


class _Writer:
    """Writes bytes, and numbers with seven bits a byte, lowest first; the eighth bit marks that more bytes follow."""

    def __init__(self) -> None:
        self._data = bytearray()

    def number(self, number: int) -> None:
        while number > 0x7F:
            self._data.append(number & 0x7F | 0x80)
            number >>= 7
        self._data.append(number)

    def part(self, data: npt.NDArray[np.uint8]) -> None:
        self._data += data.data

    def gaps(self, gaps: Gaps | None) -> None:
        if gaps is not None:
            self.number(gaps.num_unary)
            self.part(gaps.unary)
            self.part(gaps.low)

    def packed(self, data: npt.NDArray[np.uint8]) -> None:
        """Write the bytes after their length, compressed with zstd if that saves space."""
        packed = _coders.compressor.compress(data.data) if len(data) >= _WORTH_TRYING_BYTES else data.data
        is_packed = len(packed) < len(data)
        self.number(len(packed if is_packed else data) << 1 | (_ZSTD if is_packed else _RAW))
        self._data += packed if is_packed else data.data

    def bytes(self) -> bytes:
        return bytes(self._data)


class _Parts:
    """Reads the output of `_Writer` in order. Every method raises ValueError for malformed bytes."""

    def __init__(self, data: memoryview) -> None:
        self._rest = data

    def number(self) -> int:
        """Return a number below 2^63."""
        number = 0
        for index, byte in enumerate(self._rest[:9]):
            number |= (byte & 0x7F) << 7 * index
            if byte < 0x80:
                self._rest = self._rest[index + 1 :]
                return number
        raise ValueError("a coded number does not end")

    def part(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        part, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
        if len(part) != num_bytes:
            raise ValueError(f"only {len(part)} of {num_bytes} bytes are left")
        return np.frombuffer(part, np.uint8)

    def packed(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return the unpacked bytes, which must be `num_bytes` long."""
        length, kind = divmod(self.number(), 2)
        part = self.part(length)
        found_bytes = zstandard.frame_content_size(part.data) if kind == _ZSTD else length
        if found_bytes != num_bytes:
            raise ValueError(f"a part has {found_bytes} bytes, not {num_bytes}")
        if kind == _RAW:
            return part
        unpacked = _coders.decompressor.decompress(part.data, max_output_size=num_bytes)
        if len(unpacked) != num_bytes:
            raise ValueError(f"a part has {len(unpacked)} bytes, not {num_bytes}")
        return np.frombuffer(unpacked, np.uint8)

    def end(self) -> None:
        """Raise ValueError if any bytes are left."""
        if len(self._rest):
            raise ValueError(f"there are {len(self._rest)} bytes too many")


class Gaps(NamedTuple):
    """Ascending numbers below a known size as Rice-coded gaps, for whole-array operations at a few ns a number.

    A gap g with parameter k is g >> k zeros and a one (the unary part), and k low bits (the low part: the lowest bits
    of all gaps, then the second ones, …), eight bits a byte. If more than half of all numbers are present, the missing
    ones are coded instead. Sources: Golomb, "Run-length encodings" (1966); Rice and Plaunt (1971) for powers of two.
    Axes: K numbers, M coded gaps (of the numbers or of the missing ones), U bits of the unary part.
    """

    num_unary: int
    """U, the number of bits of the unary part."""
    unary: npt.NDArray[np.uint8]
    """[ceil(U / 8)] bytes of the unary part."""
    low: npt.NDArray[np.uint8]
    """[k · ceil(M / 8)] bytes of the low part."""


def parameter(count: int, size: int) -> int:
    """Return the k that codes `count` random numbers below `size` with the fewest bits: floor(1 + log2(log(φ - 1) /
    log(1 - p))) with p = count / size and the golden ratio φ (Kiely, "Selecting the Golomb parameter in Rice
    coding", 2004). log(1 - p) is approximated by -p, so that integers suffice and both sides compute the same k."""
    return max(0, (9624 * size // (10_000 * max(1, count))).bit_length() - 1)


def encode_gaps(numbers_K: Positions, size: int) -> Gaps | None:
    """Encode strictly ascending numbers of [0, size); return None if count and size alone determine them."""
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
    return Gaps(num_unary, np.packbits(unary_U), np.concatenate([np.empty(0, np.uint8), *low]))


def decode_gaps(source: _Parts, count: int, size: int) -> Positions:
    """Return the `count` numbers that were given to `encode_gaps`. Raises ValueError."""
    if count > size:
        raise ValueError(f"there cannot be {count} different numbers below {size}")
    if 2 * count > size:
        return _missing(_gaps(source, size - count, size), size)
    return _gaps(source, count, size)


def _gaps(source: _Parts, count: int, size: int) -> Positions:
    if not count:
        return np.empty(0, np.int64)
    k, num_unary = parameter(count, size), source.number()
    if num_unary > count + (size >> k):
        raise ValueError(f"{num_unary} bits are too many for {count} of {size} elements")
    bits_U = np.unpackbits(source.part(-(-num_unary // 8)), count=num_unary)
    numbers_M = np.flatnonzero(bits_U.view(np.bool_))
    if len(numbers_M) != count:
        raise ValueError(f"{len(numbers_M)} gaps are coded for {count} of {size} elements")
    if k:
        # With quotients q, number i is i plus the sum of the first i + 1 gaps, (q << k) + low.
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
        raise ValueError(f"the number {numbers_M[-1]} is not below {size}")
    return numbers_M


def _missing(numbers_K: Positions, size: int) -> Positions:
    is_missing = np.ones(size, np.bool_)
    is_missing[numbers_K] = False
    return np.flatnonzero(is_missing)
