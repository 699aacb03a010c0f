"""Draws prompts in a seeded, endless order: a permutation in every epoch, or a weighted mixture of several data sets.
Promise: the row of a draw depends only on the seed and the number of the draw, as a restart requires."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.formats import describe
from paceline.data.messages import TOOLS_KEY
from paceline.data.row_checks import Check, check_prepared, row_check
from paceline.data.row_prompts import columns_of, prompt_of, with_keys_of_row
from paceline.data.rows import Rows, names_files, open_source, sizes_of
from paceline.data.table_rows import StreamedRows, open_stream
from paceline.data.tokens import with_system_prompt
from paceline.errors import DataError, Unreadable
from paceline.spec import DataSection
from paceline.spec.sections.data import MIXTURE_BLOCK


def _as_json(value: Any) -> Any:
    """Return a value as every JSON parser accepts it: NaN, which pandas writes for missing numbers, becomes None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    if isinstance(value, dict):
        return {name: _as_json(each) for name, each in value.items()}
    return [_as_json(each) for each in value] if isinstance(value, list) else value


class PromptSource:
    """Prompts in a seeded, endless order: `draw(cursor)` returns a prompt and the other columns."""

    def __init__(
        self,
        rows: Rows,
        data: DataSection,
        seed: int,
        *,
        shuffle: bool,
        validation: bool = False,
        has_tools: bool = False,
    ) -> None:
        self.has_tools = has_tools and TOOLS_KEY in rows.columns
        """True if the chat template gets the tools of a row."""
        self._rows = rows
        self._data = with_keys_of_row(dict.fromkeys(rows.columns), data)
        self._names = data.source_names(validation=validation) if data.source_key else ()
        weights = None if validation else data.train_weights
        self._order = _order(rows, weights, seed, shuffle=shuffle)

    def __len__(self) -> int:
        """Return the number of rows; 0 for a stream, whose rows are not counted."""
        return len(self._rows)

    @property
    def fingerprint(self) -> str:
        return self._rows.fingerprint

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the columns besides the prompt, for reward functions."""
        own = columns_of(self._rows.columns, self._data)
        return own if self._added is None else (*own, self._added)

    @property
    def format(self) -> str:
        return describe(self._rows[0], self._data, None)

    def index(self, cursor: int) -> int:
        """Return the index of the row of draw number `cursor`."""
        return self._order.index(cursor)

    def rows(self, num_draws: int) -> list[int]:
        """Return the indices of the rows that the first draws use, ascending, each once."""
        return self._order.rows(num_draws)

    def draw(self, cursor: int) -> tuple[Any, dict[str, Any]]:
        """Return the prompt (text or messages) and the columns of draw number `cursor`, with None for NaN and text for
        infinity, which JSON does not have. Raises Unreadable if the row cannot be read now."""
        row = self._rows[self.index(cursor)]
        try:
            prompt, columns = prompt_of(row, self._data)
        except DataError as error:  # every row was checked when the data set was opened
            raise Unreadable(
                f"row {self.index(cursor)} of the data set has changed: {error}; restore the data set"
            ) from None
        if self._added is not None:
            columns[self._added] = self._names[self._order.part(cursor)]
        return with_system_prompt(prompt, self._data), _as_json(columns)

    @property
    def _added(self) -> str | None:
        """Return the name of the column to add for a row's source; None if the rows have that column."""
        key = self._data.source_key
        return key if self._names and key not in self._rows.columns else None


def open_prompts(data: DataSection, seed: int, *, validation: bool = False, has_tools: bool = True) -> PromptSource:
    """Return the training (or validation) prompts. With `has_tools` the chat template gets the tools of a row. Raises
    DataError if there are no rows, a row is malformed or the prompt column is missing; Unreadable for missing data."""
    rows: Rows
    if data.streaming and not validation:
        check_prepared(data)
        rows = open_streamed(data, seed, row_check(data, has_tools=has_tools))
    else:
        rows = prompt_rows(data, validation=validation, has_tools=has_tools)
    shuffle = data.shuffle and not validation
    return PromptSource(rows, data, seed, shuffle=shuffle, validation=validation, has_tools=has_tools)


def prompt_rows(data: DataSection, *, validation: bool = False, has_tools: bool = True) -> Rows:
    """Return the training (or validation) rows, each with a usable prompt. Raises as `open_prompts` does."""
    check_prepared(data)
    return open_source(data.source(validation=validation), row_check(data, has_tools=has_tools))


def open_streamed(data: DataSection, seed: int, check: Check) -> StreamedRows:
    """Return the training data as a stream whose first block is read and checked. Raises DataError, Unreadable."""
    source = data.source()
    name = source.name
    if not isinstance(name, str) or names_files(name):
        raise DataError(
            f"data.streaming is true, but data.train is {name!r:.80}: files are read row by row anyway; remove data.streaming, or "
            "name one data set on the hub or a folder of files"
        )
    return StreamedRows(
        name,
        lambda: open_stream(name, source.split, source.field, source.config),
        check,
        seed,
        block_rows=data.streaming_block_rows,
        shuffle=data.shuffle,
    )


def _order(rows: Rows, weights: Sequence[float] | None, seed: int, *, shuffle: bool) -> Epochs | Mixture | Draws:
    if isinstance(rows, StreamedRows):
        return Draws()
    sizes = sizes_of(rows)
    if weights is None or len(weights) == 1:
        return Epochs(sizes, seed, shuffle=shuffle)
    return Mixture(sizes, weights, seed, shuffle=shuffle)


class Epochs:
    """An order with every row once in each epoch, in a separate permutation for each epoch if `shuffle`. `index` is the
    row of a draw, `part` the draw's part of the data, `rows` the rows of the first draws, ascending."""

    def __init__(self, sizes: Sequence[int], seed: int, *, shuffle: bool) -> None:
        """`sizes` are the numbers of rows of the parts, in order."""
        self._ends = list(accumulate(sizes))
        self._permutations = _Permutations(self._ends[-1], (seed,), shuffle=shuffle)

    def index(self, cursor: int) -> int:
        return self._permutations.index(cursor)

    def part(self, cursor: int) -> int:
        return int(np.searchsorted(self._ends, self.index(cursor), side="right"))

    def rows(self, num_draws: int) -> list[int]:
        return sorted({self.index(cursor) for cursor in range(min(num_draws, self._ends[-1]))})


class Mixture:
    """Parts by weight. Each block of `MIXTURE_BLOCK` draws takes from each part a fixed number of rows, in proportion
    to the part's weight, and spreads these rows over the block. The rows of each part come in separate epochs."""

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
        """Compute the part of each draw in a block, and the number of earlier draws of the same part. A part with n
        draws gets one draw at a random position in each n-th of the block (stratified sampling), to keep weights in
        short runs."""
        rng = np.random.default_rng((self._seed, block, 0, 1))
        places = [(np.arange(number) + rng.random(number)) / number for number in self._shares]
        parts = np.repeat(np.arange(len(places)), self._shares)
        before = np.concatenate([np.arange(number) for number in self._shares])
        by_place = np.argsort(np.concatenate(places), kind="stable")
        self._order, self._before, self._block = parts[by_place], before[by_place], block


class Draws:
    """An order for rows that are numbered by their draws, as in a stream."""

    def index(self, cursor: int) -> int:
        return cursor

    def part(self, cursor: int) -> int:
        return 0

    def rows(self, num_draws: int) -> list[int]:
        return list(range(num_draws))


class _Permutations:
    """A permutation of `size` numbers for each epoch, drawn from the seed (`before`, epoch, `after`)."""

    def __init__(self, size: int, before: tuple[int, ...], after: tuple[int, ...] = (), *, shuffle: bool) -> None:
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
    """Return the number of each part's draws in a block, by the method of the largest remainders."""
    exact = [MIXTURE_BLOCK * weight / sum(weights) for weight in weights]
    shares = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda part: (shares[part] - exact[part], part))
    for part in by_remainder[: MIXTURE_BLOCK - sum(shares)]:
        shares[part] += 1
    return shares
