"""Arrays in a safetensors frame: read as views, checked by name. Bytes that cannot be read raise a WireError with the fault."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.errors import WireError

MAX_TENSOR_HEADER_BYTES = 64 << 10
"""Largest JSON header of a payload frame; five arrays need a few hundred bytes."""

DTYPES = {
    name: np.dtype(code)
    for name, code in {
        "BOOL": "|b1", "U8": "|u1", "I8": "|i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
        "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
    }.items()
}  # fmt: skip
"""safetensors' names of the types that numpy has."""

Buffer = bytes | memoryview


def load_arrays(payload: Buffer) -> dict[str, np.ndarray]:
    """Return the arrays of a safetensors blob as read-only views into `payload`: nothing is copied.

    Layout (huggingface.co/docs/safetensors): header size as 8 bytes little endian, JSON header, then the arrays without
    gaps, in any order of names.
    """
    header_bytes = int.from_bytes(payload[:8], "little")
    if len(payload) < 8 or header_bytes > min(len(payload) - 8, MAX_TENSOR_HEADER_BYTES):
        raise _no_safetensors(payload, "its header does not fit into it")
    data = memoryview(payload)[8 + header_bytes :]
    arrays, end = {}, 0
    try:
        header = json.loads(str(payload[8 : 8 + header_bytes], "utf-8"))
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            arrays[name] = _view(data, end, entry)
            end = entry["data_offsets"][1]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise _no_safetensors(payload, repr(error)) from None
    if end != len(data):
        raise _no_safetensors(payload, f"its arrays end at {end} of {len(data)} bytes")
    return arrays


def _view(data: memoryview, start: int, entry: dict[str, Any]) -> np.ndarray:
    """Return the array that `entry` of the header describes; it has to begin at `start`."""
    dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    for number in (*shape, begin, end):
        if type(number) is not int or number < 0:
            raise ValueError("a size that is no natural number")
    if begin != start or end > len(data) or math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(f"{shape} of {entry['dtype']} cannot lie at {begin} to {end}")
    return np.ndarray(shape, dtype, data, begin)


def _no_safetensors(payload: Buffer, why: str) -> WireError:
    return WireError(f"the payload frame of {len(payload)} bytes is no safetensors blob: {why}")


def named_array(arrays: dict[str, np.ndarray], name: str, kind: str, ndim: int) -> np.ndarray:
    array = arrays.get(name)
    if array is None:
        raise WireError(f"the payload has no array {name!r}; it has {sorted(arrays)}")
    if array.dtype.str[1:] != kind or array.ndim != ndim:
        raise WireError(
            f"array {name!r} is {array.dtype} of {array.ndim} dimensions, has to be {kind} of {ndim}"
        )
    return array


def concatenated(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(a, dtype) for a in arrays]) if arrays else np.empty(0, dtype)
