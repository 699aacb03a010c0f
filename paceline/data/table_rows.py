"""Reads tables with `datasets`: Parquet and Arrow files, folders that `datasets` has saved, and data sets on the hub.

A table is mapped into memory from the disk, so its size does not matter. For that `datasets` keeps an unencrypted copy
of a file's rows; with a storage key a file is read into memory instead.

A stream (`data.streaming`) keeps two blocks of rows in memory, whatever its size. Promise: the row of a draw depends
only on the seed, the size of a block and the number of the draw. The stream restarts at its end, and each block of
consecutive rows is shuffled separately. So every pass has each row once; a draw far ahead reads the stream up to its
block.

Threads: `rows[draw]` never waits for the stream. Threads read the blocks one by one (the lock of `_Tables`). A draw
from a missing block raises Unreadable, and the caller retries. A thread ends with its block or the process.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline.data.json_schemas import without_added_nulls
from paceline.data.row_checks import Check, holds_json
from paceline.encryption.encrypted_file import WrongKey, is_encrypted_file, open_data
from paceline.encryption.storage_key import storage_key
from paceline.errors import DataError, InvalidInput, Unreadable
from paceline.host.regular_file import check_named
from paceline.models.loading import hub_remedy

if TYPE_CHECKING:
    import pyarrow as pa


PACKAGES = ("pyarrow", "datasets")


def need_table_packages(what: str) -> None:
    """Raise InvalidInput with a remedy if the packages are not installed. `what` names the use."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise InvalidInput(
            f"{what} needs {' and '.join(missing)}, which this installation does not have; use the image "
            "paceline-coordinator-tables (for commands: paceline-cli-tables), install the packages, or use JSONL or CSV"
        )


SHORT: Mapping[str, Any] = dict.fromkeys(("float32", "float"), np.float32) | dict.fromkeys(
    ("float16", "halffloat"), np.float16
)
"""Names in `datasets` and pyarrow of number types whose values have more digits in Python than in the file."""
STREAMED_ROWS = 1000
"""Number of rows in one table of a stream."""

_CONFIGS = re.compile(
    r"(?:Config name is missing.*|BuilderConfig .* not found\. )[Aa]vailable(?: configs)?: \[(.*?)\]", re.DOTALL
)
"""Messages of `datasets` for a missing or unknown configuration, with the list of those that exist."""


def open_table(
    builder: str | None, name: str, split: str | None, field: str = "", config: str | None = None
) -> TableRows:
    """Return the rows of a table; `builder` is that of a file. Raises DataError, Unreadable."""
    return TableRows(_loaded(builder, name, split, field, config))


def open_stream(name: str, split: str, field: str, config: str | None) -> Iterator[Any]:
    """Yield the Arrow tables of a hub data set or a folder. Raises DataError, Unreadable, and errors of `datasets`."""
    stream = _loaded(None, name, split, field, config, streaming=True)
    tables: Iterator[Any] = stream.with_format("arrow").iter(STREAMED_ROWS)
    return tables


def _loaded(
    builder: str | None, name: str, split: str | None, field: str, config: str | None, *, streaming: bool = False
) -> Any:
    """Return a `datasets.Dataset`, or an `IterableDataset` for a stream. Raises DataError, Unreadable."""
    need_table_packages(f"{field or 'the data set'}: {name!r}")
    import datasets

    datasets.disable_progress_bars()
    try:
        _check_files(builder, name, config)
        if builder and (storage_key() is not None or is_encrypted_file(Path(name))):
            return datasets.Dataset(_table_in_memory(builder, Path(name)))
        if builder:
            return datasets.load_dataset(builder, data_files=name, split="train")
        if (Path(name) / "dataset_info.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
            if streaming:
                raise DataError(
                    f"data.streaming is true, but {field} {name!r} is a folder made by `save_to_disk`, which is mapped from the "
                    "disk anyway; remove data.streaming"
                )
            if config is not None:
                raise without_configs(field, config, name, "a folder made by `save_to_disk`")
            loaded = datasets.load_from_disk(name)
        else:
            loaded = datasets.load_dataset(name, config, streaming=streaming)
    except (DataError, WrongKey):
        raise
    except Exception as error:  # `datasets` raises dozens of types; each means that the set cannot be read
        if found := _CONFIGS.search(str(error)):
            named = f"{config!r} is none of them" if config else "none is set"
            raise DataError(
                f"{field} {name!r}: set {field}_config to one of its configurations [{found[1]}]; {named}"
            ) from None
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if builder:
            raise Unreadable(
                f"{field}: {name!r} cannot be read as a table: {reason}; write the file again, or write it as JSONL"
            ) from None
        remedy = "" if Path(name).is_file() else f"; {hub_remedy(name)}"
        raise Unreadable(f"cannot load the data set {name!r}: {reason}{remedy}") from None
    if isinstance(loaded, dict):
        loaded = loaded[split] if split in loaded else _part(loaded, str(split), f"the data set {name!r}", streaming)
    return loaded


def _part(splits: Any, split: str, where: str, streaming: bool) -> Any:
    """Return a part of a data set that is written as in `datasets`, such as `train[:90%]`. Raises DataError."""
    import datasets

    lengths = {} if streaming else {name: len(part) for name, part in splits.items()}
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
        rows = [splits[part.splitname].select(range(part.from_, part.to)) for part in parts]
        return datasets.concatenate_datasets(rows)
    except (ValueError, AssertionError, IndexError):
        form = "a stream has no parts of a split" if streaming else "a part that has rows is written as train[:90%]"
        more = f"; {form}" if "[" in split else ""
        raise DataError(f"{where} has the splits {sorted(splits)}, not {split!r}{more}") from None


def _check_files(builder: str | None, name: str, config: str | None) -> None:
    """Check the files of a table or a folder before `datasets` opens them by name, also files at other places that the
    card of a folder or of a hub data set names. Raises OSError for a withheld file, errors of `datasets`."""
    import datasets

    check_named(name)
    if builder or (Path(name) / "dataset_info.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
        return
    for files in (datasets.load_dataset_builder(name, config).config.data_files or {}).values():
        for file in files:
            check_named(file.partition("://")[2] if file.startswith(("file://", "local://")) else file)


def _table_in_memory(builder: str, path: Path) -> Any:
    """Return the whole table of a Parquet or Arrow file, decrypted if needed. Raises WrongKey, and errors of pyarrow."""
    import pyarrow
    from pyarrow import ipc, parquet

    with open_data(path) as file:
        if builder == "parquet":
            return parquet.read_table(file)
        try:
            return ipc.open_file(file).read_all()
        except pyarrow.ArrowInvalid:
            file.seek(0)
            return ipc.open_stream(file).read_all()


def without_configs(field: str, config: str, name: str, kind: str) -> DataError:
    return DataError(f"{field}_config is {config!r}, but {name!r} is {kind}, which has no configurations; remove it")


def short_types(schema: Any) -> dict[str, str]:
    """Return the types of the columns with numbers, or lists of numbers, of 32 or 16 bits."""
    found = {}
    for field in schema:
        kind = field.type
        while hasattr(kind, "value_field"):
            kind = kind.value_type
        found[field.name] = str(kind)
    return {name: kind for name, kind in found.items() if kind in SHORT}


def in_short_form(row: Mapping[str, Any], types: Mapping[str, str]) -> dict[str, Any]:
    """Return a row with numbers of 32 and 16 bits as written: 0.1, not 0.10000000149011612. `types` are by column."""
    return {**row, **{name: _written(row[name], SHORT[kind]) for name, kind in types.items()}}


def _written(value: Any, kind: Any) -> Any:
    """Return a number, or the numbers of a list, with the digits of `kind`."""
    if isinstance(value, list):
        return [_written(each, kind) for each in value]
    return value if value is None else float(str(kind(value)))


class TableRows:
    def __init__(self, dataset: Any):
        self.dataset = dataset
        self._adds_nulls = not holds_json(dataset)
        self.fingerprint = f"{len(dataset)} rows"
        self.columns = tuple(dataset.column_names)
        self._short = short_types(dataset.features.arrow_schema)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            row = in_short_form(self.dataset[index], self._short)
        except Exception as error:  # from `datasets`: its files are on a disk, and columns are decoded on reading
            raise Unreadable(f"row {index} of the data set cannot be read: {type(error).__name__}: {error}") from None
        return without_added_nulls(row, is_table=self._adds_nulls)


Row = dict[str, Any]
Tables = Callable[[], Iterator["pa.Table"]]
"""Starts a stream, and returns the tables of the stream."""

THREAD_NAME = "stream"
RETRY_S = 5.0
"""Seconds after which a block that could not be read is tried again."""

log = logging.getLogger(__name__)


class StreamedRows:
    """Rows of a stream. The index of a row is the number of its draw."""

    def __init__(
        self,
        name: str,
        tables: Tables,
        check: Check,
        seed: int,
        *,
        block_rows: int,
        shuffle: bool,
        retry_s: float = RETRY_S,
    ) -> None:
        """Read the first block. Raises DataError if the block has no rows or its first row is unusable, and errors of
        `tables`."""
        self._name, self._check, self._seed, self._shuffle = name, check, seed, shuffle
        self._block_rows, self._tables, self._retry_s = block_rows, _Tables(tables), retry_s
        self.fingerprint = f"stream of {name}"
        first = self._read(0)
        self.columns = tuple(first[0])
        self._blocks = {0: _Block(first)}
        self._blocks[0].done.set()

    @property
    def read_rows(self) -> list[Row]:
        """Return the usable rows of the blocks in memory, in the order of the stream."""
        return [row for _, block in sorted(self._blocks.items()) for row in block.rows]

    def __len__(self) -> int:
        """Return 0, because a stream's rows are not counted."""
        return 0

    def __getitem__(self, draw: int) -> Row:
        """Return the row of a draw. Raises Unreadable while its block is being read, and if the block cannot be read."""
        number, position = divmod(draw, self._block_rows)
        block = self._block(number)
        first = number * self._block_rows
        where = f"rows {first:,} to {first + self._block_rows - 1:,} of the stream {self._name!r}"
        if not block.done.is_set():
            raise Unreadable(f"{where} are being read")
        if block.fault is not None:
            raise Unreadable(f"{where} cannot be read: {type(block.fault).__name__}: {block.fault}")
        position %= len(block.rows)  # smaller than a block if rows were left out
        if not self._shuffle:
            return dict(block.rows[position])
        if block.order is None:
            block.order = np.random.default_rng((self._seed, number)).permutation(len(block.rows))
        return dict(block.rows[int(block.order[position])])

    def _block(self, number: int) -> _Block:
        """Return a block; keep only this and the next block. An unreadable block is read again after `retry_s`."""
        again_s = time.monotonic() - self._retry_s
        self._blocks = {
            n: block
            for n, block in self._blocks.items()
            if n in (number, number + 1) and (block.fault is None or block.failed_s > again_s)
        }
        for needed in (number, number + 1):
            if needed not in self._blocks:
                self._blocks[needed] = _Block()
                self._blocks[needed].start(partial(self._read, needed))
        return self._blocks[number]

    def _read(self, number: int) -> list[Row]:
        """Return the usable rows of a block; leave out unusable rows with a warning. Raises DataError if no row is
        usable."""
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
                "%d of %d rows of the stream %r cannot be used, so other rows of their block are drawn; the first "
                "fault: %s",
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
    def __init__(self, rows: Sequence[Row] = ()) -> None:
        self.rows = rows
        self.order: npt.NDArray[np.int64] | None = None
        self.fault: Exception | None = None
        self.failed_s = 0.0
        """Time of the failure, in seconds of the monotonic clock."""
        self.done = threading.Event()

    def start(self, read: Callable[[], Sequence[Row]]) -> None:
        threading.Thread(target=self._run, args=(read,), name=THREAD_NAME, daemon=True).start()

    def _run(self, read: Callable[[], Sequence[Row]]) -> None:
        try:
            self.rows = read()
        except Exception as error:  # `datasets` raises dozens of types; the draw reports it
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
        """Rows before the next table that were read and not requested yet."""

    def rows(self, first: int, number: int) -> list[Row]:
        """Return `number` rows from row `first` on. Raises DataError for a stream without rows."""
        with self._lock:
            try:
                return self._rows(first, number)
            except BaseException:
                self._stream = None  # so that the next call starts the stream again
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
