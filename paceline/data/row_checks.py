"""Checks single rows, and scans whole tables by columns. Each check of a row raises DataError with the column, the
value and a remedy. Column operations find the rows of a table that certainly pass, in seconds for a million rows; all
other rows are checked one by one. Promise: a scan never accepts a row that the check of single rows refuses. In a
column of an unknown form no row certainly passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline.data.messages import CALL_FIELDS, REASONING_FIELDS, TOOLS_KEY, fault_of_messages, tools_of_prompt
from paceline.data.row_prompts import is_made, prompt_of, read_columns, with_keys_of_row
from paceline.errors import DataError
from paceline.spec import DataSection

if TYPE_CHECKING:
    import pyarrow as pa


Check = Callable[[dict[str, Any]], object]
"""Checks one row; raises DataError."""
Mask = npt.NDArray[np.bool_]

BATCH_ROWS = 1 << 16


@dataclass(frozen=True)
class RowCheck:
    """A check of single rows, with a scan of tables that makes most calls of the check unnecessary."""

    row: Check
    columns: tuple[str, ...] | None
    """Columns that the check reads, if the table has them; None for all."""
    passing: Callable[[pa.Table], Mask]
    """The scan: takes a table with N rows, and returns [N] booleans, true for rows that certainly pass the check."""

    def __call__(self, row: dict[str, Any]) -> None:
        self.row(row)


def check_row(check: Check | None, row: dict[str, Any], where: str) -> None:
    """Check one row, if there is a check. Raises DataError that begins with the row's position."""
    try:
        if check:
            check(row)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def doubtful_rows(dataset: Any, check: RowCheck) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield index and columns of each row of a `datasets.Dataset` for which the scan does not show that it passes the
    check."""
    columns = [name for name in dataset.column_names if check.columns is None or name in check.columns]
    if not columns:
        return
    selected = dataset.select_columns(columns)
    for number, table in enumerate(selected.with_format("arrow").iter(BATCH_ROWS)):
        doubtful = np.flatnonzero(~check.passing(table))
        if len(doubtful):
            indices = (doubtful + number * BATCH_ROWS).tolist()
            if holds_json(selected):
                values = selected[indices]
                rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
            else:
                rows = table.take(doubtful).to_pylist()
            yield from zip(indices, rows, strict=True)


def holds_json(dataset: Any) -> bool:
    """Return whether some values of a `datasets.Dataset` are stored as JSON, so that objects may have different
    keys."""
    return "Json(" in repr(dataset.features)


def texts(table: pa.Table, name: str) -> Mask:
    """Return [N] whether column `name` has text, or chat messages with only text; neither null nor empty."""
    import pyarrow.compute as pc

    if name not in table.column_names:
        return np.zeros(table.num_rows, bool)
    column = table[name]
    if _is_text(column.type):
        return _mask(pc.greater(pc.binary_length(column), 0))
    if not _are_plain_messages(column.type):
        return np.zeros(table.num_rows, bool)
    messages = Messages(column)
    sound = _mask(pc.greater(pc.binary_length(messages.roles), 0)) & _mask(pc.is_valid(messages.contents))
    passing: Mask = messages.lengths > 0
    passing[messages.rows[~sound]] = False
    return passing


def unanswered(table: pa.Table, name: str) -> Mask:
    """Return [N] whether column `name` has text, or messages that do not end with the assistant's."""
    if name not in table.column_names or not _are_plain_messages(table[name].type):
        return np.ones(table.num_rows, bool)
    messages = Messages(table[name])
    others: Mask = messages.at(-1, messages.roles) != "assistant"
    return others


def different(table: pa.Table, name: str, other: str) -> Mask:
    """Return [N] whether two columns of `texts` certainly differ: in text, or the last of equally many messages."""
    import pyarrow.compute as pc

    one, two = table[name], table[other]
    if _is_text(one.type) != _is_text(two.type):
        return np.ones(table.num_rows, bool)
    if _is_text(one.type):
        return _mask(pc.not_equal(one, two))
    first, second = Messages(one), Messages(two)
    return _unequal(first.at(-1, first.contents), second.at(-1, second.contents))


def begin_alike(table: pa.Table, name: str, other: str) -> Mask:
    """Return [N] whether two columns of conversations certainly have a common beginning and then differ: equally many
    messages, the same first message, different last messages. Both columns must be `texts`."""
    one, two = table[name], table[other]
    if _is_text(one.type) or _is_text(two.type):
        return np.zeros(table.num_rows, bool)
    first, second = Messages(one), Messages(two)
    alike = ~_unequal(first.at(0, first.contents), second.at(0, second.contents))
    alike &= ~_unequal(first.at(0, first.roles), second.at(0, second.roles))
    # If a further key differs in the first message, nothing is common.
    alike &= len(first.keys) == 2 and len(second.keys) == 2
    same_length: Mask = (first.lengths == second.lengths) & (first.lengths > 1)
    differ: Mask = alike & same_length & _unequal(first.at(-1, first.contents), second.at(-1, second.contents))
    return differ


def conversations(table: pa.Table, name: str, *, system: bool) -> Mask:
    """Return [N] whether column `name` has conversations of at least two messages, of which the last is the assistant's
    and the first is no system message (unless `system` is true)."""
    passing = texts(table, name)
    if name not in table.column_names or _is_text(table[name].type) or not passing.any():
        return np.zeros(table.num_rows, bool)
    messages = Messages(table[name])
    passing &= messages.lengths > 1
    passing &= messages.at(-1, messages.roles) == "assistant"
    return passing if system else passing & (messages.at(0, messages.roles) != "system")


def booleans(table: pa.Table, name: str) -> Mask:
    """Return [N] whether column `name` is true, false, 0 or 1."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if name not in table.column_names:
        return np.zeros(table.num_rows, bool)
    column = table[name]
    if pa.types.is_boolean(column.type):
        return _mask(pc.is_valid(column))
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return _mask(pc.or_(pc.equal(column, 0), pc.equal(column, 1)))
    return np.zeros(table.num_rows, bool)


def finite_or_absent(table: pa.Table, name: str) -> Mask:
    """Return [N] whether column `name` is a finite number, null, or missing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if name not in table.column_names or pa.types.is_null(table[name].type):
        return np.ones(table.num_rows, bool)
    column = table[name]
    if pa.types.is_integer(column.type):
        return np.ones(table.num_rows, bool)
    if pa.types.is_floating(column.type):
        return _mask(pc.fill_null(pc.is_finite(column), True))
    return np.zeros(table.num_rows, bool)


def finite(table: pa.Table, name: str) -> Mask:
    """Return [N] whether column `name` is a finite number."""
    import pyarrow.compute as pc

    if name not in table.column_names:
        return np.zeros(table.num_rows, bool)
    return finite_or_absent(table, name) & _mask(pc.is_valid(table[name]))


class Messages:
    """Columns of chat messages as arrays, with M messages in N rows."""

    def __init__(self, column: pa.ChunkedArray):
        import pyarrow.compute as pc

        self.keys = {field.name for field in column.type.value_type}
        self.lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
        """[N] number of messages in each row."""
        self.rows = np.repeat(np.arange(len(column)), self.lengths)
        """[M] index of each message's row."""
        flat = pc.list_flatten(column)
        self.roles, self.contents = pc.struct_field(flat, "role"), pc.struct_field(flat, "content")
        self._ends = np.cumsum(self.lengths)

    def at(self, index: int, values: Any) -> npt.NDArray[np.object_]:
        """Return [N] of `roles` or `contents` for the first (0) or last (-1) message; None for rows without messages."""
        filled = self.lengths > 0
        places = (self._ends - 1 if index else self._ends - self.lengths)[filled]
        found = np.full(len(self.lengths), None, object)
        found[filled] = values.take(places).to_pylist()
        return found


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _are_plain_messages(kind: pa.DataType) -> bool:
    """Return whether a type is a list of structures with the text fields role and content."""
    import pyarrow as pa

    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
        return False
    fields = {field.name: field.type for field in kind.value_type}
    if not fields.keys().isdisjoint((*CALL_FIELDS, *REASONING_FIELDS)):
        return False  # these are checked message by message
    return all(name in fields and _is_text(fields[name]) for name in ("role", "content"))


def _mask(values: Any) -> Mask:
    import pyarrow.compute as pc

    mask: Mask = np.asarray(pc.fill_null(values, False)).astype(bool)
    return mask


def _unequal(one: npt.NDArray[np.object_], two: npt.NDArray[np.object_]) -> Mask:
    unequal: Mask = np.asarray(one != two, bool)
    return unequal


def row_check(data: DataSection, *, has_tools: bool = True) -> RowCheck:
    """Return the check that every row has a usable prompt, or the columns from which a prompt is made. With an empty
    `data.prompt_key`, rows need no prompt. NeMo RL's `input` is a prompt too. With `has_tools` the chat template gets a
    row's tools."""
    if is_made(data):
        return RowCheck(
            lambda row: check_text(prompt_of(row, data)[0], data.prompt_key),
            read_columns(data),
            lambda table: np.zeros(len(table), bool),
        )
    if not data.prompt_key:
        return RowCheck(lambda row: None, (), lambda table: np.ones(len(table), bool))

    def key(names: Mapping[str, Any]) -> str:
        return with_keys_of_row(names, data).prompt_key

    def check(row: dict[str, Any]) -> None:
        check_prompt(row, key(row))
        if has_tools:
            tools_of_prompt(row[key(row)], row)

    return RowCheck(
        check,
        (data.prompt_key, "input", "output", TOOLS_KEY),
        lambda table: (
            texts(table, key(dict.fromkeys(table.column_names)))
            & np.full(table.num_rows, not has_tools or TOOLS_KEY not in table.column_names)
        ),
    )


def check_prepared(data: DataSection) -> None:
    """Raise DataError if the rows still need `data.preparation`."""
    if data.preparation.is_used:
        raise DataError(
            "data.preparation is set, but the run was submitted without prepared rows; submit it with this version's "
            "`paceline submit` or client, which prepare them"
        )


def check_prompt(row: dict[str, Any], prompt_key: str) -> None:
    """Raise DataError if `row` has no usable prompt in column `prompt_key`."""
    if prompt_key not in row:
        raise DataError(f"data.prompt_key is {prompt_key!r}, but the columns are {sorted(row)}; set it to one of them")
    check_text(row[prompt_key], prompt_key)


def check_text(value: Any, key: str) -> None:
    """Raise DataError unless `value`, of column `key`, is non-empty text or chat messages of text."""
    if value is None or value == "":
        kind = "null" if value is None else "empty"
        raise DataError(f"column {key!r} is {kind}; give it text or chat messages, or remove the row")
    if not isinstance(value, str) and (fault := fault_of_messages(value)):
        remedy = "" if "; " in fault else "; correct or remove the row"
        raise DataError(f"column {key!r} {fault}{remedy}")


def check_columns(row: dict[str, Any], keys: tuple[str, ...]) -> None:
    """Raise DataError if `row` lacks one of the columns, or has no value in one of the columns."""
    for key in keys:
        if key not in row:
            raise DataError(f"no {key!r} in a row with the columns {sorted(row)}; name the columns in data.*_key")
        if row[key] is None or row[key] == "":
            raise DataError(f"column {key!r} is {'null' if row[key] is None else 'empty'}; fill it, or remove the row")
