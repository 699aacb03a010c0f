"""Reads data sets as rows: files of every supported kind, and everything that `datasets` loads.

A file is indexed and not kept in memory: row i is read on request. Promise: opening reports a malformed row with its
line or row number, before anything trains on it.

The first line of a CSV file names the columns. A column has numbers (or truth values) if all its filled cells have;
empty cells are null. Every other column is text (`007`, `1,5` and dates stay unchanged). A column with a number in
another spelling (`0.50`, `1e5`) is text as well, because such values are compared with texts; its empty cells are null
too.

Files of a store are copied to a bounded cache on this machine, once for each version of a file, because rows are read
one by one: `PACELINE_DATA_CACHE` (default `~/.cache/paceline/data`), bounded by `PACELINE_DATA_CACHE_MB`. With a
storage key the copies are encrypted.
"""

from __future__ import annotations

import csv
import glob
import itertools
import posixpath
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from io import TextIOWrapper
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from fsspec import AbstractFileSystem

from paceline.data.json_rows import SpooledRows, open_json
from paceline.data.row_checks import Check, RowCheck, check_row, doubtful_rows
from paceline.data.table_rows import TableRows, open_table, without_configs
from paceline.data.written import number_of
from paceline.encryption.encrypted_file import open_data
from paceline.encryption.storage_key import storage_key
from paceline.errors import DataError, PacelineError, Unreadable
from paceline.files.bounded_cache import CacheKind, open_copies
from paceline.files.storage import is_local, is_url, open_url
from paceline.spec.sections.data import DataSource


class Rows(Protocol):
    """A sequence of rows; `rows[index]` raises Unreadable if the row cannot be read now."""

    fingerprint: str
    """Identity of the contents, which reveals a replaced file if that can be detected."""
    columns: tuple[str, ...]
    """Columns that every row has."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


def open_rows(name: str | tuple[str, ...], split: str, field: str = "data.train", check: Check | None = None) -> Rows:
    """Return the rows of the data set `name`, as `open_source` does."""
    return open_source(DataSource(field, name, split), check)


def open_source(source: DataSource, check: Check | None = None) -> Rows:
    """Return the rows of a data set, or of several in order. `check` raises DataError for an unusable row. For a table
    (Parquet, Arrow, a folder, the hub) the rows that the scan of a `RowCheck` passes are not checked one by one.
    Raises DataError with the field, or with the line or row; Unreadable if something cannot be read now."""
    names = (source.name,) if isinstance(source.name, str) else source.name
    entries = [_entry(source._replace(name=name), name, check) for name in names]
    return entries[0] if len(entries) == 1 else JoinedRows(entries, names)


def _entry(source: DataSource, name: str, check: Check | None) -> Rows:
    """Return the rows of the file, files (a glob) or data set `name`."""
    field, config = source.field, source.config
    parts: list[Rows] = []
    paths: list[str] = []
    is_table = Path(name).is_dir() or not names_files(name)
    for path in [name] if is_table else map(str, files_of(name, field)):
        if config is not None and not is_table:
            raise without_configs(field, config, path, "a file")
        rows = open_table(None, name, source.split, field, config) if is_table else _file(path, field, check)
        if len(rows) == 0:
            raise DataError(f"{field}: {path!r} has no rows; at least one is needed")
        if check and isinstance(rows, TableRows):
            _check_table(rows, check, f"{field}: {path!r}")
        parts.append(rows)
        paths.append(path)
    return parts[0] if len(parts) == 1 else JoinedRows(parts, paths)


def _file(name: str, field: str, check: Check | None) -> Rows:
    path = Path(name)
    try:
        match path.suffix:
            case ".jsonl" | ".json":
                return open_json(path, check)
            case ".csv" | ".tsv":
                return open_csv(path, check)
            case ".parquet":
                return open_table("parquet", name, None, field)
            case ".arrow" | ".feather":
                return open_table("arrow", name, None, field)
    except OSError as error:
        raise Unreadable(f"{field}: {name!r} cannot be read: {error.strerror}") from None
    raise DataError(f"{field}: {name!r} has none of the suffixes of files that can be read: {', '.join(FILE_KINDS)}")


def _check_table(rows: TableRows, check: Check, where: str) -> None:
    """Check every row of a table. Raises DataError with the row's index."""
    every = ((index, rows[index]) for index in range(len(rows)))
    pairs = doubtful_rows(rows.dataset, check) if isinstance(check, RowCheck) else every
    # The first row is checked with all its columns, because the message about a missing column names them.
    for index, row in itertools.chain([(0, rows[0])], pairs):
        check_row(check, row, f"{where}, row {index}")


MAX_CELL = 64 << 20
TRUTH = re.compile(r"true|false", re.IGNORECASE)
Conversion = Callable[[str], Any]
"""Takes the text of a cell and returns the cell's value; None if this conversion does not apply."""


def open_csv(path: Path, check: Check | None = None) -> SpooledRows:
    """Return the rows of a CSV file. Raises DataError with the line of a fault, OSError if the file cannot be read."""
    converters = _converters(path)
    rows = SpooledRows(path, tuple(name for name, _ in converters))
    for number, cells in _lines(path):
        row = {name: convert(cell) for (name, convert), cell in zip(converters, cells, strict=True)}
        check_row(check, row, f"{path}, line {number}")
        rows.add(row)
    return rows.finished()


def _lines(path: Path, *, header: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Yield number and cells of each row, those of the header first if requested. Raises DataError."""
    delimiter = "\t" if path.suffix == ".tsv" else ","
    csv.field_size_limit(MAX_CELL)
    with TextIOWrapper(open_data(path), encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        names: list[str] | None = None
        try:
            for cells in reader:
                if not cells:
                    continue
                if names is None:
                    names = _checked_names(path, cells)
                    if header:
                        yield reader.line_num, cells
                    continue
                if len(cells) != len(names):
                    raise DataError(
                        f"{path}, line {reader.line_num}: {len(cells)} cells, but the first line names {len(names)} "
                        "columns; put cells that hold the delimiter or a line break between double quotes"
                    )
                yield reader.line_num, cells
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: not valid CSV ({error}); correct the line") from None
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}, after line {reader.line_num}: not UTF-8 ({error.reason}); save the file as UTF-8"
            ) from None


def _checked_names(path: Path, names: list[str]) -> list[str]:
    for name in names:
        if not name.strip():
            raise DataError(f"{path}, line 1: a column has no name; name every column")
        if names.count(name) > 1:
            raise DataError(f"{path}, line 1: the column {name!r} occurs {names.count(name)} times; name it once")
    return names


def _converters(path: Path) -> list[tuple[str, Conversion]]:
    lines = _lines(path, header=True)
    names = next(lines, (0, []))[1]
    conversions: list[list[Conversion]] = [[_number, _number_text, _truth] for _ in names]
    filled = [False] * len(names)
    for _, cells in lines:
        for place, cell in enumerate(cells):
            if cell:
                filled[place] = True
                conversions[place] = [each for each in conversions[place] if each(cell) is not None]
    return [
        (name, conversions[place][0] if filled[place] and conversions[place] else str)
        for place, name in enumerate(names)
    ]


def _number(cell: str) -> int | float | None:
    """Return the number in a cell; None without a number, or if the number would be spelled differently."""
    number = number_of(cell)
    return number if str(number) == cell else None


def _number_text(cell: str) -> str | None:
    return None if number_of(cell) is None else cell


def _truth(cell: str) -> bool | None:
    return cell.lower() == "true" if TRUTH.fullmatch(cell) else None


class JoinedRows:
    """The rows of all parts, in their order."""

    def __init__(self, parts: Sequence[Rows], names: Sequence[str]) -> None:
        """`names` are the parts' names, for messages. Raises DataError if a part lacks a column of the first part."""
        for part, name in zip(parts, names, strict=True):
            if missing := sorted(set(parts[0].columns) - set(part.columns)):
                raise DataError(
                    f"{name}: no column {missing[0]!r}, which {names[0]} has; give every file the same columns"
                )
        self._parts = parts
        self.sizes = tuple(map(len, parts))
        self._ends = list(accumulate(self.sizes))
        self.columns = parts[0].columns
        self.fingerprint = "; ".join(part.fingerprint for part in parts)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = bisect_right(self._ends, index)
        return self._parts[number][index - (self._ends[number - 1] if number else 0)]


def left_out_of(rows: Rows) -> Counter[str]:
    """Return, for each reason, the number of rows of a data set that were left out for it."""
    return +Counter(getattr(rows, "left_out", {}))


def by_reason(left_out: Counter[str]) -> str:
    """Return numbers of rows with their reasons, most frequent first, for people."""
    return ", ".join(f"{number:,} ({reason})" for reason, number in left_out.most_common()) or "none left out"


def sizes_of(rows: Rows) -> tuple[int, ...]:
    """Return the number of rows of each joined data set; for other rows only their own number."""
    sizes: tuple[int, ...] = getattr(rows, "sizes", (len(rows),))
    return sizes


FILE_KINDS = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".arrow", ".feather")
"""Suffixes of files that this module reads; `datasets` reads every other name."""
KIND = CacheKind("data", default_mb=1 << 18, wait_s=1800.0)


def names_files(name: str) -> bool:
    """Return whether a name means files, rather than a folder of `datasets` or a data set on the hub."""
    return is_url(name) or glob.has_magic(name) or Path(name).suffix in FILE_KINDS


def files_of(name: str, field: str) -> Iterator[Path]:
    """Yield the local files of `name`, the value of `field`; those of a glob in the order of their names. A copy of a
    store's file exists until the next file is requested, or longer if the copy is still open. Raises Unreadable if
    there are none or the store cannot be reached; SpecError for a scheme that fsspec does not know."""
    if is_url(name):
        yield from _stored_files(name, field)
        return
    found = sorted(glob.glob(name, recursive=True)) if glob.has_magic(name) else [name]
    paths = [path for path in map(Path, found) if path.is_file()]
    if not paths:
        what = "no file matches" if glob.has_magic(name) else "no file"
        raise Unreadable(f"{field}: {what} {name!r}; check the path (relative paths start at the spec's folder)")
    yield from paths


def _stored_files(url: str, field: str) -> Iterator[Path]:
    store, files = _listed(url, field)
    if not files:
        raise Unreadable(f"{field}: no file at {url!r}; check bucket, folder and name")
    if is_local(store):
        yield from map(Path, files)
        return
    cache = KIND.of_user("data")
    for path in files:
        try:
            entry = store.info(path) | {"version": store.ukey(path)}
            held = open_copies(
                cache, store, f"{store.protocol}/{path}", {posixpath.basename(path): entry}, storage_key()
            )
        except PacelineError as error:
            raise type(error)(f"{field}: {url!r}: {error}") from None
        except Exception as error:  # errors of the store's client have many types
            raise _unreadable(url, field, error) from None
        with held:
            yield held.root / posixpath.basename(path)


def _listed(url: str, field: str) -> tuple[AbstractFileSystem, list[str]]:
    """Return the store of a URL (of a file or a glob), and the paths of the existing files."""
    store, path = open_url(url, field)
    try:
        found = sorted(map(str, store.glob(path))) if glob.has_magic(path) else [path]
        return store, [name for name in found if store.isfile(name)]
    except Exception as error:  # errors of the store's client have many types
        raise _unreadable(url, field, error) from None


def _unreadable(url: str, field: str, error: Exception) -> Unreadable:
    return Unreadable(
        f"{field}: {url!r} cannot be read: {type(error).__name__}: {error}; check the name, the network and the store's "
        "credentials in this process' environment"
    )
