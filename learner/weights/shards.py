"""A rank's slices of the model's weights, as a copy that later optimizer steps do not touch.

Nothing is gathered: each rank of the first replica copies its rows of a tensor that FSDP2 has sharded, and rank 0 alone
copies the other tensors. Together the slices of all ranks are every tensor, once. Names are those of `learner.weights.gather.named_weights`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from learner.model.mesh import in_first_replica
from learner.weights.gather import is_first_rank, named_weights
from paceline.errors import InvalidInput
from paceline.weights.manifest import DTYPE_BYTES, TensorPlan
from paceline.weights.packing import plan


@dataclass(frozen=True)
class LocalSlice:
    """Elements [start, start + len(bits)) of a tensor, flattened."""

    name: str
    dtype: str
    """Name of the dtype in torch, without `torch.`."""
    shape: tuple[int, ...]
    """Shape of this slice: whole rows of the tensor."""
    start: int
    bits: npt.NDArray[Any]
    """[N] unsigned integers of the dtype's width."""

    @property
    def data(self) -> memoryview:
        """The slice's bytes."""
        return self.bits.view(np.uint8).data


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
def local_slices(model: nn.Module, dtype: torch.dtype | None) -> list[LocalSlice]:
    """Return this rank's slices, copied to host memory; floating-point tensors as `dtype` (None keeps theirs).

    Raises InvalidInput for a tensor that is sharded by anything but whole rows.
    """
    slices = []
    seen: set[int] = set()
    for name, tensor in named_weights(model).items():
        if id(tensor) in seen:
            continue  # tied: it travels under its first name
        seen.add(id(tensor))
        local, start = _local(name, tensor.detach())
        if local is None or local.numel() == 0:
            continue
        wire = dtype if dtype is not None and local.is_floating_point() else local.dtype
        copy = local.to("cpu", wire, copy=True, memory_format=torch.contiguous_format)
        slices.append(
            LocalSlice(name, str(wire).removeprefix("torch."), tuple(copy.shape), start, _bits(copy))
        )
    return slices


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
            slices.append(LocalSlice(entry.name, entry.dtype, entry.shape, 0, bits))
    return slices, tuple(plans)


def _local(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """Return this rank's part of a tensor, and the index of its first element."""
    if not isinstance(tensor, DTensor):
        return (tensor, 0) if is_first_rank() else (None, 0)
    if all(placement.is_replicate() for placement in tensor.placements):
        return (tensor.to_local(), 0) if is_first_rank() else (None, 0)
    (*others, last) = tensor.placements
    if last != Shard(0) or not all(placement.is_replicate() for placement in others):
        raise InvalidInput(
            f"tensor {name!r} is placed as {tensor.placements}; the delta channel writes shards of whole rows only, "
            "set weights.channel to collective"
        )
    if not in_first_replica(tensor):
        return None, 0
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), offset[0] * math.prod(tensor.shape[1:])


def _bits(tensor: torch.Tensor) -> npt.NDArray[Any]:
    raw = tensor.view(-1).view(torch.uint8).numpy()
    return raw.view(f"u{DTYPE_BYTES[str(tensor.dtype).removeprefix('torch.')]}")


def _wire_name(tensor: torch.Tensor, dtype: torch.dtype | None) -> str:
    wire = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return str(wire).removeprefix("torch.")
