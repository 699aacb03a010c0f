"""Data sets as rows: files of every kind, and everything that `datasets` loads, behind one small reader.

A file is indexed, not held: row i is read when it is asked for. Promise: a malformed row is an error with its line or row
number at opening time, before anything trains on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from paceline.data.column_scan import RowCheck, doubtful_rows
from paceline.data.csv_rows import open_csv
from paceline.data.files import FILE_KINDS, files_of, names_files
from paceline.data.joined_rows import JoinedRows
from paceline.data.json_rows import open_json
from paceline.data.table_rows import TableRows, open_table, without_configs
from paceline.errors import DataError, Unreadable
from paceline.spec.sections.data import DataSource

Check = Callable[[dict[str, Any]], None]


class Rows(Protocol):
    """A sequence of rows."""

    fingerprint: str
    """Identity of the data set's contents, which shows a replaced file where that can be detected."""
    columns: tuple[str, ...]
    """Columns that every row has."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


def open_rows(
    name: str | tuple[str, ...], split: str, field: str = "data.train", check: Check | None = None
) -> Rows:
    """Rows of the data set `name`, as of `open_source`."""
    return open_source(DataSource(field, name, split), check)


def open_source(source: DataSource, check: Check | None = None) -> Rows:
    """Rows of a data set, or of several one after the other. `check` raises DataError for a row that cannot be used.
    Of a table (Parquet, Arrow, a folder, the hub) the rows that a `RowCheck` scan passes are not checked one by one.

    Raises DataError, naming the field, or the line or row; Unreadable for what cannot be read now.
    """
    names = (source.name,) if isinstance(source.name, str) else source.name
    entries = [_entry(source._replace(name=name), name, check) for name in names]
    return entries[0] if len(entries) == 1 else JoinedRows(entries, names)


def _entry(source: DataSource, name: str, check: Check | None) -> Rows:
    """Return the rows of one name, which may stand for several files."""
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
    """Return the rows of one file. Raises DataError, Unreadable."""
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
    raise DataError(
        f"{field}: {name!r} is a file of a kind that cannot be read; the kinds are {', '.join(FILE_KINDS)}"
    )


def _check_table(rows: TableRows, check: Check, where: str) -> None:
    """Check every row of a table. Raises DataError with the row's index."""
    pairs = doubtful_rows(rows.dataset, check) if isinstance(check, RowCheck) else _every_row(rows)
    # The first one by itself, with all its columns: the message for a column that is not there names them.
    for index, row in itertools.chain([(0, rows[0])], pairs):
        try:
            check(row)
        except DataError as error:
            raise DataError(f"{where}, row {index}: {error}") from None


def _every_row(rows: Rows) -> Iterator[tuple[int, dict[str, Any]]]:
    return ((index, rows[index]) for index in range(len(rows)))
