"""Rows of a CSV file: the first line names the columns, every fault is told with its line.

A column whose filled cells are all whole numbers, numbers, or true and false, written as JSON writes them, has such
values, and null where a cell is empty. Every other column is text (`007`, `1,5` and dates stay what they are).

The rows are kept as JSON lines in an unnamed file, so that memory holds their offsets alone, and a change of the CSV file
changes nothing.
"""

from __future__ import annotations

import csv
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from paceline.errors import DataError, Unreadable

MAX_CELL = 64 << 20
"""Characters of one cell."""
WHOLE = re.compile(r"-?(0|[1-9]\d{0,17})")
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d{1,3})?")
TRUTH = re.compile(r"true|false", re.IGNORECASE)
Convert = Callable[[str], Any]


class CsvRows:
    """The rows of one file. `check` sees every row, and raises DataError."""

    def __init__(self, path: Path, check: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Raises DataError with the line of a fault, OSError when the file cannot be read."""
        self._path = path
        converters = _converters(path)
        self.columns = tuple(name for name, _ in converters)
        digest, offsets = xxhash.xxh3_64(), [0]
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - rows are read from it later
        for number, cells in _lines(path):
            row = {name: convert(cell) for (name, convert), cell in zip(converters, cells, strict=True)}
            if check:
                try:
                    check(row)
                except DataError as error:
                    raise DataError(f"{path}, line {number}: {error}") from None
            line = json.dumps(row).encode()
            digest.update(line)
            self._file.write(line)
            offsets.append(offsets[-1] + len(line))
        self._file.flush()
        self._offsets = np.array(offsets, np.int64)
        self.fingerprint = f"{len(self)} rows, XXH3 {digest.hexdigest()}"

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return row `index`. Raises Unreadable when the disk cannot be read."""
        start, end = int(self._offsets[index]), int(self._offsets[index + 1])
        try:
            row: dict[str, Any] = json.loads(os.pread(self._file.fileno(), end - start, start))
        except (OSError, ValueError) as error:
            raise Unreadable(f"row {index} of {self._path} cannot be read again: {error}") from None
        return row


def _lines(path: Path, *, header: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Yield number and cells of each row; first those of the header, if wanted. Raises DataError."""
    delimiter = "\t" if path.suffix == ".tsv" else ","
    csv.field_size_limit(MAX_CELL)
    with path.open(newline="", encoding="utf-8-sig") as file:
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
            raise DataError(
                f"{path}, line {reader.line_num}: not valid CSV ({error}); fix the line"
            ) from None
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}, after line {reader.line_num}: not UTF-8 ({error.reason}); save the file as UTF-8"
            ) from None


def _checked_names(path: Path, names: list[str]) -> list[str]:
    for name in names:
        if not name.strip():
            raise DataError(f"{path}, line 1: a column has no name; name every column there")
        if names.count(name) > 1:
            raise DataError(
                f"{path}, line 1: the column {name!r} is there {names.count(name)} times; name it once"
            )
    return names


def _converters(path: Path) -> list[tuple[str, Convert]]:
    """Return each column with the conversion of its cells."""
    lines = _lines(path, header=True)
    names = next(lines, (0, []))[1]
    kinds = [[WHOLE, NUMBER, TRUTH] for _ in names]
    filled = [False] * len(names)
    for _, cells in lines:
        for place, cell in enumerate(cells):
            if cell:
                filled[place] = True
                kinds[place] = [kind for kind in kinds[place] if kind.fullmatch(cell)]
    return [
        (name, _conversion(kinds[place][0] if filled[place] and kinds[place] else None))
        for place, name in enumerate(names)
    ]


def _conversion(kind: re.Pattern[str] | None) -> Convert:
    if kind is WHOLE:
        return lambda cell: int(cell) if cell else None
    if kind is NUMBER:
        return lambda cell: float(cell) if cell else None
    if kind is TRUTH:
        return lambda cell: cell.lower() == "true" if cell else None
    return str
