"""Rows of tables, read by `datasets`: Parquet and Arrow files, folders that it has saved, and data sets on the hub.

A table is mapped into memory from the disk, so that its size does not matter. `datasets` keeps a copy of a file's rows for that, which
is plain: where this process has a storage key, a file is read into memory instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.added_nulls import without_added_nulls
from paceline.data.column_scan import holds_json
from paceline.data.table_packages import need_table_packages
from paceline.encryption.encrypted_file import WrongKey, is_encrypted_file, open_data
from paceline.encryption.storage_key import storage_key
from paceline.errors import DataError, Unreadable
from paceline.models.loading import hub_remedy

SHORT: Mapping[str, Any] = dict.fromkeys(("float32", "float"), np.float32) | dict.fromkeys(
    ("float16", "halffloat"), np.float16
)
"""Types, as `datasets` and pyarrow name them, whose numbers have more digits as Python's than they are written with."""
STREAMED_ROWS = 1000
"""Rows of one table of a stream."""

_CONFIGS = re.compile(
    r"(?:Config name is missing.*|BuilderConfig .* not found\. )[Aa]vailable(?: configs)?: \[(.*?)\]",
    re.DOTALL,
)
"""Texts of `datasets` for a configuration that is missing or unknown, with the list of those that exist."""


def open_table(
    builder: str | None, name: str, split: str | None, field: str = "", config: str | None = None
) -> TableRows:
    """Return the rows of a table; `builder` is that of a file. Raises DataError, Unreadable."""
    return TableRows(_loaded(builder, name, split, field, config))


def open_stream(name: str, split: str, field: str, config: str | None) -> Iterator[Any]:
    """Return the Arrow tables of a data set on the hub, or of a folder of files, as they are read. Raises DataError, Unreadable;
    while they are read also what `datasets` raises."""
    stream = _loaded(None, name, split, field, config, streaming=True)
    tables: Iterator[Any] = stream.with_format("arrow").iter(STREAMED_ROWS)
    return tables


def _loaded(
    builder: str | None,
    name: str,
    split: str | None,
    field: str,
    config: str | None,
    *,
    streaming: bool = False,
) -> Any:
    """Return a `datasets.Dataset`, or an `IterableDataset` that is read as a stream. Raises DataError, Unreadable."""
    need_table_packages(f"{field or 'the data set'}: {name!r}")
    import datasets

    datasets.disable_progress_bars()
    try:
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
    except Exception as error:  # `datasets` raises dozens of kinds; each means that the set cannot be read
        if found := _CONFIGS.search(str(error)):
            named = f"{config!r} is none of them" if config else "it has several"
            raise DataError(
                f"{field} {name!r}: set {field}_config to one of its configurations [{found[1]}]; {named}"
            ) from None
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if builder:
            raise Unreadable(
                f"{field}: {name!r} cannot be read as a table: {reason}; write the file anew, or as JSONL"
            ) from None
        remedy = "" if Path(name).is_file() else f"; {hub_remedy(name)}"
        raise Unreadable(f"cannot load the data set {name!r}: {reason}{remedy}") from None
    if isinstance(loaded, dict):
        if split not in loaded:
            raise DataError(f"the data set {name!r} has the splits {sorted(loaded)}, not {split!r}")
        loaded = loaded[split]
    return loaded


def _table_in_memory(builder: str, path: Path) -> Any:
    """Return the whole table of a Parquet or Arrow file, decrypted if it is encrypted. Raises WrongKey, and errors of pyarrow."""
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
    return DataError(
        f"{field}_config is {config!r}, but {name!r} is {kind}, which has no configurations; remove it"
    )


def short_types(schema: Any) -> dict[str, str]:
    """Return the types of the columns whose numbers, or lists of numbers, are of 32 or 16 bits."""
    found = {}
    for field in schema:
        kind = field.type
        while hasattr(kind, "value_field"):
            kind = kind.value_type
        found[field.name] = str(kind)
    return {name: kind for name, kind in found.items() if kind in SHORT}


def in_short_form(row: Mapping[str, Any], types: Mapping[str, str]) -> dict[str, Any]:
    """Return a row with the numbers of 32 or 16 bits, by their columns' `types`, as they are written: 0.1, not
    0.10000000149011612."""
    return {**row, **{name: _written(row[name], SHORT[kind]) for name, kind in types.items()}}


def _written(value: Any, kind: Any) -> Any:
    """Return a number, or those of a list, with as many digits as `kind` has."""
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
        except Exception as error:  # as `datasets` has it: its files lie on a disk, and columns are decoded when they are read
            raise Unreadable(
                f"row {index} of the data set cannot be read: {type(error).__name__}: {error}"
            ) from None
        return without_added_nulls(row, is_table=self._adds_nulls)
