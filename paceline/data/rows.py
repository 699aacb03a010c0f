"""Data sets of prompts: JSONL, Parquet, and everything that `datasets` loads, behind one small reader.

A file is indexed, not held: row i is read when it is asked for, and a malformed row is an error with its line or row
number at opening time, before anything trains on it. The order is seeded and anew in every epoch; given (seed,
cursor) it is always the same, which is what a restart relies on.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import xxhash

from paceline.data.column_scan import RowCheck, doubtful_rows, texts
from paceline.data.csv_rows import CsvRows
from paceline.data.files import FILE_KINDS, files_of, names_files
from paceline.data.joined_rows import JoinedRows
from paceline.data.messages import fault_of_messages
from paceline.data.table_packages import need_table_packages
from paceline.data.tokens import with_system_prompt
from paceline.errors import DataError, Unreadable
from paceline.models.hub_names import hub_remedy
from paceline.spec import DataSection
from paceline.spec.sections.data import DataSource

_CONFIGS = re.compile(
    r"(?:Config name is missing.*|BuilderConfig .* not found\. )[Aa]vailable(?: configs)?: \[(.*?)\]",
    re.DOTALL,
)
"""Texts of `datasets` for a configuration that is missing or unknown, with the list of those that exist."""


class Rows(Protocol):
    """A sequence of rows."""

    fingerprint: str
    """Identity of the data set's contents, which shows a replaced file where that can be detected."""
    columns: tuple[str, ...]
    """Columns that every row has."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...


class PromptSource:
    """Prompts in a seeded order without end: `draw(cursor)` gives the prompt and the other columns."""

    def __init__(self, rows: Rows, data: DataSection, seed: int, *, shuffle: bool):
        self._rows = rows
        self._data = data
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the rows at the time they were opened."""
        return self._rows.fingerprint

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns besides the prompt, which reward functions get."""
        return tuple(name for name in self._rows.columns if name != self._data.prompt_key)

    def index(self, cursor: int) -> int:
        """Row that the `cursor`-th draw takes: a permutation of the rows in every epoch."""
        epoch, position = divmod(cursor, len(self._rows))
        if not self._shuffle:
            return position
        if epoch != self._epoch:
            self._order = np.random.default_rng((self._seed, epoch)).permutation(len(self._rows))
            self._epoch = epoch
        return int(self._order[position])

    def draw(self, cursor: int) -> tuple[Any, dict[str, Any]]:
        """Prompt (text or messages) and columns of the `cursor`-th draw. Raises Unreadable when the row cannot be read now."""
        row = dict(self._rows[self.index(cursor)])
        if not self._data.prompt_key:
            return with_system_prompt([], self._data), row
        if self._data.prompt_key not in row:
            raise Unreadable(
                f"row {self.index(cursor)} of the data set has no column {self._data.prompt_key!r} any more; put it back as it was"
            )
        prompt = row.pop(self._data.prompt_key)
        return with_system_prompt(prompt, self._data), row


def open_prompts(data: DataSection, seed: int, *, validation: bool = False) -> PromptSource:
    """Return the training (or validation) prompts. Raises DataError: empty, malformed row, no prompt column;
    Unreadable: not there."""
    rows = open_source(data.source(validation=validation), prompt_check(data.prompt_key))
    return PromptSource(rows, data, seed, shuffle=data.shuffle and not validation)


def open_rows(
    name: str | tuple[str, ...],
    split: str,
    field: str = "data.train",
    check: Callable[[dict[str, Any]], None] | None = None,
) -> Rows:
    """Rows of the data set `name`, as of `open_source`."""
    return open_source(DataSource(field, name, split), check)


def open_source(source: DataSource, check: Callable[[dict[str, Any]], None] | None = None) -> Rows:
    """Rows of a data set, or of several files one after the other. `check` raises DataError for a row that cannot be used.
    Of a table (Parquet, a folder, the hub) the rows that a `RowCheck` scan passes are not checked one by one.

    Raises DataError, naming the field, or the line or row; Unreadable for what cannot be read now.
    """
    field, name, split, config = source
    parts: list[Rows] = []
    names: list[str] = []
    for one in (name,) if isinstance(name, str) else name:
        is_table = Path(one).is_dir() or not names_files(one)
        for path in [one] if is_table else map(str, files_of(one, field)):
            if config is not None and not is_table:
                raise _without_configs(field, config, path, "a file")
            rows = _table(None, one, split, field, config) if is_table else _file_rows(path, field, check)
            if len(rows) == 0:
                raise DataError(f"{field}: {path!r} has no rows; at least one is needed")
            if check and isinstance(rows, _Table):
                _check_table(rows, check, f"{field}: {path!r}")
            parts.append(rows)
            names.append(path)
    return parts[0] if len(parts) == 1 else JoinedRows(parts, names)


def _file_rows(name: str, field: str, check: Callable[[dict[str, Any]], None] | None) -> Rows:
    """Return the rows of one file. Raises DataError, Unreadable."""
    path = Path(name)
    try:
        if path.suffix in (".jsonl", ".json"):
            return JsonLines(path, check)
        if path.suffix in (".csv", ".tsv"):
            return CsvRows(path, check)
    except OSError as error:
        raise Unreadable(f"{field}: {name!r} cannot be read: {error.strerror}") from None
    if path.suffix == ".parquet":
        return _table("parquet", name, None, field)
    raise DataError(
        f"{field}: {name!r} is a file of a kind that cannot be read; the kinds are {', '.join(FILE_KINDS)}"
    )


class JsonLines:
    """A JSONL file by line offsets; every line is checked once when it is opened. The file stays open, so that its rows stay
    what they were when somebody puts another one in its place.
    """

    def __init__(self, path: Path, check: Callable[[dict[str, Any]], None] | None = None):
        self._path = path
        self._digest = xxhash.xxh3_64()
        self.columns: tuple[str, ...] = ()
        with path.open("rb") as file:
            self._offsets = np.array(self._index(file, check), np.int64)
            self._ends = np.append(self._offsets[1:], file.tell())
            self._fd = os.dup(file.fileno())
        self.fingerprint = f"{len(self._offsets)} rows, XXH3 {self._digest.hexdigest()}"

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Raises Unreadable when the file was changed in its place since it was opened, or its disk cannot be read."""
        start, end = int(self._offsets[index]), int(self._ends[index])
        try:
            row = json.loads(os.pread(self._fd, end - start, start))
        except (OSError, ValueError) as error:
            raise self._changed(index, str(error)) from None
        if not isinstance(row, dict):
            raise self._changed(index, f"{type(row).__name__} instead of an object with columns")
        return row

    def _changed(self, index: int, what: str) -> Unreadable:
        return Unreadable(
            f"row {index} of {self._path} is not what it was when the file was opened ({what}); put the file back as it was"
        )

    def _index(self, file: IO[bytes], check: Callable[[dict[str, Any]], None] | None) -> array[int]:
        """Return the offset of each row in bytes."""
        offsets, keys, position, path = array("q"), None, 0, self._path  # eight bytes a row, unlike a list
        for number, line in enumerate(file, start=1):
            self._digest.update(line)
            if line.strip():
                row = _parse_line(path, number, line)
                keys = keys or row.keys()
                if missing := keys - row.keys():
                    raise DataError(
                        f"{path}, line {number}: no column {sorted(missing)[0]!r}, which earlier rows have; "
                        "give every row the same columns"
                    )
                if check:
                    try:
                        check(row)
                    except DataError as error:
                        raise DataError(f"{path}, line {number}: {error}") from None
                offsets.append(position)
            position += len(line)
        self.columns = tuple(keys or ())
        return offsets


def _parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        syntax = error if isinstance(error, json.JSONDecodeError) else None
        at, why = ("", error) if syntax is None else (f", column {syntax.pos + 1}", syntax.msg)
        raise DataError(
            f"{path}, line {number}{at}: not valid JSON ({why}): {line[:60]!r}; fix or remove it"
        ) from None
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {number}: {type(row).__name__} instead of an object with columns")
    return row


def prompt_check(prompt_key: str) -> RowCheck:
    """Return the check that column `prompt_key` has a usable prompt in every row; an empty key is that of rows without one."""
    if not prompt_key:
        return RowCheck(lambda row: None, (), lambda table: np.ones(len(table), bool))
    return RowCheck(
        lambda row: check_prompt(row, prompt_key), (prompt_key,), lambda table: texts(table, prompt_key)
    )


def check_prompt(row: dict[str, Any], prompt_key: str) -> None:
    """Raises DataError when `row` has no usable prompt in column `prompt_key`."""
    if prompt_key not in row:
        raise DataError(
            f"data.prompt_key is {prompt_key!r}, but the columns are {sorted(row)}; set it to one of them"
        )
    check_text(row[prompt_key], prompt_key)


def check_text(value: Any, key: str) -> None:
    """Raises DataError unless `value`, of column `key`, is text that is not empty, or chat messages of text."""
    if value is None or value == "":
        kind = "null" if value is None else "empty"
        raise DataError(f"column {key!r} is {kind}; give it text or chat messages, or remove the row")
    if not isinstance(value, str) and (fault := fault_of_messages(value)):
        raise DataError(f"column {key!r} {fault}")


def check_columns(row: dict[str, Any], keys: tuple[str, ...]) -> None:
    """Raises DataError when `row` lacks one of the columns, or has nothing in it."""
    for key in keys:
        if key not in row:
            raise DataError(
                f"no {key!r} in a row with the columns {sorted(row)}; name the columns in data.*_key"
            )
        if row[key] is None or row[key] == "":
            raise DataError(
                f"column {key!r} is {'null' if row[key] is None else 'empty'}; fill it, or remove the row"
            )


def _check_table(rows: _Table, check: Callable[[dict[str, Any]], None], where: str) -> None:
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


def _table(
    builder: str | None, name: str, split: str | None, field: str = "", config: str | None = None
) -> Rows:
    need_table_packages(f"{field or 'the data set'}: {name!r}")
    import datasets

    datasets.disable_progress_bars()
    try:
        if builder:
            return _Table(datasets.load_dataset(builder, data_files=name, split="train"))
        if (Path(name) / "dataset_info.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
            if config is not None:
                raise _without_configs(field, config, name, "a folder made by `save_to_disk`")
            loaded = datasets.load_from_disk(name)
        else:
            loaded = datasets.load_dataset(name, config)
    except DataError:
        raise
    except Exception as error:  # `datasets` raises dozens of kinds; each means that the set cannot be read
        if found := _CONFIGS.search(str(error)):
            named = f"{config!r} is none of them" if config else "it has several"
            raise DataError(
                f"{field} {name!r}: set {field}_config to one of its configurations [{found[1]}]; {named}"
            ) from None
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        remedy = "" if Path(name).is_file() else f"; {hub_remedy(name)}"
        raise Unreadable(f"cannot load the data set {name!r}: {reason}{remedy}") from None
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(f"the data set {name!r} has the splits {sorted(loaded)}, not {split!r}")
        loaded = loaded[split]
    return _Table(loaded)


def _without_configs(field: str, config: str, name: str, kind: str) -> DataError:
    return DataError(
        f"{field}_config is {config!r}, but {name!r} is {kind}, which has no configurations; remove it"
    )


class _Table:
    def __init__(self, dataset: Any):
        self.dataset = dataset
        self.fingerprint = f"{len(dataset)} rows"
        self.columns = tuple(dataset.column_names)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            return dict(self.dataset[index])
        except Exception as error:  # as `datasets` has it: its files lie on a disk, and columns are decoded when they are read
            raise Unreadable(
                f"row {index} of the data set cannot be read: {type(error).__name__}: {error}"
            ) from None
