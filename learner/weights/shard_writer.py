"""Writes a rank's shards of the model into the memory of its host, in the published type.

Nothing is gathered: each rank of the first replica writes its rows of a tensor that is split by rows, and rank 0 writes
the other tensors. Tensors with other placements are first made whole, one at a time, by a collective of all ranks. On a
GPU the conversion and the copies run on a separate stream into page-locked memory; the caller gets an event, and only
the next optimizer step waits. Promise: every byte of every tensor is written by exactly one rank, at the offset that
all ranks computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.groups import Version
from paceline.learner.model.mesh import in_first_replica, shard_group
from paceline.learner.weights.gather import is_first_rank, is_split_by_rows, named_weights, plan_tensors
from paceline.weights.format.manifest import WeightManifest
from paceline.weights.hosts.manifest import HostManifest, Owned, PieceAlgorithm, bucket_bytes_for, joined
from paceline.weights.hosts.segment import HostSegment


class _Part(NamedTuple):
    values: Tensor
    offset: int


class ShardWriter:
    """Writer of one rank. `host_of_rank` has the index of each rank's host among the learner's hosts."""

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, run_id: str, host_of_rank: Sequence[int], algorithm: PieceAlgorithm
    ) -> None:
        self._dtype = dtype
        plans = plan_tensors(model, dtype)
        total_bytes = WeightManifest.plan(plans, bucket_bytes=1 << 30).total_bytes
        layout = WeightManifest.plan(plans, bucket_bytes_for(total_bytes))
        self._offsets = {entry.name: entry.offset for entry in layout.entries}
        self._total_bytes = layout.total_bytes
        owned = joined(self._owners(model, layout, host_of_rank))
        self.manifest = HostManifest(run_id, Version(0, 0), layout, owned, algorithm)
        """Manifest that every version starts from: layout and owners, without digests."""
        device = next(model.parameters()).device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def write(self, model: nn.Module, segment: HostSegment) -> torch.cuda.Event | None:
        """Write this rank's parts into the segment. Return the event of the last copy, for which the next optimizer
        step must wait; None if everything is written already."""
        flat = segment.flat()
        if self._stream is None:
            for part in self._parts(model):
                self._target(flat, part).copy_(part.values.view(-1))
            return None
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            parts = list(self._parts(model))
            segment.page_lock(self._ranges(parts))  # a copy from a GPU into other memory would block
            for part in parts:
                target = self._target(flat, part)
                # Converted on the device: half the bytes for the bus.
                target.copy_(part.values.view(-1).to(target.dtype), non_blocking=True)
            event: torch.cuda.Event = stream.record_event()
            return event

    def _owners(self, model: nn.Module, layout: WeightManifest, host_of_rank: Sequence[int]) -> Iterator[Owned]:
        entries = {entry.name: entry for entry in layout.entries}
        for name, tensor in _distinct(model):
            entry = entries[name]
            if not entry.num_bytes:
                continue
            if not (isinstance(tensor, DTensor) and is_split_by_rows(tensor)):
                yield Owned(entry.offset, entry.offset + entry.num_bytes, host_of_rank[0])
                continue
            row_bytes = entry.num_bytes // tensor.shape[0]
            for rank, begin, end in _rows_by_rank(tensor):
                yield Owned(entry.offset + begin * row_bytes, entry.offset + end * row_bytes, host_of_rank[rank])

    def _parts(self, model: nn.Module) -> Iterator[_Part]:
        for name, kept in _distinct(model):
            tensor, offset = kept.detach(), self._offsets[name]
            if isinstance(tensor, DTensor) and is_split_by_rows(tensor):
                local = tensor.to_local()
                if in_first_replica(tensor) and local.numel():
                    size, _ = shard_group(tensor)
                    index = tensor.device_mesh.get_local_rank(tensor.device_mesh.ndim - 1)
                    first = index * -(-tensor.shape[0] // size) * math.prod(tensor.shape[1:])
                    yield _Part(local.contiguous(), offset + first * self._wire(tensor).itemsize)
            elif isinstance(tensor, DTensor):
                whole = tensor.full_tensor()  # on all ranks
                if is_first_rank() and whole.numel():
                    yield _Part(whole.contiguous(), offset)
            elif is_first_rank() and tensor.numel():
                yield _Part(tensor.contiguous(), offset)

    def _wire(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if tensor.is_floating_point() else tensor.dtype

    def _target(self, flat: Tensor, part: _Part) -> Tensor:
        wire = self._wire(part.values)
        return flat[part.offset : part.offset + part.values.numel() * wire.itemsize].view(wire)

    def _ranges(self, parts: list[_Part]) -> Iterator[tuple[int, int]]:
        for part in parts:
            yield part.offset, part.offset + part.values.numel() * self._wire(part.values).itemsize


def _distinct(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the published tensors by their first names; tied ones are published once."""
    seen: set[int] = set()
    for name, tensor in named_weights(model).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _rows_by_rank(tensor: DTensor) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, first row, end) for each rank of the first replica that has rows."""
    size, _ = shard_group(tensor)
    ranks = tensor.device_mesh.mesh.reshape(-1, size)[0].tolist()
    rows = -(-tensor.shape[0] // size)
    for index, rank in enumerate(ranks):
        begin, end = index * rows, min((index + 1) * rows, tensor.shape[0])
        if begin < end:
            yield rank, begin, end
