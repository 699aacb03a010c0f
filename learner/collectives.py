"""The few small collectives of a training step, over the default process group; without one, a rank alone.

Promise: only tensors travel (object collectives pickle), and every rank returns the same values.
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
    """Return the elementwise sum, in place."""
    if world_size() > 1:
        dist.all_reduce(values, dist.ReduceOp.SUM)
    return values


def max_over_ranks(values: Tensor) -> Tensor:
    """Return the elementwise maximum, in place."""
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
    """Do this rank's `work`, which has no collective in it, and return when every rank has done its part.

    Raises what `work` raised, and FailedElsewhere on the ranks whose work succeeded, so that no rank waits in a
    collective that another rank never enters.
    """
    error: Exception | None = None
    try:
        work()
    except Exception as raised:
        error = raised
    failed = any_over_ranks([error is not None], device)[0]
    if error is not None:
        raise error
    if failed:
        raise FailedElsewhere("another rank cannot do its part; its report says why")


def union_over_ranks(numbers: Sequence[int], device: torch.device) -> list[int]:
    """Return all distinct numbers that any rank has, ascending."""
    distinct = sorted(set(numbers))
    if world_size() == 1:
        return distinct
    longest = int(max_over_ranks(torch.tensor([len(distinct)], device=device)).item())
    # Ranks have unequal counts, a gather needs equal ones: the flag marks the filled positions.
    padded = torch.zeros(2, max(longest, 1), dtype=torch.int64, device=device)
    padded[0, : len(distinct)] = torch.tensor(distinct, dtype=torch.int64)
    padded[1, : len(distinct)] = 1
    gathered = [torch.empty_like(padded) for _ in range(world_size())]
    dist.all_gather(gathered, padded)
    return sorted({int(n) for part in gathered for n in part[0][part[1] == 1].tolist()})


def rows_of_all_ranks(own_RK: Tensor) -> tuple[Tensor, int]:
    """Return (the rows of all ranks in order of rank, where this rank's begin); any number of rows of K numbers each."""
    if world_size() == 1:
        return own_RK, 0
    counts = [torch.zeros(1, dtype=torch.int64, device=own_RK.device) for _ in range(world_size())]
    dist.all_gather(counts, torch.tensor([len(own_RK)], device=own_RK.device))
    lengths = [int(count.item()) for count in counts]
    padded = own_RK.new_zeros(max(lengths), own_RK.shape[1])
    padded[: len(own_RK)] = own_RK
    gathered = [torch.empty_like(padded) for _ in lengths]
    if max(lengths):
        dist.all_gather(gathered, padded)
    rows = torch.cat([part[:length] for part, length in zip(gathered, lengths, strict=True)])
    return rows, sum(lengths[: dist.get_rank()])


def broadcast_bytes(data: bytes) -> bytes:
    """Return rank 0's `data` on every rank; the other ranks' argument is ignored."""
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
    """Return every rank's `data` on every rank, in order of rank; over `group`, whose tensors may be on CPUs (None: the default)."""
    if world_size() == 1:
        return [data]
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
    dist.all_gather(counts, torch.tensor([len(data)]), group)
    lengths = [int(count.item()) for count in counts]
    padded = torch.zeros(max(lengths) or 1, dtype=torch.uint8)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded, group)
    return [part[:length].numpy().tobytes() for part, length in zip(gathered, lengths, strict=True)]
