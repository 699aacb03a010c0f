"""Where the sequences of a packed row begin and end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceLayout:
    """Where the sequences of one packed row [1, T] begin and end."""

    runs: tuple[tuple[int, int], ...]
    """(count, length) of each run of neighbouring sequences with equal length, in row order."""
    starts: Tensor
    """[S + 1] int32 on the row's device: start of each sequence, then T (`cu_seqlens` in flash attention)."""
    max_length: int
    """Tokens of the longest sequence."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> SequenceLayout:
        """The layout of sequences with these lengths (each > 0), end to end."""
        runs = tuple((len(list(same)), length) for length, same in itertools.groupby(lengths))
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        return cls(runs, starts.to(device, non_blocking=True), max(lengths))
