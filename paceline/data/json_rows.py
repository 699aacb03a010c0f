"""Reads rows of JSON files: one object on each line, or one array of objects. Lines are indexed by their offsets and
read on request, so memory holds sixteen bytes for each row. An array is read as a whole and kept as lines in an
unnamed file, so a change of the original has no effect. If this process has a storage key, files encrypted with it are
decrypted, and kept rows are encrypted with another key that only this process has."""

from __future__ import annotations

import json
import os
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from paceline.data.json_schemas import without_added_nulls
from paceline.data.row_checks import Check, check_row
from paceline.encryption.encrypted_file import RecordCipher, WrongKey, open_data
from paceline.encryption.storage_key import KEY_BYTES, StorageKey, storage_key
from paceline.errors import DataError, Unreadable
from paceline.files.line_file import LineReader


class SpooledRows:
    """Copies of the rows of the file `path`: `add` all of them, then call `finished`."""

    def __init__(self, path: Path, columns: tuple[str, ...] = ()) -> None:
        self._path, self.columns, self.fingerprint = path, columns, ""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - rows are read from it later
        self._digest, self._growing = xxhash.xxh3_64(), array("q", [0])
        self._offsets = np.zeros(1, np.int64)
        own_key = None if storage_key() is None else StorageKey(os.urandom(KEY_BYTES))
        self._cipher = None if own_key is None else RecordCipher(own_key, "rows")

    def add(self, row: dict[str, Any]) -> None:
        line = json.dumps(row).encode()
        self._digest.update(line)
        if self._cipher is not None:
            line = self._cipher.seal(line)
        self._file.write(line)
        self._growing.append(self._growing[-1] + len(line))

    def finished(self) -> SpooledRows:
        self._file.flush()
        self._offsets = np.array(self._growing, np.int64)
        self.fingerprint = f"{len(self)} rows, XXH3 {self._digest.hexdigest()}"
        return self

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return row `index`. Raises Unreadable if the disk cannot be read."""
        start, end = int(self._offsets[index]), int(self._offsets[index + 1])
        try:
            line = os.pread(self._file.fileno(), end - start, start)
            row: dict[str, Any] = json.loads(line if self._cipher is None else self._cipher.open(line))
        except (OSError, ValueError, WrongKey) as error:
            raise Unreadable(f"row {index} of {self._path} cannot be read again: {error}") from None
        return row


MAX_ARRAY_MB = 256
"""Largest size in MB of a file with one JSON array."""


def open_json(path: Path, check: Check | None = None) -> JsonLines | SpooledRows:
    """Return the rows of a JSON file. Raises DataError with the line, and the column of invalid JSON; OSError."""
    with LineReader(path, storage_key(), is_named=True) as file:
        first = next((line.lstrip()[:1] for _, _, line in file if line.strip()), b"")
    return _array(path, check) if first == b"[" and path.suffix == ".json" else JsonLines(path, check)


class JsonLines:
    """A JSONL file by line offsets, checked when it is opened. The file stays open, so a replacement changes no row."""

    def __init__(self, path: Path, check: Check | None = None):
        self._path = path
        self._digest = xxhash.xxh3_64()
        self.columns: tuple[str, ...] = ()
        self._file = LineReader(path, storage_key(), is_named=True)
        offsets, ends = self._index(check)
        self._offsets, self._ends = np.array(offsets, np.int64), np.array(ends, np.int64)
        self.fingerprint = f"{len(self._offsets)} rows, XXH3 {self._digest.hexdigest()}"

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return row `index`. Raises Unreadable if the opened file was changed in place, or its disk cannot be read."""
        start, end = int(self._offsets[index]), int(self._ends[index])
        try:
            row = json.loads(self._file.read(start, end))
        except (OSError, ValueError, WrongKey) as error:
            raise self._changed(index, str(error)) from None
        if not isinstance(row, dict):
            raise self._changed(index, f"{type(row).__name__} instead of an object with columns")
        return without_added_nulls(row, is_table=False)

    def _changed(self, index: int, what: str) -> Unreadable:
        return Unreadable(
            f"row {index} of {self._path} has changed since the file was opened ({what}); restore the file"
        )

    def _index(self, check: Check | None) -> tuple[array[int], array[int]]:
        offsets, ends = array("q"), array("q")  # eight bytes each, unlike a list
        keys, path = None, self._path
        for number, (start, end, line) in enumerate(self._file, start=1):
            self._digest.update(line)
            if line.strip():
                row = parse_line(path, number, line)
                keys = keys or row.keys()
                if missing := keys - row.keys():
                    raise DataError(f"{path}, line {number}: {_no_column(sorted(missing)[0])}")
                check_row(check, row, f"{path}, line {number}")
                offsets.append(start)
                ends.append(end)
        self.columns = tuple(keys or ())
        return offsets, ends


def parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Return the object of line `number` of a file. Raises DataError."""
    try:
        row = json.loads(line)
    except RecursionError:
        raise DataError(f"{path}, line {number}: nested too deeply: {line[:60]!r}; correct or remove it") from None
    except ValueError as error:
        at = ""
        if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
            at = f", column {(error.pos if isinstance(error, json.JSONDecodeError) else error.start) + 1}"
        why = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise DataError(f"{path}, line {number}{at}: not valid JSON ({why}): {line[:60]!r}; correct the line") from None
    if not isinstance(row, dict):
        raise DataError(
            f"{path}, line {number}: {type(row).__name__} is not an object with columns; correct or remove it"
        )
    return row


def _array(path: Path, check: Check | None) -> SpooledRows:
    """Return the objects of an array. Raises DataError with the line at which a faulty object begins."""
    if (size_mb := path.stat().st_size / (1 << 20)) > MAX_ARRAY_MB:
        raise DataError(
            f"{path} is one JSON array of {size_mb:.0f} MB, which must be read as a whole; write one object on each line "
            f"(.jsonl), or keep the array below {MAX_ARRAY_MB} MB"
        )
    rows, text = SpooledRows(path), _utf8(path)
    for number, line, row in _objects(path, text):
        where = f"{path}, line {line} (row {number})"
        if not isinstance(row, dict):
            raise DataError(f"{where}: {type(row).__name__} is not an object with columns; correct it")
        rows.columns = rows.columns or tuple(row)
        if missing := sorted(set(rows.columns) - row.keys()):
            raise DataError(f"{where}: {_no_column(missing[0])}")
        check_row(check, row, where)
        rows.add(without_added_nulls(row, is_table=False))
    return rows.finished()


def _objects(path: Path, text: str) -> Iterator[tuple[int, int, Any]]:
    """Yield the number, the line and the value of each element of an array."""
    decoder, at, line, number = json.JSONDecoder(), text.index("[") + 1, 1, 0
    counted = 0
    while True:
        at = _after_space(text, at)
        if text[at : at + 1] == "]" and number == 0:
            break
        line, counted = line + text.count("\n", counted, at), at
        try:
            row, at = decoder.raw_decode(text, at)
            after = _after_space(text, at)
            if text[after : after + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, after)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}, line {error.lineno}, column {error.colno}: not valid JSON ({error.msg}): "
                f"{text[error.pos : error.pos + 60]!r}; correct or remove it"
            ) from None
        yield number, line, row
        number, at = number + 1, after + 1
        if text[after] == "]":
            break


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _utf8(path: Path) -> str:
    """Return the text of a file. Raises DataError with the line of a byte that is not UTF-8."""
    with open_data(path) as file:
        content = file.read()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: not UTF-8 ({error.reason}); save the file as UTF-8") from None


def _no_column(name: str) -> str:
    return f"no column {name!r}, which earlier rows have; give every row the same columns"
