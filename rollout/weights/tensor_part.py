"""The part of each tensor that one rank of a tensor-parallel engine loads, so that a reader fetches no more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from paceline.models.architectures import split_dimension
from paceline.weights.manifest import TensorPlan
from paceline.weights.store_layout import Block


class Range(NamedTuple):
    """Elements [start, stop) of one dimension."""

    dim: int
    start: int
    stop: int


@dataclass(frozen=True)
class TensorPart:
    """Part `rank` of `size`. `dimensions` is of `paceline.models.architectures.split_dimensions`."""

    rank: int
    size: int
    dimensions: Mapping[str, int]

    def range_of(self, plan: TensorPlan) -> Range | None:
        """Return the wanted elements of a tensor; None for all of them."""
        dim = split_dimension(self.dimensions, plan.name, plan.shape, self.size)
        if dim is None:
            return None
        length = plan.shape[dim] // self.size
        return Range(dim, self.rank * length, (self.rank + 1) * length)

    def needs(self, plan: TensorPlan, block: Block, first: int, last: int) -> bool:
        """Return whether rows [first, last) of a block have wanted elements."""
        wanted = self.range_of(plan)
        if wanted is None:
            return True
        start, stop = block.offsets[wanted.dim], block.offsets[wanted.dim] + block.shape[wanted.dim]
        if wanted.dim == 0:
            start, stop = start + first, start + last
        return start < wanted.stop and wanted.start < stop
