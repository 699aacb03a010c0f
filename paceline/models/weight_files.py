"""Reads a model's safetensors files from a local disk or an fsspec URL; each rank reads only its rows. Promise: a
header is trusted only if it matches the size of its file, so a damaged or truncated file raises an error that names
it. A slice costs host memory only for its bytes, because files are read by ranges and never mapped."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Self

from paceline.errors import InvalidInput, PacelineError, Unreadable
from paceline.files.model_source import WEIGHT_SUFFIXES, model_source
from paceline.files.storage import is_url, open_url
from paceline.host.regular_file import open_regular

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 << 20
COMPARED_BYTES = 32 << 20
"""A comparison of two tensors has this many bytes of each in memory at a time."""
FILES_SHOWN = 3
REMOTE_PART_BYTES = 32 << 20
"""Bytes of one request to an object store; the requests of a slice run in parallel."""

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""Maps the name of a type in the files to torch's name of the type."""


def torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


class WeightFiles:
    """All tensors of a model by name; a context manager that closes the files."""

    def __init__(self, paths: dict[str, list[str]], what: str) -> None:
        """`paths` maps each file to the names of tensors that it must have; an empty list requires none. `what` names
        the model. Raises InvalidInput if a file is damaged or lacks such a tensor, Unreadable if a file cannot be
        read."""
        self.tensors: dict[str, StoredTensor] = {}
        self._files: list[RangedFile] = []
        self._what = what
        for path, names in paths.items():
            file = RangedFile(path, what)
            self._files.append(file)
            stored = dict(_stored_tensors(file))
            for name in names:
                if name not in stored:
                    raise InvalidInput(f"{what}: {INDEX} names {path} for tensor {name!r}, but this file lacks it")
            for name in stored.keys() & self.tensors.keys():
                if not same_bits(stored[name], self.tensors[name]):
                    raise InvalidInput(
                        f"{what}: {path} and {self.tensors[name].file.path} have different tensors {name!r}; remove the file "
                        "that is not of this model, or copy all of them again"
                    )
            self.tensors |= stored

    @property
    def place(self) -> str:
        """The file, or the folder of several files, for messages."""
        first = self._files[0].path
        return first if len(self._files) == 1 else os.path.dirname(first)

    def holds_only(self, dtype: torch.dtype) -> bool:
        """Return whether all floating-point tensors have this type, so that converting them to it loses nothing."""
        dtypes = {torch_dtype(tensor.dtype) for tensor in self.tensors.values()}
        return {stored for stored in dtypes if stored.is_floating_point} <= {dtype}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()


def find_weight_files(name: str, source: str, field: str) -> WeightFiles:
    """Return the safetensors of the model `name`, whose other files are at `source`. A hub model's files are fetched
    into the hub's cache. Raises as `WeightFiles`; InvalidInput for pickled weights, or if a single file and an index
    both exist; Unreadable if there are no weights."""
    what = f"{field} {name!r}"
    index = Path(_located(source, INDEX) or "")
    files = _files_of_index(index, what) if index.is_file() else {}
    if is_url(name):
        store, path = open_url(name.rstrip("/"), field)
        has_single = store.exists(f"{path}/{SINGLE}")
    else:
        has_single = (not files or Path(source).is_dir()) and _located(source, SINGLE) is not None
    if has_single and files and SINGLE not in files:
        raise InvalidInput(
            f"{what} has both {SINGLE} and {INDEX}, and not all programs read the same one; remove the file that is "
            "not the model's"
        )
    if not has_single and not files:
        raise _without_safetensors(source, what)
    files = files or {SINGLE: []}
    if is_url(name):
        return WeightFiles({f"{name.rstrip('/')}/{file}": names for file, names in files.items()}, what)
    paths = {}
    for file, names in files.items():
        if (place := _located(source, file)) is None:
            raise Unreadable(f"{what} has no file {file}, which its {INDEX} names; copy it again")
        paths[place] = names
    return WeightFiles(paths, what)


def _without_safetensors(source: str, what: str) -> PacelineError:
    """Return the error for a model without weights, or with pickled weights."""
    found = [path.name for path in sorted(Path(source).glob("*")) if path.suffix in WEIGHT_SUFFIXES]
    if not found:
        return Unreadable(f"{what} has no weights ({SINGLE}, or {INDEX} and its files); copy them there")
    return InvalidInput(
        f"{what} has neither {SINGLE} nor {INDEX} but {', '.join(found[:FILES_SHOWN])}; pickled weights are not read, because "
        "they can run code: load the model with transformers and write it again with save_pretrained"
    )


def same_bits(first: StoredTensor, second: StoredTensor) -> bool:
    """Return whether two tensors have the same type, shape and bits; only a few rows are in memory at a time."""
    import torch

    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    rows = first.shape[0] if first.shape else 1
    step = max(1, COMPARED_BYTES * rows // max(1, first.size_bytes))
    parts: list[EllipsisType | tuple[slice, ...]] = [...]
    if first.shape:
        parts = [(slice(begin, begin + step),) for begin in range(0, rows, step)]
    return all(
        torch.equal(first[part].reshape(-1).view(torch.uint8), second[part].reshape(-1).view(torch.uint8))
        for part in parts
    )


class RangedFile:
    """Reads ranges of bytes of a file, from several threads at once."""

    def __init__(self, path: str, what: str, part_bytes: int = REMOTE_PART_BYTES) -> None:
        self.path, self._what, self._part_bytes = path, what, part_bytes
        self._descriptor = -1
        try:
            if is_url(path):
                self._store, self._key = open_url(path, "the file")
                self.size_bytes = int(self._store.size(self._key) or 0)
            else:
                with open_regular(path) as file:
                    self._descriptor = os.dup(file.fileno())
                self.size_bytes = os.fstat(self._descriptor).st_size
        except PacelineError:
            raise
        except Exception as error:  # the clients of object stores raise errors without a common base
            raise self._unreadable(error) from error

    def read(self, start: int, num_bytes: int) -> Tensor:
        """Return [num_bytes] uint8. Raises Unreadable; InvalidInput if the file ends early."""
        import torch

        raw = torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes == 0:
            return raw
        target = memoryview(raw.numpy().data)
        try:
            filled = self._fill(target, start) if self._descriptor >= 0 else self._fetch(target, start)
        except Exception as error:
            raise self._unreadable(error) from error
        if filled != num_bytes:
            raise self.damaged(f"it ends at byte {start + filled}, within a tensor")
        return raw

    def damaged(self, reason: str) -> InvalidInput:
        return InvalidInput(f"{self._what}: {self.path} is damaged: {reason}; copy it again")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _fill(self, target: memoryview, start: int) -> int:
        filled = 0
        while filled < len(target):
            count = os.preadv(self._descriptor, [target[filled:]], start + filled)
            if count == 0:
                break
            filled += count
        return filled

    def _fetch(self, target: memoryview, start: int) -> int:
        starts = list(range(start, start + len(target), self._part_bytes))
        ends = [min(begin + self._part_bytes, start + len(target)) for begin in starts]
        filled = 0
        for part in self._store.cat_ranges([self._key] * len(starts), starts, ends, on_error="raise"):
            target[filled : filled + len(part)] = part
            filled += len(part)
        return filled

    def _unreadable(self, error: Exception) -> Unreadable:
        return Unreadable(f"{self._what}: {self.path} cannot be read: {type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, with the slices that transformers uses; nothing is read before it is indexed."""

    file: RangedFile
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Offset in bytes of the tensor's first byte in the file."""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.dtype

    def __getitem__(self, index: EllipsisType | tuple[slice, ...]) -> Tensor:
        """Return a slice in the file's type. Rows are one range of bytes; other axes are read whole and cut."""
        slices: tuple[slice, ...] = () if isinstance(index, EllipsisType) else index
        dtype = torch_dtype(self.dtype)
        begin, end, _ = slices[0].indices(self.shape[0]) if slices else (0, self.shape[0] if self.shape else 1, 1)
        rows = max(end - begin, 0)
        row_bytes = math.prod(self.shape[1:]) * dtype.itemsize
        raw = self.file.read(self.offset + begin * row_bytes, rows * row_bytes)
        tensor = raw.view(dtype).view(rows, *self.shape[1:]) if self.shape else raw.view(dtype).view(())
        return tensor[(slice(None), *slices[1:])] if slices[1:] else tensor


def _stored_tensors(file: RangedFile) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors in a file's header. Raises InvalidInput if the header contradicts the file."""
    length = int.from_bytes(file.read(0, min(8, file.size_bytes)).numpy().tobytes(), "little")
    if file.size_bytes < 8 or length > min(file.size_bytes - 8, MAX_HEADER_BYTES):
        raise file.damaged(f"{file.size_bytes} bytes are too few for its header")
    try:
        header: dict[str, Any] = json.loads(file.read(8, length).numpy().tobytes())
        header.pop("__metadata__", None)
        entries = [
            (str(name), entry["dtype"], tuple(map(int, entry["shape"])), *map(int, entry["data_offsets"]))
            for name, entry in header.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise file.damaged(f"its header cannot be read ({type(error).__name__})") from error
    data = 8 + length
    for name, dtype, shape, begin, end in entries:
        if dtype not in DTYPES:
            raise InvalidInput(f"{file.path}: tensor {name!r} has type {dtype!r}, which cannot be read here")
        if end - begin != math.prod(shape) * torch_dtype(dtype).itemsize or begin < 0 or min(shape, default=0) < 0:
            raise file.damaged(f"tensor {name!r} has bytes {begin} to {end}, which does not match its shape {shape}")
        if data + end > file.size_bytes:
            raise file.damaged(f"it has {file.size_bytes} bytes, but tensor {name!r} ends at byte {data + end}")
        yield name, StoredTensor(file, name, dtype, shape, data + begin)


def _files_of_index(path: Path, what: str) -> dict[str, list[str]]:
    """Maps each file that an index names to the names of the file's tensors."""
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        files: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or os.path.basename(file) != file or not file:
                raise ValueError(f"file {file!r}")
            files.setdefault(file, []).append(name)
        if not files:
            raise ValueError("it names no tensor")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(f"{what}: {path} is damaged: {type(error).__name__}: {error}; copy it again") from error
    return files


def _located(source: str, file: str) -> str | None:
    """Return the path of a file in a local folder, or in the hub's cache after fetching it; None if the model lacks it."""
    from transformers.utils.hub import cached_file

    path: str | None = cached_file(source, file, _raise_exceptions_for_missing_entries=False)
    return path


def model_files(name: str, field: str) -> tuple[str, WeightFiles]:
    """Return `from_pretrained`'s argument for the config, and the weights. Raises as `model_source`, `WeightFiles`."""
    source = model_source(name, field)
    return source, find_weight_files(name, source, field)
