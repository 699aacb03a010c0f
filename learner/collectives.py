"""Small collectives of a training step over the default process group; without a group, over the one rank's values.

Promise: only tensors travel (object collectives use pickle), and every rank returns the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import PacelineError


def world_size() -> int:
    """Return the number of ranks in the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum `values` over all ranks elementwise, in place, and return them."""
    if world_size() > 1:
        dist.all_reduce(values, dist.ReduceOp.SUM)
    return values


def max_over_ranks(values: Tensor) -> Tensor:
    """Set `values` to their elementwise maximum over all ranks, and return them."""
    if world_size() > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return values


def any_over_ranks(facts: Sequence[bool], device: torch.device) -> list[bool]:
    """Return, for each fact, whether it is true on any rank."""
    facts_F = torch.tensor([int(fact) for fact in facts], device=device)
    return [bool(fact) for fact in max_over_ranks(facts_F).tolist()]


class FailedElsewhere(PacelineError):
    """Another rank could not do its part of work that all ranks need."""


def succeed_on_all_ranks(work: Callable[[], None], device: torch.device) -> None:
    """Run `work`, which contains no collective; return when every rank has done so. Raises the error of `work` on ranks
    where it failed, and FailedElsewhere on the others, so that no rank waits in a collective alone."""
    error: Exception | None = None
    try:
        work()
    except Exception as raised:
        error = raised
    failed = any_over_ranks([error is not None], device)[0]
    if error is not None:
        raise error
    if failed:
        raise FailedElsewhere("another rank failed in its part of the work; that rank reports why")


def union_over_ranks(numbers: Sequence[int], device: torch.device) -> list[int]:
    """Return all distinct numbers that any rank has, ascending."""
    local = torch.tensor(sorted(set(numbers)), dtype=torch.int64, device=device)
    return sorted({int(n) for part in _parts_of_all_ranks(local) for n in part.tolist()})


def rows_of_all_ranks(local_RK: Tensor) -> tuple[Tensor, int]:
    """Return all ranks' rows, by rank, and the index of this rank's first row. Ranks may have any number of rows."""
    parts = _parts_of_all_ranks(local_RK)
    return torch.cat(parts), 0 if len(parts) == 1 else sum(map(len, parts[: dist.get_rank()]))


def broadcast_bytes(data: bytes) -> bytes:
    """Return rank 0's `data` on every rank; the argument of the other ranks is ignored."""
    if world_size() == 1:
        return data
    length = torch.tensor([len(data)])
    dist.broadcast(length, 0)
    buffer = torch.zeros(int(length.item()), dtype=torch.uint8)
    if dist.get_rank() == 0 and data:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if len(buffer):
        dist.broadcast(buffer, 0)
    return buffer.numpy().tobytes()


def gather_bytes(data: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return every rank's `data`, by rank, on each rank. `group` (None: the default) must take CPU tensors."""
    local = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
    return [part.numpy().tobytes() for part in _parts_of_all_ranks(local, group)]


def _parts_of_all_ranks(local: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    if world_size() == 1:
        return [local]
    counts = [torch.zeros(1, dtype=torch.int64, device=local.device) for _ in range(world_size())]
    dist.all_gather(counts, torch.tensor([len(local)], device=local.device), group)
    lengths = [int(count.item()) for count in counts]
    padded = local.new_zeros(max(lengths), *local.shape[1:])
    padded[: len(local)] = local
    gathered = [torch.empty_like(padded) for _ in lengths]
    if max(lengths):
        dist.all_gather(gathered, padded, group)
    return [part[:length] for part, length in zip(gathered, lengths, strict=True)]
