"""Checks of single rows that many forms share. Each raises DataError with the column, the value and a remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.data.column_names import with_keys_of_row
from paceline.data.column_scan import RowCheck, texts
from paceline.data.messages import TOOLS_KEY, fault_of_messages, tools_of_prompt
from paceline.data.row_prompts import is_made, prompt_of, read_columns
from paceline.errors import DataError
from paceline.spec import DataSection


def row_check(data: DataSection, *, has_tools: bool = True) -> RowCheck:
    """Return the check that every row has a usable prompt, or what makes one; an empty `data.prompt_key` is that of rows without
    prompts. NeMo RL's `input` is a prompt too. With `has_tools` the chat template gets the tools of a row."""
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
    """Raises DataError for data that still have to be prepared."""
    if data.preparation.is_used:
        raise DataError(
            "data.preparation is set, but the run came without prepared rows; submit it with this version's `paceline submit` or "
            "client, which prepare them"
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
        remedy = "" if "; " in fault else "; correct or remove the row"
        raise DataError(f"column {key!r} {fault}{remedy}")


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
