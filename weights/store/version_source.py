"""Content of a version on one rank, as input of the weight store's writer: all elements, or the changes.

The writer keeps the elements of the version that it wrote last (`KeptVersion`), and updates them to the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.groups import Version
from paceline.weights.format.delta_codec import Changes
from paceline.weights.format.manifest import DTYPE_BYTES, TensorPlan
from paceline.weights.format.packing import plan
from paceline.weights.store.store_layout import Block, RankLayout

Bits = npt.NDArray[Any]


@dataclass(frozen=True)
class LocalSlice:
    """The elements of one block, a box of a tensor."""

    block: Block
    bits: npt.NDArray[Any]
    """[N] bits of the elements, as unsigned integers of the dtype's width."""

    @property
    def data(self) -> memoryview:
        return self.bits.view(np.uint8).data


@dataclass(frozen=True)
class WholeSlices:
    """All elements of a rank, in host memory; they must not change any more."""

    slices: list[LocalSlice]


@dataclass(frozen=True)
class ChunkChanges:
    changes: Changes
    positions_K: npt.NDArray[np.int32]
    """[K] positions of the changed elements in the chunk, in the order of the changes."""


@dataclass(frozen=True)
class FoundChanges:
    """For each changed chunk, the changes since the previous source."""

    chunks: Mapping[int, ChunkChanges]


VersionSource = WholeSlices | FoundChanges


@dataclass(frozen=True)
class KeptVersion:
    """The elements of a version, and the checksum of each chunk."""

    version: Version
    slices: list[LocalSlice]
    layout: RankLayout
    checksums: list[str]

    def chunk(self, chunk: int) -> Bits:
        """Return [N] the bits of a chunk: a view of the kept bits if they are contiguous, else a copy."""
        return chunk_bits(self.slices, self.layout, chunk)

    def change(self, chunk: int, found: ChunkChanges) -> None:
        """Change a chunk's bits in place; repeating the same change has no effect."""
        bits_N = self.chunk(chunk)
        bits_N[found.positions_K] = found.changes.new_K
        end = 0
        for piece in self.layout.chunks[chunk]:
            block = self.layout.blocks[piece.block]
            run = self.slices[piece.block].bits[piece.first * block.row_elements : piece.last * block.row_elements]
            start, end = end, end + len(run)
            if len(run) < len(bits_N):
                run[:] = bits_N[start:end]


def chunk_bits(slices: list[LocalSlice], layout: RankLayout, chunk: int) -> Bits:
    """Return [N] the bits of a chunk: a view if it is one run of memory, else a copy."""
    runs = []
    for piece in layout.chunks[chunk]:
        row = layout.blocks[piece.block].row_elements
        runs.append(slices[piece.block].bits[piece.first * row : piece.last * row])
    return runs[0] if len(runs) == 1 else np.concatenate([run.view(runs[0].dtype) for run in runs])


def whole_slices(tensors: Mapping[str, torch.Tensor]) -> tuple[list[LocalSlice], tuple[TensorPlan, ...]]:
    """Return gathered tensors, which must not change any more, as the slices of a single rank."""
    slices, plans = [], []
    owners: dict[int, str] = {}
    for entry in plan(tensors, bucket_bytes=1 << 28).entries:
        owner = owners.setdefault(entry.offset, entry.name) if entry.num_bytes else entry.name
        same_as = None if owner == entry.name else owner
        plans.append(TensorPlan(entry.name, entry.dtype, entry.shape, same_as))
        if same_as is None and entry.num_bytes:
            bits = bits_of(tensors[entry.name].detach().cpu().contiguous())
            block = Block(entry.name, entry.dtype, tuple(0 for _ in entry.shape), entry.shape)
            slices.append(LocalSlice(block, bits))
    return slices, tuple(plans)


def bits_of(tensor: torch.Tensor) -> Bits:
    """Return [N] the bits of a contiguous tensor in host memory."""
    raw = tensor.view(-1).view(torch.uint8).numpy()
    return raw.view(f"u{DTYPE_BYTES[str(tensor.dtype).removeprefix('torch.')]}")
