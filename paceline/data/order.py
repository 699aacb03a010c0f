"""The order in which the rows of a data set are drawn: a permutation in every epoch, or a mixture of several by weight.

Promise: the row of a draw is a function of the seed and the number of the draw alone, so an order goes on at any draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline.spec.sections.data import MIXTURE_BLOCK


class Order(Protocol):
    """An order without end."""

    def index(self, cursor: int) -> int:
        """Return the row that the `cursor`-th draw takes."""

    def part(self, cursor: int) -> int:
        """Return the part of the data that the `cursor`-th draw takes a row of."""

    def rows(self, num_draws: int) -> list[int]:
        """Return the rows that the first draws take, ascending, each once."""


class Epochs:
    """Every row once in each epoch, in a permutation of its own unless `shuffle` is false."""

    def __init__(self, sizes: Sequence[int], seed: int, *, shuffle: bool) -> None:
        """`sizes` are the rows of each part, one after the other."""
        self._ends = list(accumulate(sizes))
        self._permutations = _Permutations(self._ends[-1], (seed,), shuffle=shuffle)

    def index(self, cursor: int) -> int:
        return self._permutations.index(cursor)

    def part(self, cursor: int) -> int:
        return int(np.searchsorted(self._ends, self.index(cursor), side="right"))

    def rows(self, num_draws: int) -> list[int]:
        return sorted({self.index(cursor) for cursor in range(min(num_draws, self._ends[-1]))})


class Mixture:
    """Parts by weight. Each block of `MIXTURE_BLOCK` draws has a fixed number of each part, its share of the weights, spread
    over the block; the rows of a part come in epochs of its own.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, *, shuffle: bool) -> None:
        self._seed, self._shares = seed, _shares(weights)
        self._starts = [0, *accumulate(sizes)][:-1]
        self._parts = [
            _Permutations(size, (seed,), (1 + number,), shuffle=shuffle) for number, size in enumerate(sizes)
        ]
        self._block = -1
        self._order, self._before = np.empty(0, np.int64), np.empty(0, np.int64)

    def index(self, cursor: int) -> int:
        block, position = divmod(cursor, MIXTURE_BLOCK)
        part = self.part(cursor)
        draw = block * self._shares[part] + int(self._before[position])
        return self._starts[part] + self._parts[part].index(draw)

    def part(self, cursor: int) -> int:
        block, position = divmod(cursor, MIXTURE_BLOCK)
        if block != self._block:
            self._mix(block)
        return int(self._order[position])

    def rows(self, num_draws: int) -> list[int]:
        return sorted({self.index(cursor) for cursor in range(num_draws)})

    def _mix(self, block: int) -> None:
        """Set the parts of a block's draws, and of each draw the number of earlier ones of its part.

        Part p with n draws has one at a random place in each n-th of the block (stratified sampling), so that short runs of
        draws have nearly the weights too.
        """
        rng = np.random.default_rng((self._seed, block, 0, 1))
        places = [(np.arange(number) + rng.random(number)) / number for number in self._shares]
        parts = np.repeat(np.arange(len(places)), self._shares)
        before = np.concatenate([np.arange(number) for number in self._shares])
        by_place = np.argsort(np.concatenate(places), kind="stable")
        self._order, self._before, self._block = parts[by_place], before[by_place], block


class Draws:
    """Of rows that are numbered by their draws, as those of a stream."""

    def index(self, cursor: int) -> int:
        return cursor

    def part(self, cursor: int) -> int:
        return 0

    def rows(self, num_draws: int) -> list[int]:
        return list(range(num_draws))


class _Permutations:
    """A permutation of `size` numbers for each epoch, drawn from the seed (`before`, epoch, `after`)."""

    def __init__(
        self, size: int, before: tuple[int, ...], after: tuple[int, ...] = (), *, shuffle: bool
    ) -> None:
        self._size, self._before, self._after, self._shuffle = size, before, after, shuffle
        self._epoch = -1
        self._order: npt.NDArray[np.int64] | None = None

    def index(self, draw: int) -> int:
        epoch, position = divmod(draw, self._size)
        if not self._shuffle:
            return position
        if self._order is None or epoch != self._epoch:
            self._order = np.random.default_rng((*self._before, epoch, *self._after)).permutation(self._size)
            self._epoch = epoch
        return int(self._order[position])


def _shares(weights: Sequence[float]) -> list[int]:
    """Return the draws of each part in a block, by the largest remainders."""
    exact = [MIXTURE_BLOCK * weight / sum(weights) for weight in weights]
    shares = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda part: (shares[part] - exact[part], part))
    for part in by_remainder[: MIXTURE_BLOCK - sum(shares)]:
        shares[part] += 1
    return shares
