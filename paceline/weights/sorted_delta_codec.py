"""The elements of a flat tensor whose bits changed, as few bytes, and back.

The rate at which a weight's bits change depends on its magnitude: a step of an optimizer is about as large for all of them, a unit in
the last place is not. So the elements of 16 bits are grouped by their exponent in the base, which both sides
know, and the positions within each of these classes are coded by themselves (`paceline/weights/rice_code.py`). That comes within some
percent of the information that is there.

New values are coded relative to the base's bits: an Adam step of a small learning rate moves a bf16 weight by one unit in
the last place or not at all, so most of them cost about one bit. The difference is split into planes (all lowest bytes,
then all second ones, …), and every part is compressed with zstd where that pays.

The promise: `decode` returns plain overwrites (positions and new bits) for the base that `encode` saw; the caller knows
that it has that base. Applying them twice is applying them once. Input that no `encode` has made raises WireError, and
no more memory is set aside for it than the tensor's own elements justify.

Axes: N elements of the tensor, K of them changed, C classes. In a class elements have ranks, in the order of positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from paceline.errors import WireError
from paceline.weights.rice_code import BitArray, from_bits, parameter, to_bits

Bits = npt.NDArray[Any]
"""[N] unsigned integers: the bits of a tensor's elements, 1, 2, 4 or 8 bytes each."""
Positions = npt.NDArray[np.int64]

_RAW, _ZSTD = 0, 1
_LEVEL = 1
_WORTH_TRYING_BYTES = 64
_EXPONENT_SHIFT, _EXPONENT_MASK = 7, 0xFF
_MOST_CLASSES = 32
_ELEMENTS_PER_CLASS = 4096
"""A class has to be worth the bytes that say how it is coded."""
_BLOCK = 1 << 17
"""Elements that are sorted at a time; they fit into a core's cache."""
_NO_BITS: BitArray = np.empty(0, np.uint8)


def changed_positions(base_N: Bits, new_N: Bits) -> Positions:
    """Return [K] positions, ascending, at which the bits differ."""
    return np.flatnonzero(base_N != new_N)


def encode(base_N: Bits, new_N: Bits, changed_K: Positions) -> bytes:
    """Encode the new bits at `changed_K`, which are all positions where the two differ, at least one."""
    classes = _Classes(base_N)
    class_K, rank_K, ordered_K = _ranked(classes, changed_K)
    counts_C = np.bincount(class_K, minlength=len(classes.sizes_C))
    unary, low = [], []
    for ranks, size in zip(np.split(rank_K, np.cumsum(counts_C)[:-1]), classes.sizes_C, strict=True):
        if len(ranks) < size:
            bits = to_bits(ranks, parameter(len(ranks), int(size)))
            unary.append(bits[0])
            low.append(bits[1])
    unary_U = np.concatenate([*unary, _NO_BITS])
    downs_K, sizes_K = _split(new_N[ordered_K] - base_N[ordered_K])
    planes = sizes_K.view(np.uint8).reshape(-1, new_N.dtype.itemsize)
    parts = [np.packbits(bits).data for bits in (unary_U, np.concatenate([*low, _NO_BITS]), downs_K)]
    parts += [np.ascontiguousarray(planes[:, plane]).data for plane in range(planes.shape[1])]
    return b"".join(map(_number, (*counts_C.tolist(), len(unary_U)))) + b"".join(map(_pack, parts))


def decode(data: bytes, base_N: Bits) -> tuple[Positions, Bits]:
    """Return ([K] positions in any order, [K] new bits) of what `encode` made with this base. Raises WireError."""
    try:
        return _decode(memoryview(data), base_N)
    except (ValueError, zstandard.ZstdError) as error:
        raise WireError(
            f"delta of {len(data)} bytes for {len(base_N)} elements is no delta: {error}"
        ) from None


def _decode(data: memoryview, base_N: Bits) -> tuple[Positions, Bits]:
    classes, parts = _Classes(base_N), _Parts(data)
    counts = [parts.number() for _ in classes.sizes_C]
    num_unary, count = parts.number(), sum(counts)
    # With parameter k, K gaps in N elements have at most K + (N >> k) unary bits.
    if any(count > size for count, size in zip(counts, classes.sizes_C, strict=True)) or not count:
        raise ValueError(f"{counts} elements changed in classes of {classes.sizes_C.tolist()}")
    if num_unary > 2 * len(base_N):
        raise ValueError(f"{num_unary} bits for {len(base_N)} elements")
    unary_U = parts.bits(num_unary)
    changed_K = _positions(classes, _ranks(classes, counts, unary_U, parts))
    downs_K = parts.bits(count)
    planes = np.empty((count, base_N.dtype.itemsize), np.uint8)
    for plane in range(planes.shape[1]):
        planes[:, plane] = np.frombuffer(parts.part(count), np.uint8)
    parts.end()
    return changed_K, base_N[changed_K] + _joined(downs_K, planes.reshape(-1).view(base_N.dtype))


class _Classes:
    """The elements of a base by their exponents, largest first; one class where they are few or no numbers of 16 bits."""

    def __init__(self, base_N: Bits) -> None:
        self._base_N = base_N
        most = min(_MOST_CLASSES, len(base_N) // _ELEMENTS_PER_CLASS)
        self._num = most if base_N.dtype.itemsize == 2 and most > 1 else 1
        if self._num == 1:
            self.sizes_C: Positions = np.array([len(base_N)])
            return
        by_exponent = np.zeros(_EXPONENT_MASK + 1, np.int64)
        for begin in range(0, len(base_N), _BLOCK):
            exponents = _exponents(base_N[begin : begin + _BLOCK])
            by_exponent += np.bincount(exponents, minlength=_EXPONENT_MASK + 1)
        # Few outliers must not take the classes from the many.
        above = np.cumsum(by_exponent[::-1])[::-1]
        self._top = int(np.flatnonzero(above >= len(base_N) // _ELEMENTS_PER_CLASS)[-1])
        self.sizes_C = np.bincount(
            _class_of(np.arange(_EXPONENT_MASK + 1), self._top, self._num),
            weights=by_exponent,
            minlength=self._num,
        ).astype(np.int64)

    def blocks(self) -> Iterator[tuple[int, npt.NDArray[Any], Positions]]:
        """(first position, [B] the block's elements by class, then position, [C] how many of each class)."""
        for begin in range(0, len(self._base_N), _BLOCK):
            block = self._base_N[begin : begin + _BLOCK]
            if self._num == 1:
                yield begin, np.arange(len(block)), np.array([len(block)])
                continue
            class_B = _class_of(_exponents(block), self._top, self._num)
            order_B = np.argsort(class_B, kind="stable")
            yield begin, order_B, np.bincount(class_B, minlength=self._num)


def _exponents(bits_B: Bits) -> Bits:
    """Return [B] uint8: of a bfloat16 the exponent; of another type of 16 bits some bits that mean its magnitude as
    well."""
    return (bits_B >> _EXPONENT_SHIFT).astype(np.uint8)


def _class_of(exponents: npt.NDArray[Any], top: int, num: int) -> npt.NDArray[np.uint8]:
    below = top - exponents.astype(np.int16)
    return np.clip(below, 0, num - 1).astype(np.uint8)


def _ranked(classes: _Classes, changed_K: Positions) -> tuple[Positions, Positions, Positions]:
    """Return ([K] class, [K] rank in it, [K] position) of the changed elements, by class, then rank."""
    seen_C = np.zeros_like(classes.sizes_C)
    cuts = np.searchsorted(changed_K, np.arange(0, changed_K[-1] + _BLOCK + 1, _BLOCK))
    found: list[tuple[Positions, Positions, Positions]] = []
    for number, (begin, order_B, counts_C) in enumerate(classes.blocks()):
        if number + 1 == len(cuts):
            break
        mine = changed_K[cuts[number] : cuts[number + 1]] - begin
        if len(mine):
            is_changed_B = np.zeros(len(order_B), np.bool_)
            is_changed_B[mine] = True
            places = np.flatnonzero(is_changed_B[order_B])
            ends_C = np.cumsum(counts_C)
            own = np.searchsorted(ends_C, places, side="right")
            found.append((own, places + (seen_C - ends_C + counts_C)[own], order_B[places] + begin))
        seen_C += counts_C
    class_K, rank_K, position_K = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    order_K = np.argsort(class_K.astype(np.uint8), kind="stable")
    return class_K[order_K], rank_K[order_K], position_K[order_K]


def _ranks(classes: _Classes, counts: list[int], unary_U: BitArray, parts: _Parts) -> list[Positions]:
    """For each class the ranks of its changed elements. Raises ValueError."""
    sizes = classes.sizes_C.tolist()
    parameters = [parameter(count, size) for count, size in zip(counts, sizes, strict=True)]
    coded = [count < size for count, size in zip(counts, sizes, strict=True)]
    low_L = parts.bits(
        sum(c * k for c, k, is_coded in zip(counts, parameters, coded, strict=True) if is_coded)
    )
    ends = np.flatnonzero(unary_U) + 1
    if len(ends) != sum(count for count, is_coded in zip(counts, coded, strict=True) if is_coded):
        raise ValueError(f"{len(ends)} gaps for {counts} of {sizes} elements")
    ranks: list[Positions] = []
    gap = unary = low = 0
    for count, size, k, is_coded in zip(counts, sizes, parameters, coded, strict=True):
        if not is_coded:
            ranks.append(np.arange(size))
            continue
        end = int(ends[gap + count - 1]) if count else unary
        ranks.append(from_bits(unary_U[unary:end], low_L[low : low + count * k], k))
        if count and ranks[-1][-1] >= size:
            raise ValueError(f"rank {ranks[-1][-1]} in a class of {size}")
        gap, unary, low = gap + count, end, low + count * k
    if unary != len(unary_U):
        raise ValueError(f"{len(unary_U) - unary} bits that belong to no gap")
    return ranks


def _positions(classes: _Classes, ranks: list[Positions]) -> Positions:
    """Return [K] the positions of the changed elements, by class, then rank."""
    found: list[list[Positions]] = [[] for _ in ranks]
    seen_C = np.zeros_like(classes.sizes_C)
    taken_C = np.zeros_like(classes.sizes_C)
    for begin, order_B, counts_C in classes.blocks():
        starts_C = np.cumsum(counts_C) - counts_C
        seen_C += counts_C
        for index in np.flatnonzero(counts_C):
            until = int(np.searchsorted(ranks[index], seen_C[index]))
            if until > taken_C[index]:
                mine = ranks[index][taken_C[index] : until] - (seen_C[index] - counts_C[index])
                found[index].append(order_B[starts_C[index] + mine] + begin)
                taken_C[index] = until
    return np.concatenate([positions for of_class in found for positions in of_class])


def _split(difference_K: Bits) -> tuple[Bits, Bits]:
    """Return (True for a fall, units beyond the first) of differences that are not 0, wrapping around."""
    downs_K = difference_K.view(difference_K.dtype.str.replace("u", "i")) < 0
    sizes_K: Bits = np.where(downs_K, ~difference_K, difference_K - 1).astype(difference_K.dtype)
    return downs_K, sizes_K


def _joined(downs_K: Bits, sizes_K: Bits) -> Bits:
    difference_K: Bits = np.where(downs_K, ~sizes_K, sizes_K + 1).astype(sizes_K.dtype)
    return difference_K


def _number(number: int) -> bytes:
    """Seven bits a byte, lowest first, the eighth says that there is more."""
    coded = bytearray()
    while number > 0x7F:
        coded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*coded, number))


def _pack(data: bytes | memoryview) -> bytes:
    if len(data) >= _WORTH_TRYING_BYTES:
        packed = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False).compress(data)
        if len(packed) < len(data):
            return _number(len(packed) << 1 | _ZSTD) + packed
    return _number(len(data) << 1 | _RAW) + bytes(data)


class _Parts:
    """Output of `_number` and `_pack`, read in order. Every method raises ValueError."""

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

    def part(self, num_bytes: int) -> bytes:
        """Return the unpacked bytes, which must be `num_bytes` long."""
        length, kind = divmod(self.number(), 2)
        part, self._rest = self._rest[:length], self._rest[length:]
        found_bytes = zstandard.frame_content_size(part) if kind == _ZSTD else length
        if len(part) != length or found_bytes != num_bytes:
            raise ValueError(
                f"a part of {found_bytes} bytes, not {num_bytes}, {len(part)} of {length} are there"
            )
        if kind == _RAW:
            return bytes(part)
        return zstandard.ZstdDecompressor().decompress(part, max_output_size=num_bytes)

    def bits(self, count: int) -> BitArray:
        """[count] zeros and ones."""
        return np.unpackbits(np.frombuffer(self.part(-(-count // 8)), np.uint8), count=count)

    def end(self) -> None:
        """Raise ValueError if anything is left."""
        if len(self._rest):
            raise ValueError(f"{len(self._rest)} bytes too many")
