"""The elements of a flat tensor whose bits changed, as few bytes, and back.

Positions are coded as the gaps between them: one or two bytes a gap, the largest value as an escape that says "this
many more", or one bit an element where many changed, whichever is smallest. New values are coded relative to the
base's bits: an Adam step of a small learning rate moves a bf16 weight by one unit in the last place or not at all, so
most of them cost about one bit. The difference is split into planes (all lowest bytes, then all second ones, …), and
every part is compressed with zstd where that pays.

The promise: `decode` returns plain overwrites (positions and new bits) for the base that `encode` saw; the caller knows
that it has that base. Applying them twice is applying them once. Input that no `encode` has made raises WireError, and
no more memory is set aside for it than the tensor's own elements justify.

Axes: N elements of the tensor, K of them changed.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from paceline.errors import WireError

Bits = npt.NDArray[Any]
"""[N] unsigned integers: the bits of a tensor's elements, 1, 2, 4 or 8 bytes each."""
Positions = npt.NDArray[np.int64]

GAPS_8, GAPS_16, BITMAP, ALL = 0, 1, 2, 3
_GAP_DTYPES: dict[int, np.dtype[Any]] = {GAPS_8: np.dtype("<u1"), GAPS_16: np.dtype("<u2")}
_HEAD = struct.Struct("<HQ")
_CLASS = struct.Struct("<BQ")
_PART = struct.Struct("<BQ")
_RAW, _ZSTD = 0, 1
_LEVEL = 1
_WORTH_TRYING_BYTES = 64
_MAGNITUDE = 0x7FFF
_SMALL_SHARE = 0.25
"""Share of the elements that count as small: where the bytes are fewest for normal weights and steps of 1e-6 to 3e-6."""
_FEWEST_ELEMENTS = 4096


def changed_positions(base_N: Bits, new_N: Bits) -> Positions:
    """[K] positions, ascending, at which the bits differ."""
    return np.flatnonzero(base_N != new_N)


def encode(base_N: Bits, new_N: Bits, changed_K: Positions) -> bytes:
    """The new bits at `changed_K`, which are all positions where the two differ, at least one."""
    cut = _cut(base_N)
    classes = []
    places = b""
    for members in _classes(base_N, cut):
        own_K = changed_K if members is None else changed_K[members[changed_K]]
        ranks_K = own_K if members is None else _count_up_to(members)[own_K] - 1
        size = len(base_N) if members is None else int(np.count_nonzero(members))
        coding, coded = _encode_positions(ranks_K, size)
        places += _CLASS.pack(coding, len(own_K)) + _pack(coded)
        classes.append(own_K)
    ordered_K = np.concatenate(classes)
    downs_K, sizes_K = _split(new_N[ordered_K] - base_N[ordered_K])
    width = new_N.dtype.itemsize
    planes = sizes_K.view(np.uint8).reshape(-1, width)
    parts = [_pack(np.packbits(downs_K).data)]
    parts += [_pack(np.ascontiguousarray(planes[:, plane]).data) for plane in range(width)]
    return _HEAD.pack(cut, len(changed_K)) + places + b"".join(parts)


def decode(data: bytes, base_N: Bits) -> tuple[Positions, Bits]:
    """([K] positions in any order, [K] new bits) of what `encode` made with this base. Raises WireError."""
    try:
        return _decode(memoryview(data), base_N)
    except (struct.error, ValueError, zstandard.ZstdError) as error:
        raise WireError(
            f"delta of {len(data)} bytes for {len(base_N)} elements is no delta: {error}"
        ) from None


def _decode(data: memoryview, base_N: Bits) -> tuple[Positions, Bits]:
    size, width = len(base_N), base_N.dtype.itemsize
    cut, count = _HEAD.unpack_from(data)
    if not 0 < count <= size or (cut and width != 2):
        raise ValueError(f"{count} changed elements, cut {cut}")
    rest = data[_HEAD.size :]
    classes = []
    for members in _classes(base_N, cut):
        coding, length = _CLASS.unpack_from(rest)
        if length > count:
            raise ValueError(f"{length} of {count} changed elements")
        # No coding of K gaps in N elements is longer than this.
        places, rest = _unpack(rest[_CLASS.size :], 2 * (length + size // 255 + 1) + size // 8 + 1)
        class_size = size if members is None else int(np.count_nonzero(members))
        own_K = _decode_positions(coding, places, length, class_size)
        classes.append(own_K if members is None else np.searchsorted(_count_up_to(members), own_K + 1))
    changed_K = np.concatenate(classes)
    if len(changed_K) != count:
        raise ValueError(f"{len(changed_K)} of {count} changed elements")
    signs, rest = _unpack(rest, -(-count // 8))
    signs_K = np.unpackbits(np.frombuffer(signs, np.uint8), count=count)
    planes = np.empty((count, width), np.uint8)
    for plane in range(width):
        part, rest = _unpack(rest, count)
        planes[:, plane] = np.frombuffer(part, np.uint8)
    if len(rest):
        raise ValueError(f"{len(rest)} bytes too many")
    return changed_K, base_N[changed_K] + _joined(signs_K, planes.reshape(-1).view(base_N.dtype))


def _cut(base_N: Bits) -> int:
    """Bits from which on an element is not small any more; 0 where they are not told apart."""
    if base_N.dtype.itemsize != 2 or len(base_N) < _FEWEST_ELEMENTS:
        return 0
    sample = base_N[:: len(base_N) // _FEWEST_ELEMENTS] & _MAGNITUDE
    return int(np.quantile(sample, _SMALL_SHARE))


def _classes(base_N: Bits, cut: int) -> list[npt.NDArray[np.bool_] | None]:
    """[N] of the elements that belong together; None for all of them."""
    if not cut:
        return [None]
    small_N = (base_N & _MAGNITUDE) < cut
    return [small_N, ~small_N]


def _count_up_to(members_N: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """[N] how many members there are up to and with each element."""
    return np.cumsum(members_N, dtype=np.int32 if len(members_N) < 2**31 else np.int64)


def _encode_positions(changed_K: Positions, size: int) -> tuple[int, bytes]:
    if not len(changed_K):
        return GAPS_8, b""
    if len(changed_K) == size:
        return ALL, b""
    gaps_K = np.diff(changed_K, prepend=-1) - 1
    lengths = {BITMAP: -(-size // 8)}
    for coding, dtype in _GAP_DTYPES.items():
        escape = np.iinfo(dtype).max
        lengths[coding] = (len(gaps_K) + int((gaps_K // escape).sum())) * dtype.itemsize
    coding = min(lengths, key=lambda key: lengths[key])
    if coding == BITMAP:
        mask_N = np.zeros(size, np.bool_)
        mask_N[changed_K] = True
        return coding, np.packbits(mask_N).tobytes()
    dtype = _GAP_DTYPES[coding]
    escape = int(np.iinfo(dtype).max)
    ends_K = np.cumsum(gaps_K // escape + 1) - 1
    coded = np.full(ends_K[-1] + 1, escape, dtype)
    coded[ends_K] = gaps_K % escape
    return coding, coded.tobytes()


def _decode_positions(coding: int, places: bytes, count: int, size: int) -> Positions:
    if not count:
        return np.empty(0, np.int64)
    if coding == ALL:
        changed_K = np.arange(size)
    elif coding == BITMAP:
        if len(places) != -(-size // 8):
            raise ValueError(f"a bitmap of {len(places)} bytes")
        changed_K = np.flatnonzero(np.unpackbits(np.frombuffer(places, np.uint8), count=size))
    elif coding in _GAP_DTYPES:
        coded = np.frombuffer(places, _GAP_DTYPES[coding])
        is_end = coded != np.iinfo(coded.dtype).max
        if not len(coded) or not is_end[-1]:
            raise ValueError("gaps that do not end")
        changed_K = np.cumsum(coded, dtype=np.int64)[is_end]
        changed_K += np.arange(len(changed_K))
    else:
        raise ValueError(f"coding {coding}")
    if len(changed_K) != count or changed_K[-1] >= size:
        raise ValueError(f"{len(changed_K)} positions up to {changed_K[-1]}, where {count} were announced")
    return changed_K


def _split(difference_K: Bits) -> tuple[Bits, Bits]:
    """(whether it goes down, how many units beyond the first) of differences that are not 0, wrapping around."""
    downs_K = difference_K.view(difference_K.dtype.str.replace("u", "i")) < 0
    sizes_K: Bits = np.where(downs_K, ~difference_K, difference_K - 1).astype(difference_K.dtype)
    return downs_K, sizes_K


def _joined(downs_K: Bits, sizes_K: Bits) -> Bits:
    difference_K: Bits = np.where(downs_K, ~sizes_K, sizes_K + 1).astype(sizes_K.dtype)
    return difference_K


def _pack(data: bytes | memoryview) -> bytes:
    if len(data) >= _WORTH_TRYING_BYTES:
        packed = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False).compress(data)
        if len(packed) < len(data):
            return _PART.pack(_ZSTD, len(packed)) + packed
    return _PART.pack(_RAW, len(data)) + bytes(data)


def _unpack(data: memoryview, most_bytes: int) -> tuple[bytes, memoryview]:
    """The first part of `data` and what follows it."""
    kind, length = _PART.unpack_from(data)
    part, rest = data[_PART.size : _PART.size + length], data[_PART.size + length :]
    if len(part) != length or kind not in (_RAW, _ZSTD):
        raise ValueError(f"a part of kind {kind} and {length} bytes, {len(part)} are there")
    if kind == _RAW:
        return bytes(part), rest
    if zstandard.frame_content_size(part) > most_bytes:
        raise ValueError(
            f"a part of {zstandard.frame_content_size(part)} bytes where {most_bytes} are the most"
        )
    return zstandard.ZstdDecompressor().decompress(part, max_output_size=most_bytes), rest
