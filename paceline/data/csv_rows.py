"""Rows of a CSV file: the first line names the columns, every fault is told with its line.

A column whose filled cells are all numbers, or all true and false, has such values, and null where a cell is empty. Every
other column is text (`007`, `1,5` and dates stay what they are). So is one with a number that would be written in another way
than it is (`0.50`, `1e5`), because such values are compared with texts; cells of it that are empty are null too.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from paceline.data.spooled_rows import SpooledRows
from paceline.data.written import number_of
from paceline.encryption.encrypted_file import open_data
from paceline.errors import DataError

MAX_CELL = 64 << 20
"""Characters of one cell."""
TRUTH = re.compile(r"true|false", re.IGNORECASE)
Conversion = Callable[[str], Any]
"""Value of a cell; None for one that has none."""


def open_csv(path: Path, check: Callable[[dict[str, Any]], None] | None = None) -> SpooledRows:
    """Return the rows of a CSV file. `check` sees every row, and raises DataError.

    Raises DataError with the line of a fault, OSError when the file cannot be read.
    """
    converters = _converters(path)
    rows = SpooledRows(path, tuple(name for name, _ in converters))
    for number, cells in _lines(path):
        row = {name: convert(cell) for (name, convert), cell in zip(converters, cells, strict=True)}
        if check:
            try:
                check(row)
            except DataError as error:
                raise DataError(f"{path}, line {number}: {error}") from None
        rows.add(row)
    return rows.finished()


def _lines(path: Path, *, header: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Yield number and cells of each row; first those of the header, if wanted. Raises DataError."""
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


def _converters(path: Path) -> list[tuple[str, Conversion]]:
    """Return each column with the conversion of its cells."""
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
    """Return the number of a cell; None where there is none, or it is written in another way."""
    number = number_of(cell)
    return number if str(number) == cell else None


def _number_text(cell: str) -> str | None:
    return None if number_of(cell) is None else cell


def _truth(cell: str) -> bool | None:
    return cell.lower() == "true" if TRUTH.fullmatch(cell) else None
