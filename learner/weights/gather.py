"""Gathers the model's weights on rank 0, as a copy that later optimizer steps do not touch.

The ranks share the work: each converts its shards to the published type and packs them, and only rank 0 receives.
Promise: every rank goes through the same buckets in the same order, and all buckets have ended when the call returns,
so no unfinished gather overlaps with another collective; only rank 0 keeps the weights. Names are those of the Hugging
Face model without wrappers; tied weights appear under each of their names but exist once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from paceline.learner.model.adapter import adapter_weights, has_adapter, merged_state
from paceline.learner.model.mesh import in_first_replica, shard_group
from paceline.weights.format.manifest import TensorPlan, WeightManifest
from paceline.weights.format.packing import empty_flat, views

BUCKET_BYTES = 64 << 20
"""Most bytes of a rank's shards that are sent at a time."""

WRAPPER_PARTS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""Parts that wrappers add to state-dict names; the receiving model has no wrappers."""


def gather_weights(model: nn.Module, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Return all published tensors on rank 0, whole and in host memory (pinned if the model is on a GPU); on other
    ranks return an empty dict. A collective call: all ranks of the model's mesh must make it at the same point.
    Floating-point tensors are converted to `dtype` (None keeps their types) before they are sent. The tensors are views
    of one allocation, laid out as `paceline.weights.format.packing.plan` does, so they are written without another
    copy."""
    tensors = named_weights(model)
    return _gather(tensors, dtype, _allocate(tensors, dtype))


def gather_merged(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gather the architecture's whole state dict as `gather_weights` does, with an adapter merged into its base."""
    if not has_adapter(model):
        return gather_weights(model, None)
    state = _state(model)
    whole = _gather(state, None, _allocate(state, None))
    return merged_state(model, whole) if whole else {}


def _gather(
    tensors: dict[str, torch.Tensor], dtype: torch.dtype | None, gathered: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    is_first = is_first_rank()
    sharded: list[tuple[str, DTensor]] = []
    seen: set[int] = set()
    for name, kept in tensors.items():
        if id(kept) in seen:
            continue
        seen.add(id(kept))
        tensor = kept.detach()
        if isinstance(tensor, DTensor) and is_split_by_rows(tensor):
            sharded.append((name, tensor))
        elif isinstance(tensor, DTensor):
            whole = _converted(tensor, dtype).full_tensor()
            if is_first:
                gathered[name].copy_(whole)
        elif is_first:
            gathered[name].copy_(tensor)
    previous: _Gathering | None = None
    for bucket in _buckets(sharded):
        current = _Gathering(bucket, dtype)
        if previous is not None:
            previous.finish(gathered)
        previous = current
    if previous is not None:
        previous.finish(gathered)
    return gathered


class _Gathering:
    """A bucket that is sent to rank 0: every rank's shards of some tensors, one after another. Rank r of K has rows
    [r·c, (r + 1)·c) of a tensor of n rows, c = ceil(n / K), as far as there are any; a rank with fewer rows is
    padded, because a gather needs equal sizes. Only the first replica sends."""

    def __init__(self, bucket: list[tuple[str, DTensor]], dtype: torch.dtype | None) -> None:
        self._bucket = bucket
        self._size, group = shard_group(bucket[0][1])
        shards = [_converted(tensor.to_local(), dtype).contiguous().view(-1) for _, tensor in bucket]
        num_bytes = [
            -(-tensor.shape[0] // self._size) * _row_bytes(tensor, shard.dtype)
            for (_, tensor), shard in zip(bucket, shards, strict=True)
        ]
        self._packed = torch.zeros(sum(num_bytes), dtype=torch.uint8, device=shards[0].device)
        start = 0
        for shard, length in zip(shards, num_bytes, strict=True):
            self._packed[start : start + shard.nbytes].copy_(shard.view(torch.uint8))
            start += length
        self._all: list[torch.Tensor] | None = None
        self._work: Any = None
        if not in_first_replica(bucket[0][1]):
            return
        if is_first_rank():
            self._all = [torch.empty_like(self._packed) for _ in range(self._size)]
        # Two in flight: while this bucket is sent, rank 0 unpacks the previous one and every rank packs the next one.
        self._work = dist.gather(self._packed, self._all, dst=0, group=group, async_op=True)

    def finish(self, gathered: dict[str, torch.Tensor]) -> None:
        """Wait for the bucket and, on rank 0, write its rows into their tensors."""
        if self._work is not None:
            self._work.wait()
        if self._all is None:
            return
        for rank, received in enumerate(self._all):
            start = 0
            for name, tensor in self._bucket:
                target = gathered[name]
                rows = -(-tensor.shape[0] // self._size)
                here = target[rank * rows : (rank + 1) * rows]
                here.view(-1).view(torch.uint8).copy_(received[start : start + here.nbytes])
                start += rows * _row_bytes(tensor, target.dtype)


def _buckets(sharded: list[tuple[str, DTensor]]) -> Iterator[list[tuple[str, DTensor]]]:
    """Yield `sharded` in order, in buckets. A bucket has tensors of one mesh, at most BUCKET_BYTES on each rank unless
    it is a single tensor."""
    part: list[tuple[str, DTensor]] = []
    filled = 0
    for name, tensor in sharded:
        size = -(-tensor.nbytes // shard_group(tensor)[0])
        if part and (filled + size > BUCKET_BYTES or part[0][1].device_mesh != tensor.device_mesh):
            yield part
            part, filled = [], 0
        part.append((name, tensor))
        filled += size
    if part:
        yield part


def is_split_by_rows(tensor: DTensor) -> bool:
    """Return whether the ranks of a replica have consecutive rows, as with FSDP2: a shard is one run of bytes."""
    (*others, last) = tensor.placements
    by_rows = isinstance(last, Shard) and last.dim == 0 and tensor.numel() > 0
    return by_rows and all(placement.is_replicate() for placement in others)


def _row_bytes(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    return tensor.numel() // tensor.shape[0] * dtype.itemsize


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the published tensors under their published names: if the model has an adapter, only the adapter; else
    parameters and persistent buffers by their unwrapped names. Tied names give the identical object."""
    return adapter_weights(model) if has_adapter(model) else _state(model)


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    return {unwrapped(name): tensor for name, tensor in state.items()}


def unwrapped(name: str) -> str:
    """Return a state-dict name without the parts that wrappers add."""
    for part in WRAPPER_PARTS:
        name = name.replace(part, "")
    return name


def is_first_rank() -> bool:
    """Return whether this process keeps the gathered tensors: rank 0, or the only process."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _converted(tensor: Any, dtype: torch.dtype | None) -> Any:
    """Return `tensor` in the published type, which halves the bytes if that is a 16-bit type."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def plan_tensors(model: nn.Module, dtype: torch.dtype | None) -> tuple[TensorPlan, ...]:
    """Return names, dtypes, shapes and ties of the whole model, the same on every rank."""
    return _planned(named_weights(model), dtype)


def _planned(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> tuple[TensorPlan, ...]:
    first: dict[int, str] = {}
    plans = []
    for name, tensor in tensors.items():
        owner = first.setdefault(id(tensor), name)
        same_as = None if owner == name else owner
        plans.append(TensorPlan(name, wire_name(tensor, dtype), tuple(tensor.shape), same_as))
    return tuple(plans)


def wire_name(tensor: torch.Tensor, dtype: torch.dtype | None) -> str:
    """Return the name of a tensor's published type."""
    wire = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return str(wire).removeprefix("torch.")


def _allocate(tensors: dict[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Return the memory for the gathered tensors on the rank that keeps them; an empty dict on other ranks."""
    if not is_first_rank():
        return {}
    layout = WeightManifest.plan(_planned(tensors, dtype), bucket_bytes=1 << 28)
    flat = empty_flat(layout)
    if any(tensor.is_cuda for tensor in tensors.values()):
        flat = flat.pin_memory()
    flat.zero_()
    return views(flat, layout)
