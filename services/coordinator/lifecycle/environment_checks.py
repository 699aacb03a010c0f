"""Checks of a submitted run's environment against its data set and its files, for faults that every episode would have. A check
that needs a file which is not on this machine passes; user code is parsed, not run.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Collection
from pathlib import Path

from paceline.data.prompts import PromptSource
from paceline.errors import DataError, InvalidInput
from paceline.services.coordinator.lifecycle import source_files
from paceline.spec import RunSpec

NAME_COLUMN = "environment"
"""Column that names the class of a row, where the spec has several."""

PROMPT = "prompt"
"""Name by which user code gets the prompt, beside the columns."""

PLACEHOLDER = re.compile(r"\{(\w+)\}")


def check_environment(spec: RunSpec, field: str, source: PromptSource) -> None:
    """Check the run's environment with one of its data sets, named `field`. Raises InvalidInput, DataError."""
    section = spec.environment
    if not section.is_used:
        return
    columns = [PROMPT, *source.columns]
    if section.class_:
        _check_names(section.classes, field, source)
        has_names = "" not in section.classes
        for name, code in section.classes.items():
            key = f"environment.class.{name}" if name else "environment.class"
            definition = _defined(key, code, "class")
            _check_reset(key, definition, field, [c for c in columns if not has_names or c != NAME_COLUMN])
    for index, tool in enumerate(section.tools):
        _defined(f"environment.tools.{index}", tool, "function")
    if section.agent:
        _defined("environment.agent", section.agent, "function")
    if section.train_call:
        _defined("environment.train_call", section.train_call, "function")
    for name in (name for argument in section.command for name in PLACEHOLDER.findall(argument)):
        if name not in columns:
            raise DataError(
                f"environment.command names {{{name}}}, which is no column of {field}; it has {', '.join(columns)}"
            )


def _check_names(names: Collection[str], field: str, source: PromptSource) -> None:
    """Check that the data set names the classes of a mapping, as its first row does."""
    if "" in names:
        return
    listed = ", ".join(map(repr, names))
    if NAME_COLUMN not in source.columns:
        raise DataError(
            f"environment.class maps the names {listed} to classes, but {field} has no column {NAME_COLUMN!r} that names one "
            f"in each row; its columns besides the prompt are: {', '.join(source.columns) or 'none'}"
        )
    value = source.draw(0)[1].get(NAME_COLUMN)
    if value not in names:
        raise DataError(
            f"the column {NAME_COLUMN!r} of {field} has {value!r:.60}, which environment.class does not have; it has {listed}"
        )


def _defined(key: str, code: str, kind: str) -> source_files.Definition | None:
    """Return the definition of `file:name`, as far as that is known here. Raises InvalidInput where there is none."""
    path, colon, name = code.rpartition(":")
    if not colon or not path or not name.isidentifier():
        raise InvalidInput(
            f"{key} is {code!r:.80}; write it as path/to/file.py:name, with the name of a {kind}"
        )
    module = source_files.parsed(Path(path).expanduser())
    names = None if module is None else source_files.names_of(module)
    if module is None or names is None:
        return None
    if name not in names:
        nearest = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise InvalidInput(f"{key}: {path} has no {kind} {name!r}{hint}")
    return source_files.definition(module.body, name)


def _check_reset(
    key: str, definition: source_files.Definition | None, field: str, columns: Collection[str]
) -> None:
    """Raises DataError for a `reset` that needs a column which the data set does not have."""
    if not isinstance(definition, ast.ClassDef):
        return
    reset = source_files.definition(definition.body, "reset")
    if reset is None or isinstance(reset, ast.ClassDef):
        return
    missing = [name for name in source_files.required(reset)[1:] if name not in columns]
    if missing:
        raise DataError(
            f"{key}: `reset` of {definition.name} needs the column {missing[0]!r}, but it gets {', '.join(columns)} of {field}; "
            "give the argument a default, or add the column"
        )
