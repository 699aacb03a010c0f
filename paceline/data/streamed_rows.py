"""Rows of a data set that is read as a stream (`data.streaming`). Memory holds two blocks of rows, whatever the stream's size.

Promise: the row of a draw is a function of the seed, the size of a block and the number of the draw. The stream begins anew at
its end, without end; each block of consecutive rows is shuffled by itself. So every pass has each row once, and a draw far
ahead costs the reading of the stream up to its block.

Threads: `rows[draw]` never waits for the stream. Each block is read by a thread, one after the other (the lock of `_Tables`); a draw
of a block that is not there yet raises Unreadable, and the caller comes again. A thread ends with its block, or with the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline.data.added_nulls import without_added_nulls
from paceline.data.table_rows import in_short_form, short_types
from paceline.errors import DataError, Unreadable

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]
Tables = Callable[[], Iterator["pa.Table"]]
"""Begins a stream; returns its tables."""

THREAD_NAME = "stream"
RETRY_S = 5.0
"""Seconds after which a block that could not be read is tried again."""

log = logging.getLogger(__name__)


class StreamedRows:
    """Rows by the number of the draw."""

    def __init__(
        self,
        name: str,
        tables: Tables,
        check: Callable[[Row], object],
        seed: int,
        *,
        block_rows: int,
        shuffle: bool,
    ) -> None:
        """Read the first block of the stream. Raises DataError for a stream without rows, or whose first row cannot be used;
        errors of `tables`."""
        self._name, self._check, self._seed, self._shuffle = name, check, seed, shuffle
        self._block_rows, self._tables = block_rows, _Tables(tables)
        self.fingerprint = f"stream of {name}"
        first = self._read(0)
        self.columns = tuple(first[0])
        self._blocks = {0: _Block(first)}
        self._blocks[0].done.set()

    @property
    def read_rows(self) -> list[Row]:
        """The rows that can be used of the blocks in memory, in the order of the stream."""
        return [row for _, block in sorted(self._blocks.items()) for row in block.rows]

    def __len__(self) -> int:
        """Return 0: a stream's rows are not counted."""
        return 0

    def __getitem__(self, draw: int) -> Row:
        """Return the row of a draw. Raises Unreadable while its block is being read, and where it cannot be."""
        number, position = divmod(draw, self._block_rows)
        block = self._block(number)
        first = number * self._block_rows
        where = f"rows {first:,} to {first + self._block_rows - 1:,} of the stream {self._name!r}"
        if not block.done.is_set():
            raise Unreadable(f"{where} are being read")
        if block.fault is not None:
            raise Unreadable(f"{where} cannot be read: {type(block.fault).__name__}: {block.fault}")
        position %= len(block.rows)  # below the size of a block where rows were left out
        if not self._shuffle:
            return dict(block.rows[position])
        if block.order is None:
            block.order = np.random.default_rng((self._seed, number)).permutation(len(block.rows))
        return dict(block.rows[int(block.order[position])])

    def _block(self, number: int) -> _Block:
        """Return a block, and keep it and the one after it alone. A block that could not be read is tried again after a while."""
        again_s = time.monotonic() - RETRY_S
        self._blocks = {
            n: block
            for n, block in self._blocks.items()
            if n in (number, number + 1) and (block.fault is None or block.failed_s > again_s)
        }
        for wanted in (number, number + 1):
            if wanted not in self._blocks:
                self._blocks[wanted] = _Block()
                self._blocks[wanted].start(partial(self._read, wanted))
        return self._blocks[number]

    def _read(self, number: int) -> list[Row]:
        """Return the rows of a block that can be used; the others are left out with a warning. Raises DataError for none."""
        first = number * self._block_rows
        rows, usable, faults = self._tables.rows(first, self._block_rows), [], []
        for index, row in enumerate(rows, start=first):
            try:
                self._check(row)
                usable.append(row)
            except DataError as error:
                faults.append(f"row {index:,}: {error}")
                if index == 0:
                    raise DataError(f"the stream {self._name!r}, {faults[0]}") from None
        if faults:
            log.warning(
                "%d of %d rows of the stream %r cannot be used, and others of their block are drawn instead; the first is %s",
                len(faults),
                len(rows),
                self._name,
                faults[0],
            )
        if not usable:
            raise DataError(
                f"the stream {self._name!r}: no row of a block can be used; {faults[0]}; correct the data set, or set "
                "data.streaming to false, which checks all rows before the run"
            )
        return usable


class _Block:
    """Rows that a thread reads, or has read."""

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        self.rows = rows
        self.order: npt.NDArray[np.int64] | None = None
        self.fault: Exception | None = None
        self.failed_s = 0.0
        """Time of the fault, on the monotonic clock."""
        self.done = threading.Event()

    def start(self, read: Callable[[], Sequence[Row]]) -> None:
        """Read the rows in a thread."""
        threading.Thread(target=self._run, args=(read,), name=THREAD_NAME, daemon=True).start()

    def _run(self, read: Callable[[], Sequence[Row]]) -> None:
        try:
            self.rows = read()
        except Exception as error:  # `datasets` raises dozens of kinds; the draw reports it
            self.fault, self.failed_s = error, time.monotonic()
        finally:
            self.done.set()


class _Tables:
    """The endless stream, read by one thread at a time."""

    def __init__(self, tables: Tables) -> None:
        self._begin, self._lock = tables, threading.Lock()
        self._stream: Iterator[pa.Table] | None = None
        self._position = 0
        """Number of the first row of the next table."""
        self._rest: pa.Table | None = None
        """Rows before the next table that were read and not asked for."""

    def rows(self, first: int, number: int) -> list[Row]:
        """Return `number` rows from row `first` on. Raises DataError for a stream without rows."""
        with self._lock:
            try:
                return self._rows(first, number)
            except BaseException:
                self._stream = None  # the next call begins anew
                raise

    def _rows(self, first: int, number: int) -> list[Row]:
        held = 0 if self._rest is None else self._rest.num_rows
        if self._stream is None or first < self._position - held:
            self._stream, self._position, self._rest = self._endless(), 0, None
        found: list[Row] = []
        while len(found) < number:
            table = self._next()
            start = self._position - table.num_rows
            skipped = min(max(0, first - start), table.num_rows)
            taken = table.slice(skipped, number - len(found))
            short = short_types(taken.schema)
            rows = (without_added_nulls(row, is_table=True) for row in taken.to_pylist())
            found += [in_short_form(row, short) for row in rows]
            rest = table.slice(skipped + taken.num_rows)
            self._rest = rest if rest.num_rows else None
        return found

    def _next(self) -> pa.Table:
        """Return what was left of the last table, or the next one."""
        if self._rest is not None:
            table, self._rest = self._rest, None
            return table
        assert self._stream is not None
        table = next(self._stream)
        self._position += table.num_rows
        return table

    def _endless(self) -> Iterator[pa.Table]:
        while True:
            number = 0
            for table in self._begin():
                number += table.num_rows
                yield table
            if not number:
                raise DataError("the stream has no rows; at least one is needed")
