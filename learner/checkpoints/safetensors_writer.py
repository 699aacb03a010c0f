"""Writing a model's weights as safetensors files, piece by piece and in any order, as transformers reads them.

Promise: a file has its whole header before its first tensor, so that no tensor waits in memory for another; `finish` fails
where a byte was not written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from paceline.models.weight_files import DTYPES, INDEX, SINGLE, torch_dtype

MAX_FILE_BYTES = 5 << 30
NAMES = {torch_dtype(name): name for name in DTYPES}


@dataclass(frozen=True)
class TensorHeader:
    """Name, type and shape of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsWriter:
    """The weight files of one folder: one file, or several with an index. A context manager that closes them."""

    def __init__(
        self, folder: Path, headers: Sequence[TensorHeader], max_file_bytes: int = MAX_FILE_BYTES
    ) -> None:
        self._folder, self._headers = folder, headers
        self._descriptors: list[int] = []
        self._at: dict[str, tuple[int, int, TensorHeader]] = {}
        self._left = {header.name: header.num_bytes for header in headers}
        parts = _parts(headers, max_file_bytes)
        self._names = {
            index: SINGLE if len(parts) == 1 else f"model-{index + 1:05d}-of-{len(parts):05d}.safetensors"
            for index in range(len(parts))
        }
        for index, part in enumerate(parts):
            self._begin(index, part)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    def write(self, name: str, first_element: int, values: Tensor) -> None:
        """Write `values` as the elements of tensor `name` from `first_element` on. Raises OSError (a full disk)."""
        descriptor, start, header = self._at[name]
        if values.dtype != header.dtype:
            raise ValueError(f"{name!r} is {header.dtype}, these values are {values.dtype}")
        data = memoryview(values.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        offset = start + first_element * header.dtype.itemsize
        self._left[name] -= len(data)
        while data:
            count = os.pwrite(descriptor, data, offset)
            data, offset = data[count:], offset + count

    def finish(self) -> None:
        """Write the index, if there are several files. Raises ValueError for a tensor that was not written once."""
        for name, left in self._left.items():
            if left:
                raise ValueError(f"{left} bytes of tensor {name!r} were not written")
        if len(self._names) > 1:
            index = {
                "metadata": {"total_size": sum(header.num_bytes for header in self._headers)},
                "weight_map": dict(sorted(self._files().items())),
            }
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _files(self) -> dict[str, str]:
        numbers = {descriptor: index for index, descriptor in enumerate(self._descriptors)}
        return {name: self._names[numbers[descriptor]] for name, (descriptor, _, _) in self._at.items()}

    def _begin(self, index: int, part: Sequence[TensorHeader]) -> None:
        """Write the header of a file. Wider types come first, so that each tensor is aligned to its type."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offsets, end = {}, 0
        for header in sorted(part, key=lambda header: -header.dtype.itemsize):
            begin, end = end, end + header.num_bytes
            offsets[header.name] = begin
            entries[header.name] = {
                "dtype": NAMES[header.dtype],
                "shape": list(header.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        path = self._folder / self._names[index]
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._descriptors.append(descriptor)
        os.pwrite(descriptor, len(text).to_bytes(8, "little") + text, 0)
        os.ftruncate(descriptor, 8 + len(text) + end)
        for header in part:
            self._at[header.name] = descriptor, 8 + len(text) + offsets[header.name], header


def _parts(headers: Sequence[TensorHeader], max_file_bytes: int) -> list[list[TensorHeader]]:
    """Return the tensors of each file, in order; a larger tensor has a file alone."""
    parts: list[list[TensorHeader]] = [[]]
    filled = 0
    for header in headers:
        if parts[-1] and filled + header.num_bytes > max_file_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(header)
        filled += header.num_bytes
    return parts
