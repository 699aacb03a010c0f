"""The elements of a flat tensor whose bits changed, as few bytes, and back, at a few nanoseconds an element of one core.

The elements are classed by magnitude (`weights/format/magnitude_classes.py`), and the positions of the changed ones
within each class are coded by themselves (`weights/format/gap_code.py`). That comes within some percent of the
information that is there. What has to be done for every element is a comparison or two of whole arrays; all the rest is
done for the one in fifty that changed.

New values are coded relative to the base's bits: an Adam step of a small learning rate moves a bf16 weight by one unit in
the last place or not at all. So a difference is a sign; the few that are further are listed by class like the changed
elements, and how far they are is coded in planes (all lowest bytes, then all second ones, …) with zstd.

The promise: `decode` returns plain overwrites (positions and new bits) for the base that `find_changes` saw; the caller
knows that it has that base. Applying them twice is applying them once. Input that no `encode` has made raises WireError,
and no more memory is set aside for it than the tensor's own elements justify. All functions may run in several threads.

Axes: N elements of the tensor, K of them changed, in the order of class, then rank: the place among the class's elements
(of class 0: among all elements). F of them moved by more than one unit.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from paceline.errors import WireError
from paceline.weights.format import gap_code
from paceline.weights.format.magnitude_classes import (
    BLOCK,
    MAGNITUDE_BITS,
    MAGNITUDE_SHIFT,
    Bits,
    check_bounds,
    choose_bounds,
    listed,
)

Positions = npt.NDArray[np.signedinteger[Any]]

_RAW, _ZSTD = 0, 1
_WORTH_TRYING_BYTES = 64


@dataclass(frozen=True)
class Changes:
    """What changed in a tensor, as a comparison on any device finds it."""

    bounds: tuple[int, ...]
    """Of the classes."""
    sizes: tuple[int, ...]
    """Elements that the ranks of each class count: N of class 0, the class's own of the others."""
    ranks: tuple[Positions, ...]
    """By class the ranks of the changed elements, ascending."""
    base_K: Bits
    new_K: Bits


def encode(base_N: Bits, new_N: Bits) -> bytes | None:
    """Encode the elements that differ; None where none does."""
    changes = find_changes(base_N, new_N)
    return None if changes is None else pack(changes)


def find_changes(base_N: Bits, new_N: Bits) -> Changes | None:
    """Return what differs between two tensors of equal type and size; None where nothing does."""
    is_changed_N = np.empty(len(base_N), np.bool_)
    found = []
    for begin in range(0, len(base_N), BLOCK):
        end = begin + BLOCK
        places = np.flatnonzero(
            np.not_equal(base_N[begin:end], new_N[begin:end], out=is_changed_N[begin:end])
        )
        if len(places):
            places += begin
            found.append(places)
    if not found:
        return None
    changed_K = np.concatenate(found)
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
    """Return the bytes of changes, of which there is at least one."""
    parts = _Writer()
    parts.number(len(changes.bounds))
    for number in (*changes.bounds, *map(len, changes.ranks)):
        parts.number(number)
    downs_K, further_K = _split(_ordered(changes.new_K) - _ordered(changes.base_K))
    end = 0
    for ranks, size in zip(changes.ranks, changes.sizes, strict=True):
        parts.gaps(gap_code.encode(ranks, size))
        begin, end = end, end + len(ranks)
        far = np.flatnonzero(further_K[begin:end])
        parts.number(len(far))
        parts.gaps(gap_code.encode(far, len(ranks)))
    parts.part(np.packbits(downs_K))
    far_F = further_K[np.flatnonzero(further_K)] - further_K.dtype.type(1)
    planes = far_F.view(np.uint8).reshape(-1, far_F.dtype.itemsize)
    for plane in range(planes.shape[1]):
        parts.packed(np.ascontiguousarray(planes[:, plane]))
    return parts.bytes()


def decode(data: bytes | memoryview, base_N: Bits) -> tuple[Positions, Bits]:
    """Return ([K] positions, [K] new bits) of what `encode` made with this base. Raises WireError."""
    try:
        return _decode(memoryview(data), base_N)
    except (ValueError, zstandard.ZstdError) as error:
        raise WireError(
            f"delta of {len(data)} bytes for {len(base_N)} elements is no delta: {error}"
        ) from None


def _decode(data: memoryview, base_N: Bits) -> tuple[Positions, Bits]:
    parts = _Parts(data)
    num_bounds = parts.number()
    if num_bounds > len(data):
        raise ValueError(f"{num_bounds} bounds in {len(data)} bytes")
    bounds = tuple(parts.number() for _ in range(num_bounds))
    check_bounds(bounds, base_N)
    counts = [parts.number() for _ in range(num_bounds + 1)]
    if not 0 < sum(counts) <= len(base_N):
        raise ValueError(f"{counts} of {len(base_N)} elements changed")
    order: list[Positions] = []
    far: list[Positions] = []
    begin = 0
    for count, positions in zip(counts, (None, *listed(base_N, bounds)), strict=True):
        ranks = gap_code.decode(parts, count, len(base_N) if positions is None else len(positions))
        order.append(ranks if positions is None else positions.take(ranks))
        far.append(gap_code.decode(parts, parts.number(), count) + begin)
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
    """Return numbers that grow by one from each floating-point value to the next, through zero."""
    ordered_K: Bits = bits_K ^ (_all_of_sign(bits_K) | _sign_bit(bits_K))
    return ordered_K


def _bits(ordered_K: Bits) -> Bits:
    """Invert `_ordered`."""
    bits_K: Bits = ordered_K ^ (~_all_of_sign(ordered_K) | _sign_bit(ordered_K))
    return bits_K


def _split(difference_K: Bits) -> tuple[npt.NDArray[np.bool_], Bits]:
    """Return (True for a fall, units beyond the first) of differences that are not 0, wrapping around."""
    falls_K = _all_of_sign(difference_K)
    further_K = (difference_K ^ falls_K) - (falls_K + difference_K.dtype.type(1))
    return falls_K.astype(np.bool_), further_K


def _joined(downs_K: npt.NDArray[np.bool_], further_K: Bits) -> Bits:
    """Invert `_split`."""
    falls_K = downs_K.astype(further_K.dtype)
    np.negative(falls_K, out=falls_K)
    difference_K: Bits = (further_K + (falls_K + further_K.dtype.type(1))) ^ falls_K
    return difference_K


def _sign_bit(bits_K: Bits) -> Any:
    return bits_K.dtype.type(1 << 8 * bits_K.dtype.itemsize - 1)


def _all_of_sign(bits_K: Bits) -> Bits:
    """Return all bits set where the highest is, else none."""
    signed_K = bits_K.view(bits_K.dtype.str.replace("u", "i"))
    return (signed_K >> (8 * bits_K.dtype.itemsize - 1)).view(bits_K.dtype)


class _Coders(threading.local):
    """zstd's coders, which serve one thread each."""

    def __init__(self) -> None:
        # The numbers have no repetitions, and looking for long ones only leaves them to zstd's Huffman coder.
        entropy_only = zstandard.ZstdCompressionParameters(
            window_log=17,
            chain_log=6,
            hash_log=6,
            search_log=1,
            min_match=7,
            strategy=zstandard.STRATEGY_FAST,
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=entropy_only)
        self.decompressor = zstandard.ZstdDecompressor()


_coders = _Coders()


class _Writer:
    """Numbers of seven bits a byte, lowest first, the eighth says that there is more; and bytes."""

    def __init__(self) -> None:
        self._data = bytearray()

    def number(self, number: int) -> None:
        while number > 0x7F:
            self._data.append(number & 0x7F | 0x80)
            number >>= 7
        self._data.append(number)

    def part(self, data: npt.NDArray[np.uint8]) -> None:
        self._data += data.data

    def gaps(self, gaps: gap_code.Gaps | None) -> None:
        if gaps is not None:
            self.number(gaps.num_unary)
            self.part(gaps.unary)
            self.part(gaps.low)

    def packed(self, data: npt.NDArray[np.uint8]) -> None:
        """Write the bytes with zstd, where that pays, and with their length before them."""
        packed = _coders.compressor.compress(data.data) if len(data) >= _WORTH_TRYING_BYTES else data.data
        is_packed = len(packed) < len(data)
        self.number(len(packed if is_packed else data) << 1 | (_ZSTD if is_packed else _RAW))
        self._data += packed if is_packed else data.data

    def bytes(self) -> bytes:
        return bytes(self._data)


class _Parts:
    """What `_Writer` has written, read in order. Every method raises ValueError."""

    def __init__(self, data: memoryview) -> None:
        self._rest = data

    def number(self) -> int:
        """Return a number below 2^63."""
        number = 0
        for place, byte in enumerate(self._rest[:9]):
            number |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                self._rest = self._rest[place + 1 :]
                return number
        raise ValueError("a number that does not end")

    def part(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return the next `num_bytes` bytes."""
        part, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
        if len(part) != num_bytes:
            raise ValueError(f"{len(part)} of {num_bytes} bytes are there")
        return np.frombuffer(part, np.uint8)

    def packed(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return the unpacked bytes, which must be `num_bytes` long."""
        length, kind = divmod(self.number(), 2)
        part = self.part(length)
        found_bytes = zstandard.frame_content_size(part.data) if kind == _ZSTD else length
        if found_bytes != num_bytes:
            raise ValueError(f"a part of {found_bytes} bytes, not {num_bytes}")
        if kind == _RAW:
            return part
        unpacked = _coders.decompressor.decompress(part.data, max_output_size=num_bytes)
        if len(unpacked) != num_bytes:
            raise ValueError(f"a part of {len(unpacked)} bytes, not {num_bytes}")
        return np.frombuffer(unpacked, np.uint8)

    def end(self) -> None:
        """Raise ValueError if anything is left."""
        if len(self._rest):
            raise ValueError(f"{len(self._rest)} bytes too many")
