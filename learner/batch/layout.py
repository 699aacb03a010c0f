"""Boundaries of the sequences in a packed batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class SequenceLayout:
    """Boundaries of the sequences in one packed row [1, T]. Nobody changes one; it is not `frozen`, because torch 2.11's
    torch.compile takes a frozen dataclass as a constant, and would compile again for each number of runs."""

    runs: tuple[tuple[int, int], ...]
    """(count, length) of each run of neighbouring sequences with equal length, in row order."""
    starts: Tensor
    """[S + 1] int32 on the row's device: start of each sequence, then T (`cu_seqlens` in flash attention)."""
    max_length: int
    """Tokens of the longest sequence."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> SequenceLayout:
        """Return the layout of sequences with these lengths (each > 0), end to end."""
        runs = tuple((len(list(same)), length) for length, same in itertools.groupby(lengths))
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        return cls(runs, starts.to(device, non_blocking=True), max(lengths))
