"""Streams a model's whole tensors to rank 0, a piece at a time, so that memory does not grow with the model.

Each rank merges its rows of an adapter into its rows of the base and converts them, so only the requested type is sent.
Promise: every rank goes through the same collectives in the same order, whatever rank 0 does with the pieces; tied
weights come once. Names are those of the architecture, without wrappers and adapters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.learner.model.adapter import BASE, adapted_parts, has_adapter, is_part_of_adapter
from paceline.learner.model.mesh import in_first_replica, shard_group
from paceline.learner.weights.gather import is_first_rank, is_split_by_rows, unwrapped

PIECE_BYTES = 64 << 20
"""Largest number of bytes of a tensor that rank 0 receives at a time, from all ranks together."""


class TensorRun(NamedTuple):
    """Some elements of a tensor, flattened, in host memory."""

    name: str
    first_element: int
    values: Tensor


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer of the model, and the adapter to it, if it has one."""

    tensor: Tensor
    a_RI: Tensor | None = None
    b_OR: Tensor | None = None
    scaling: float = 1.0

    def dtype(self, requested: torch.dtype | None) -> torch.dtype:
        """Return the type of the exported weight: `requested` for a floating-point weight, if given, else its own."""
        return requested if requested is not None and self.tensor.is_floating_point() else self.tensor.dtype

    def rows(self, begin: int, end: int, whole_a_RI: Tensor | None, requested: torch.dtype | None) -> Tensor:
        """Return rows of this rank, merged (in float32, rounded once) and converted."""
        rows = _local(self.tensor)[begin:end]
        if whole_a_RI is not None and self.b_OR is not None:
            product = _local(self.b_OR)[begin:end].float() @ whole_a_RI.float()
            rows = rows.float() + product * self.scaling
        return rows.to(self.dtype(requested))


def export_weights(model: nn.Module) -> dict[str, Weight]:
    """Return the architecture's tensors by name, tied ones only under their first name. The tensors are live."""
    parts = adapted_parts(model) if has_adapter(model) else {}
    weights: dict[str, Weight] = {}
    seen: set[int] = set()
    for full_name, tensor in model.state_dict(keep_vars=True).items():
        name = unwrapped(full_name)
        if id(tensor) in seen or is_part_of_adapter(name):
            continue
        seen.add(id(tensor))
        layer_name = name.removesuffix(f"{BASE}weight")
        if layer_name != name and layer_name in parts:
            weights[name.replace(BASE, ".")] = Weight(tensor.detach(), *parts[layer_name])
        else:
            weights[name.replace(BASE, ".")] = Weight(tensor.detach())
    return weights


@torch.no_grad()
def pieces(
    weights: dict[str, Weight], dtype: torch.dtype | None, piece_bytes: int = PIECE_BYTES
) -> Iterator[TensorRun]:
    """Yield every element of `weights` once, on rank 0; floating-point elements as `dtype` (None: as they are). A
    collective call: all ranks must iterate to the end."""
    for name, weight in weights.items():
        whole_a_RI = None if weight.a_RI is None else _whole(weight.a_RI)
        if isinstance(weight.tensor, DTensor) and is_split_by_rows(weight.tensor):
            yield from _gathered(name, weight, weight.tensor, whole_a_RI, dtype, piece_bytes)
        elif isinstance(weight.tensor, DTensor):
            b_OR = None if weight.b_OR is None else _whole(weight.b_OR)
            whole = Weight(_whole(weight.tensor), weight.a_RI, b_OR, weight.scaling)
            yield from _plain(name, whole, whole_a_RI, dtype, piece_bytes)
        else:
            yield from _plain(name, weight, whole_a_RI, dtype, piece_bytes)


def _gathered(
    name: str, weight: Weight, tensor: DTensor, whole_a_RI: Tensor | None, dtype: torch.dtype | None, piece_bytes: int
) -> Iterator[TensorRun]:
    """Yield the pieces of a tensor; rank r of K has rows [r·c, (r + 1)·c), c = ceil(rows / K). Only replica 0 sends."""
    if not in_first_replica(tensor):
        return
    ranks, group = shard_group(tensor)
    rows, row_numel = -(-tensor.shape[0] // ranks), math.prod(tensor.shape[1:])
    wire = weight.dtype(dtype)
    step = max(1, piece_bytes // (ranks * row_numel * wire.itemsize))
    for begin in range(0, rows, step):
        count = min(step, rows - begin)
        here = weight.rows(begin, begin + count, whole_a_RI, dtype).reshape(-1)
        padded = here.new_zeros(count * row_numel)  # a gather needs equal sizes
        padded[: len(here)] = here
        received = [torch.empty_like(padded) for _ in range(ranks)] if is_first_rank() else None
        dist.gather(padded, received, dst=0, group=group)
        for rank, part in enumerate(received or []):
            first = rank * rows + begin
            filled = min(count, min((rank + 1) * rows, tensor.shape[0]) - first)
            if filled > 0:
                yield TensorRun(name, first * row_numel, part[: filled * row_numel].cpu())


def _plain(
    name: str, weight: Weight, whole_a_RI: Tensor | None, dtype: torch.dtype | None, piece_bytes: int
) -> Iterator[TensorRun]:
    """Yield the pieces of a tensor that rank 0 has whole."""
    if not is_first_rank() or weight.tensor.numel() == 0:
        return
    if weight.tensor.ndim == 0:
        yield TensorRun(name, 0, weight.tensor.to(weight.dtype(dtype)).reshape(1).cpu())
        return
    row_numel = math.prod(weight.tensor.shape[1:])
    step = max(1, piece_bytes // (row_numel * weight.dtype(dtype).itemsize))
    for begin in range(0, weight.tensor.shape[0], step):
        values = weight.rows(begin, begin + step, whole_a_RI, dtype)
        yield TensorRun(name, begin * row_numel, values.reshape(-1).cpu())


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
