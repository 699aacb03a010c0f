"""Takes the weights that a rank publishes: its slices of the model, or the changes since the last version, which its
GPU finds.

Nothing is gathered. Each rank copies its box of every tensor that a mesh (of any dimensions) divides; if several ranks
hold the same box, only the first of them copies it. Only rank 0 copies the tensors that no mesh divides. Together the
slices of all ranks have every element once. Names are those of `paceline.learner.weights.gather.named_weights`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from paceline.errors import InvalidInput
from paceline.learner.weights.gather import is_first_rank, named_weights, wire_name
from paceline.weights.format.delta_codec import MAGNITUDE_BITS, MAGNITUDE_SHIFT, Changes, choose_bounds
from paceline.weights.format.manifest import DTYPE_BYTES
from paceline.weights.store.store_layout import CHUNK_ELEMENTS, Block, RankLayout
from paceline.weights.store.version_source import (
    ChunkChanges,
    FoundChanges,
    LocalSlice,
    VersionSource,
    WholeSlices,
    bits_of,
    chunk_bits,
)

log = logging.getLogger(__name__)

SPARE = 1.5
"""The device keeps the copy only if its free memory is at least this many times the copy's size."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def local_slices(model: nn.Module, dtype: torch.dtype | None) -> list[LocalSlice]:
    """Return this rank's slices, copied to host memory; floating-point tensors are converted to `dtype` (None keeps
    their types). Raises InvalidInput for a tensor whose elements are sums over ranks."""
    return [slice_of(block, local) for block, local in local_boxes(model, dtype)]


def slice_of(block: Block, local: torch.Tensor) -> LocalSlice:
    wire = getattr(torch, block.dtype)
    return LocalSlice(block, bits_of(local.to("cpu", wire, copy=True, memory_format=torch.contiguous_format)))


def local_boxes(model: nn.Module, dtype: torch.dtype | None) -> list[tuple[Block, torch.Tensor]]:
    """Return this rank's boxes, in the order of `local_slices`: a block with the published type, and the live tensor in
    its own type. Tensors of one element width follow each other."""
    return sorted(_boxes(model, dtype), key=lambda box: DTYPE_BYTES[box[0].dtype])


def _boxes(model: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[Block, torch.Tensor]]:
    seen: set[int] = set()
    for name, tensor in named_weights(model).items():
        if id(tensor) in seen:
            continue  # tied: it is published under its first name
        seen.add(id(tensor))
        local, offsets = _local(name, tensor.detach())
        if local is not None and local.numel():
            yield Block(name, wire_name(local, dtype), offsets, tuple(local.shape)), local


def _local(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor | None, tuple[int, ...]]:
    """Return this rank's part of a tensor (None if another rank copies it) and its first element's indices."""
    start = tuple(0 for _ in tensor.shape)
    if not isinstance(tensor, DTensor):
        return (tensor, start) if is_first_rank() else (None, start)
    if any(placement.is_partial() for placement in tensor.placements):
        raise InvalidInput(f"tensor {name!r} is placed as {tensor.placements}: no rank has its elements")
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None, start
    axes = zip(coordinate, tensor.placements, strict=True)
    if any(index and placement.is_replicate() for index, placement in axes):
        return None, start
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(offsets)


class DeviceSnapshot:
    """Holds the weights that a rank published last, on its GPU, so that only changes reach the host. `dtype` as in
    `local_slices`.

    Promise: when `take` returns, its result is in host memory and nothing reads the model any more, so the next
    optimizer step may write it. The comparison costs a few passes over the rank's shards at the speed of the device's
    memory, and the memory of one copy in the published type. It waits for the device once for each chunk of the store's
    format, to learn the number of changed elements.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, chunk_elements: int = CHUNK_ELEMENTS) -> None:
        self._model, self._dtype = model, dtype
        self.layout = RankLayout(tuple(block for block, _ in self._boxes()), chunk_elements)
        self._kept: list[Tensor] = []
        self._bounds: list[tuple[int, ...]] = []

    @property
    def size_bytes(self) -> int:
        """Bytes of the copy on the device."""
        return sum(map(self.layout.size_bytes, range(len(self.layout.chunks))))

    def fits(self) -> bool:
        """Return whether the model is on a GPU that has room for the copy."""
        devices = {local.device for _, local in self._boxes()}
        if len(devices) != 1 or (device := devices.pop()).type != "cuda":
            return False
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if free < SPARE * self.size_bytes:
            log.info(
                "weights are compared on the CPU: the GPU has %.1f GB free, too little for a copy of %.1f GB",
                free / 1e9,
                self.size_bytes / 1e9,
            )
            return False
        return True

    @torch.no_grad()
    def take(self, replaced: VersionSource | None = None) -> VersionSource:
        """Return all slices at the first call, or if the previous version was not written in full; otherwise the
        changes since the previous version. `replaced` is the previous result of `take`, if it will not be written."""
        if not self._kept or isinstance(replaced, WholeSlices):
            return self._whole()
        if isinstance(replaced, FoundChanges):
            for chunk, found in replaced.chunks.items():
                self._put_back(chunk, found)
        boxes = self._boxes()
        changed_chunks = {}
        for chunk in range(len(self.layout.chunks)):
            on_device = _compared(self._kept[chunk], self._chunk(boxes, chunk), self._bounds[chunk])
            if on_device is not None:
                changed_chunks[chunk] = on_device
        # The copies to the host overlap with the comparisons; the thread waits for them only here.
        if self._kept[0].is_cuda:
            torch.cuda.current_stream(self._kept[0].device).synchronize()
        return FoundChanges({chunk: changes.on_host() for chunk, changes in changed_chunks.items()})

    def _whole(self) -> WholeSlices:
        boxes = self._boxes()
        self._kept = [self._chunk(boxes, chunk).clone() for chunk in range(len(self.layout.chunks))]
        slices = [slice_of(block, local) for block, local in boxes]
        self._bounds = [choose_bounds(chunk_bits(slices, self.layout, chunk)) for chunk in range(len(self._kept))]
        return WholeSlices(slices)

    def _boxes(self) -> list[tuple[Any, Tensor]]:
        return local_boxes(self._model, self._dtype)

    def _chunk(self, boxes: list[tuple[Any, Tensor]], chunk: int) -> Tensor:
        runs = []
        for piece in self.layout.chunks[chunk]:
            block, local = boxes[piece.block]
            rows = local[piece.first : piece.last] if local.ndim else local.reshape(1)
            wire: torch.dtype = getattr(torch, block.dtype)
            flat = rows.to(wire).reshape(-1)
            runs.append(flat.view(_INTEGERS[flat.element_size()]))
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    def _put_back(self, chunk: int, found: ChunkChanges) -> None:
        kept = self._kept[chunk]
        base_K = found.changes.base_K
        signed = torch.from_numpy(
            base_K.view(base_K.dtype.str.replace("u", "i") if kept.dtype != torch.uint8 else "u1")
        )
        kept[torch.from_numpy(found.positions_K).to(kept.device, torch.int64)] = signed.to(kept.device)


class _OnDevice:
    """Holds the changes of a chunk while they are copied to the host, ordered by class, then by rank in the class."""

    def __init__(self, bounds: tuple[int, ...], sizes_C: Tensor, counts_C: Tensor, arrays: list[Tensor]) -> None:
        self._bounds = bounds
        self._small = _to_host(torch.stack([sizes_C, counts_C]))
        self._arrays = [_to_host(array) for array in arrays]

    def on_host(self) -> ChunkChanges:
        """Return the changes, once the device has finished."""
        sizes_C, counts_C = self._small.tolist()
        positions_K, ranks_K, base_K, new_K = (array.numpy() for array in self._arrays)
        width = base_K.dtype.itemsize
        ranks = np.split(ranks_K, np.cumsum(counts_C)[:-1])
        changes = Changes(self._bounds, tuple(sizes_C), tuple(ranks), base_K.view(f"u{width}"), new_K.view(f"u{width}"))
        return ChunkChanges(changes, positions_K)


def _compared(kept_N: Tensor, new_N: Tensor, bounds: tuple[int, ...]) -> _OnDevice | None:
    """Return the differences, and set `kept_N` to the new bits; None if nothing differs."""
    positions_K = (kept_N != new_N).nonzero().squeeze(1)
    if not len(positions_K):
        return None
    ranks_K = positions_K
    sizes_C = torch.full((len(bounds) + 1,), len(kept_N), device=kept_N.device)
    counts_C = torch.full((1,), len(positions_K), device=kept_N.device)
    if bounds:
        magnitudes_N = (kept_N & MAGNITUDE_BITS) >> MAGNITUDE_SHIFT
        class_K = torch.zeros_like(positions_K)
        for number, (high, low) in enumerate(zip(bounds, (*bounds[1:], 0), strict=True), start=1):
            is_here_N = (magnitudes_N < high) & (magnitudes_N >= low)
            rank_N = is_here_N.cumsum(0, dtype=torch.int32)
            sizes_C[number] = rank_N[-1]
            is_here_K = is_here_N[positions_K]
            class_K.masked_fill_(is_here_K, number)
            ranks_K = torch.where(is_here_K, rank_N[positions_K] - 1, ranks_K)
        order_K = torch.argsort(class_K, stable=True)
        counts_C = (class_K.unsqueeze(1) == torch.arange(len(sizes_C), device=kept_N.device)).sum(0)
        positions_K, ranks_K = positions_K[order_K], ranks_K[order_K]
    base_K, new_K = kept_N[positions_K], new_N[positions_K]
    kept_N.copy_(new_N)
    indices = [positions_K.to(torch.int32), ranks_K.to(torch.int32)]
    return _OnDevice(bounds, sizes_C, counts_C, [*indices, base_K, new_K])


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
