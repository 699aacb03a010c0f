"""A rank's slices of the model's weights, as a copy that later optimizer steps do not touch.

Nothing is gathered: each rank copies its box of every tensor that a mesh of any dimensions has divided, of several ranks
that hold the same box the first one, and rank 0 alone copies the other tensors. Together the slices of all ranks are every
tensor, once. Names are those of `paceline.learner.weights.gather.named_weights`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from paceline.errors import InvalidInput
from paceline.learner.weights.gather import is_first_rank, named_weights
from paceline.models.architectures import split_dimension
from paceline.weights.manifest import DTYPE_BYTES, TensorPlan
from paceline.weights.packing import plan
from paceline.weights.store_layout import Block


@dataclass(frozen=True)
class LocalSlice:
    """A box of a tensor."""

    block: Block
    bits: npt.NDArray[Any]
    """[N] unsigned integers of the dtype's width."""

    @property
    def data(self) -> memoryview:
        """The slice's bytes."""
        return self.bits.view(np.uint8).data


@dataclass(frozen=True)
class ColumnTiles:
    """Columns are stored in `size` tiles where an engine's ranks load them so, `dimensions` as in
    `paceline.models.architectures.split_dimensions`."""

    size: int
    dimensions: Mapping[str, int]

    def of(self, name: str, shape: tuple[int, ...]) -> int:
        """Return the number of tiles of a tensor."""
        return self.size if split_dimension(self.dimensions, name, shape, self.size) == 1 else 1


NO_TILES = ColumnTiles(1, {})


def plan_tensors(model: nn.Module, dtype: torch.dtype | None) -> tuple[TensorPlan, ...]:
    """Return names, dtypes, shapes and ties of the whole model, the same on every rank."""
    first: dict[int, str] = {}
    plans = []
    for name, tensor in named_weights(model).items():
        owner = first.setdefault(id(tensor), name)
        same_as = None if owner == name else owner
        plans.append(TensorPlan(name, _wire_name(tensor, dtype), tuple(tensor.shape), same_as))
    return tuple(plans)


@torch.no_grad()
def local_slices(
    model: nn.Module, dtype: torch.dtype | None, tiles: ColumnTiles = NO_TILES
) -> list[LocalSlice]:
    """Return this rank's slices, copied to host memory; floating-point tensors as `dtype` (None keeps theirs).

    Raises InvalidInput for a tensor of which the ranks hold summands.
    """
    return [slice_of(block, local) for block, local in local_boxes(model, dtype, tiles)]


def slice_of(block: Block, local: torch.Tensor) -> LocalSlice:
    """Return a box as a slice, copied to host memory."""
    wire = getattr(torch, block.dtype)
    return LocalSlice(block, _bits(local.to("cpu", wire, copy=True, memory_format=torch.contiguous_format)))


def local_boxes(
    model: nn.Module, dtype: torch.dtype | None, tiles: ColumnTiles = NO_TILES
) -> list[tuple[Block, torch.Tensor]]:
    """Return this rank's boxes, in the order of `local_slices`, with the live tensors as they are; the blocks name the
    types that are published. Elements of one width follow each other."""
    return sorted(_boxes(model, dtype, tiles), key=lambda box: DTYPE_BYTES[box[0].dtype])


def _boxes(
    model: nn.Module, dtype: torch.dtype | None, tiles: ColumnTiles
) -> Iterator[tuple[Block, torch.Tensor]]:
    seen: set[int] = set()
    for name, tensor in named_weights(model).items():
        if id(tensor) in seen:
            continue  # tied: it travels under its first name
        seen.add(id(tensor))
        local, offsets = _local(name, tensor.detach())
        if local is None or local.numel() == 0:
            continue
        wire, shape = _wire_name(local, dtype), tuple(local.shape)
        count = tiles.of(name, tuple(tensor.shape)) if len(shape) == 2 else 1
        width = -(-tensor.shape[1] // count) if count > 1 else 0
        if not width:
            yield Block(name, wire, offsets, shape), local
            continue
        first, end = offsets[1], offsets[1] + shape[1]
        for start in range(first // width * width, end, width):
            begin, stop = max(start, first), min(start + width, end)
            block = Block(name, wire, (offsets[0], begin), (shape[0], stop - begin))
            yield block, local[:, begin - first : stop - first]


def whole_slices(tensors: Mapping[str, torch.Tensor]) -> tuple[list[LocalSlice], tuple[TensorPlan, ...]]:
    """Return gathered tensors, which must not change any more, as the slices of a single rank."""
    slices, plans = [], []
    owners: dict[int, str] = {}
    for entry in plan(tensors, bucket_bytes=1 << 28).entries:
        owner = owners.setdefault(entry.offset, entry.name) if entry.num_bytes else entry.name
        same_as = None if owner == entry.name else owner
        plans.append(TensorPlan(entry.name, entry.dtype, entry.shape, same_as))
        if same_as is None and entry.num_bytes:
            bits = _bits(tensors[entry.name].detach().cpu().contiguous())
            block = Block(entry.name, entry.dtype, tuple(0 for _ in entry.shape), entry.shape)
            slices.append(LocalSlice(block, bits))
    return slices, tuple(plans)


def _local(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor | None, tuple[int, ...]]:
    """Return this rank's part of a tensor, None where another rank has the same, and the indices of its first element."""
    start = tuple(0 for _ in tensor.shape)
    if not isinstance(tensor, DTensor):
        return (tensor, start) if is_first_rank() else (None, start)
    if any(placement.is_partial() for placement in tensor.placements):
        raise InvalidInput(f"tensor {name!r} is placed as {tensor.placements}: no rank has its elements")
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None, start
    places = zip(coordinate, tensor.placements, strict=True)
    if any(index and placement.is_replicate() for index, placement in places):
        return None, start
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(offsets)


def _bits(tensor: torch.Tensor) -> npt.NDArray[Any]:
    raw = tensor.view(-1).view(torch.uint8).numpy()
    return raw.view(f"u{DTYPE_BYTES[str(tensor.dtype).removeprefix('torch.')]}")


def _wire_name(tensor: torch.Tensor, dtype: torch.dtype | None) -> str:
    wire = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return str(wire).removeprefix("torch.")
