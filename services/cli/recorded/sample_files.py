"""Writes a run's samples to a file that a run can train on again: every completion, or pairs for preference training. A
chat prompt stays a list of messages in Parquet and JSONL, and becomes JSON in CSV, which has no lists. Columns of
the data set become columns of the file again."""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import numpy as np

from paceline.errors import InvalidInput, NotFound
from paceline.files.whole_file import written_whole
from paceline.records import Records, missing_samples
from paceline.spec.reading import spec_of_run

Row = dict[str, Any]
FORMATS = (".parquet", ".jsonl", ".csv")

COMPLETION_COLUMNS = {
    "group_id": "int64",
    "completion_index": "int32",
    "step": "int64",
    "attempt": "int32",
    "prompt": "prompt",
    "columns": "string",
    "completion": "string",
    "finish_reason": "string",
    "prompt_ids": "list<int32>",
    "token_ids": "list<int32>",
    "logprobs": "list<float>",
    "sessions": "list<int32>",
    "versions": "list<int32>",
    "rewards": "rewards",
    "final_reward": "float",
    "extra": "string",
}
EPISODE_COLUMNS = {"messages": "string", "ending": "string"}
"""Further columns of a run with an environment, with the types of their values."""

KINDS = {int: "integer", float: "real", str: "text", list: "array", dict: "object"}
"""Maps the Python type of a JSON value to the name of its kind."""

PAIR_COLUMNS = {
    "group_id": "int64",
    "step": "int64",
    "prompt": "prompt",
    "chosen": "prompt",
    "rejected": "prompt",
    "chosen_reward": "float",
    "rejected_reward": "float",
}


def export_samples(
    records: Records, run_id: str, destination: Path, *, pairs: tuple[float, float] | None = None
) -> int:
    """Write every completion that the run has trained on as a row of `destination`, whose extension decides the format;
    return the number of rows.

    With `pairs` (a, b), write a row of prompt, chosen and rejected for each group whose best total reward is at least a
    and whose worst one is at most b. Rows are in the order of training. Memory holds one step; a temporary file in the
    folder of `destination` holds all groups. The file is written atomically. Raises NotFound if nothing was trained, if
    samples were not kept or cannot be read, if the folder is missing, or if no group gives a pair; InvalidInput for any
    other extension.
    """
    form = destination.suffix.lower()
    if form not in FORMATS:
        raise InvalidInput(
            f"{destination.name}: the format {form or 'none'!r} of the file name is none of {', '.join(FORMATS)}; rename the file"
        )
    if not destination.parent.is_dir():
        raise NotFound(f"no folder {destination.parent}; create it first")
    if form == ".parquet":
        from paceline.data.table_rows import need_table_packages

        need_table_packages("a Parquet file")
    spec = spec_of_run(run_id, records.spec_yaml(run_id))[0]
    columns = dict(PAIR_COLUMNS if pairs else COMPLETION_COLUMNS)
    if not pairs and spec.environment.is_used:
        columns |= EPISODE_COLUMNS
    make = (lambda group: _pair(group, *pairs)) if pairs else _completion_rows
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", dir=destination.parent) as file,
        written_whole(destination) as partial,
    ):
        groups = TrainedGroups(records, run_id, file)
        columns |= {name: kind for name, kind in groups.columns().items() if name not in columns}
        tables = (_rows_of_step(step, columns, make) for step in groups.steps())
        match form:
            case ".jsonl":
                number = _write_jsonl(partial, tables)
            case ".csv":
                number = _write_csv(partial, tables, columns)
            case _:
                functions = [reward.label for reward in spec.rewards]
                number = _write_parquet(partial, tables, columns, groups.message_keys(), functions)
        if pairs and not number:
            raise NotFound(
                f"no group of run {run_id} has a best completion of at least {pairs[0]:g} and a worst completion of at most "
                f"{pairs[1]:g}; see the rewards with `paceline samples {run_id} --best 5`"
            )
    return number


class TrainedGroups:
    """The trained groups of a run, read once into a temporary file, because the columns depend on all of them."""

    def __init__(self, records: Records, run_id: str, file: IO[str]):
        """Raises NotFound without a trained batch, or if samples cannot be read."""
        self._file = file
        self._kinds: dict[str, set[str]] = {}
        self._prompt_kinds: set[str] = set()
        self._message_keys: set[str] = set()
        trained = {batch.step for batch in records.batches(run_id) if batch.trained}
        if not trained:
            raise NotFound(f"run {run_id} has trained no batch yet, so there is nothing to export")
        for group in records.sample_groups(run_id, full=True):
            if group.step not in trained:
                continue
            if not group.json:
                raise missing_samples(records, run_id, group.step)
            self._file.write(f"{group.json}\n")
            self._note(json.loads(group.json))

    def steps(self) -> Iterator[list[Row]]:
        self._file.seek(0)
        for _, groups in groupby(map(json.loads, self._file), lambda group: group["step"]):
            yield list(groups)

    def columns(self) -> dict[str, str]:
        """Return the columns of the data set with their types, in alphabetical order."""
        return {name: _type_of(kinds - {"null"}) for name, kinds in sorted(self._kinds.items())}

    def message_keys(self) -> list[str] | None:
        """Return the keys of the messages if every prompt is a chat; None if any is a text."""
        keys = ["role", "content", *sorted(self._message_keys - {"role", "content"})]
        return keys if self._prompt_kinds == {"array"} else None

    def _note(self, group: Row) -> None:
        for name, value in group["columns"].items():
            self._kinds.setdefault(name, set()).add(_kind(value))
        self._prompt_kinds.add(_kind(group["prompt"]))
        if isinstance(group["prompt"], list):
            self._message_keys.update(key for message in group["prompt"] for key in message)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else KINDS[type(value)]


def _type_of(kinds: set[str]) -> str:
    if kinds == {"integer"}:
        return "int64"
    if kinds and kinds <= {"integer", "real"}:
        return "double"
    return "bool" if kinds and kinds <= {"true", "false"} else "string"


# Rows


def _rows_of_step(groups: list[Row], columns: dict[str, str], make: Callable[[Row], list[Row]]) -> list[Row]:
    rows = []
    for group in groups:
        columns_of_group = {name: value for name, value in group["columns"].items() if name in columns}
        rows += [columns_of_group | row for row in make(group)]
    return [{name: row.get(name) for name in columns} for row in rows]


def _completion_rows(group: Row) -> list[Row]:
    """Return a row for each completion of a group, with sessions and versions by token, and the columns as JSON."""
    rows = []
    for index, completion in enumerate(group["completions"]):
        lengths = [end - start for start, end, _, _ in completion["spans"]]
        rows.append(
            {
                "group_id": group["group_id"],
                "completion_index": index,
                "step": group["step"],
                "attempt": group["attempt"],
                "prompt": group["prompt"],
                "columns": json.dumps(group["columns"]),
                "completion": completion["text"],
                "messages": json.dumps(completion["messages"]) if "messages" in completion else None,
                "ending": completion.get("ending"),
                "finish_reason": completion["finish_reason"],
                "prompt_ids": group["prompt_ids"],
                "token_ids": completion["token_ids"],
                "logprobs": completion["logprobs"],
                "sessions": np.repeat([s for _, _, s, _ in completion["spans"]], lengths).tolist(),
                "versions": np.repeat([v for _, _, _, v in completion["spans"]], lengths).tolist(),
                "rewards": completion["rewards"],
                "final_reward": completion["reward"],
                "extra": json.dumps(completion["extra"]) if completion["extra"] else None,
            }
        )
    return rows


def _pair(group: Row, at_least: float, at_most: float) -> list[Row]:
    """Return the group's best and worst completion as a pair; no row if the two are equal, empty or outside the bounds."""
    rewarded = [c for c in group["completions"] if c["reward"] is not None and c["text"]]
    if not rewarded:
        return []
    best, worst = (choose(rewarded, key=lambda c: c["reward"]) for choose in (max, min))
    if best["reward"] < at_least or worst["reward"] > at_most or best["reward"] <= worst["reward"]:
        return []
    if best["text"] == worst["text"]:
        return []
    is_chat = not isinstance(group["prompt"], str)
    chosen, rejected = ([{"role": "assistant", "content": c["text"]}] if is_chat else c["text"] for c in (best, worst))
    return [
        {
            "group_id": group["group_id"],
            "step": group["step"],
            "prompt": group["prompt"],
            "chosen": chosen,
            "rejected": rejected,
            "chosen_reward": best["reward"],
            "rejected_reward": worst["reward"],
        }
    ]


# Files


def _write_jsonl(path: Path, tables: Iterable[list[Row]]) -> int:
    number = 0
    with path.open("w", encoding="utf-8") as file:
        for row in (row for table in tables for row in table):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            number += 1
    return number


def _write_csv(path: Path, tables: Iterable[list[Row]], columns: dict[str, str]) -> int:
    number = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        for row in (row for table in tables for row in table):
            writer.writerow(
                {name: _text(value) if isinstance(value, list | dict) else value for name, value in row.items()}
            )
            number += 1
    return number


def _write_parquet(
    path: Path,
    tables: Iterator[list[Row]],
    columns: dict[str, str],
    message_keys: list[str] | None,
    functions: list[str],
) -> int:
    import pyarrow as pa
    import pyarrow.parquet

    text = pa.string()
    chat = pa.list_(pa.struct([(key, text) for key in message_keys])) if message_keys else text
    types = {
        "prompt": chat,
        "string": text,
        "int32": pa.int32(),
        "int64": pa.int64(),
        "float": pa.float32(),
        "double": pa.float64(),
        "bool": pa.bool_(),
        "list<int32>": pa.list_(pa.int32()),
        "list<float>": pa.list_(pa.float32()),
    }
    if functions:  # a struct, because `datasets` reads no maps, and Parquet has no struct without fields
        types["rewards"] = pa.struct([(name, pa.float32()) for name in functions])
    columns = {name: kind for name, kind in columns.items() if kind in types}
    schema = pa.schema([(name, types[kind]) for name, kind in columns.items()])
    number = 0
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for table in tables:
            cells = [{name: _cell(row[name], kind, message_keys) for name, kind in columns.items()} for row in table]
            if cells:
                writer.write_table(pa.Table.from_pylist(cells, schema=schema))
            number += len(cells)
    return number


def _cell(value: Any, kind: str, message_keys: list[str] | None) -> Any:
    """Return a value in a type of Parquet: a chat as messages that all have the same keys, other nested values as JSON."""
    if kind == "prompt" and message_keys and isinstance(value, list):
        return [{key: _text(message.get(key)) for key in message_keys} for message in value]
    return _text(value) if kind in ("prompt", "string") else value


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
