"""Nulls that a file format put into the arguments of tool calls.

A column of a table (Parquet, Arrow) holds objects of one shape: where one call has `city` and another one `zip`, each gets both, one
of them null. A JSON file that was written from a table has these nulls too. A null is known to be added where the definition of the
tool has no such parameter, or one that cannot be null, and known to be meant where the parameter is required and can be null. Any
other null is left out of rows of tables, and stays in rows of JSON files; both are said once. Arguments as JSON text have no added
nulls.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from paceline.data.json_schemas import Json, alternatives, parameters_of, property_of, types_of
from paceline.data.messages import TOOLS_KEY, tools_of
from paceline.errors import DataError

log = logging.getLogger(__name__)


def without_added_nulls(row: Json, *, is_table: bool) -> Json:
    """Return a row whose tool calls have no added nulls."""
    if not any(_may_call(value) for value in row.values()):
        return row
    try:
        tools = tools_of(row) or []
    except DataError:  # the check of rows reports it
        tools = []
    return {
        name: _walk(value, tools, is_table) if name != TOOLS_KEY and _may_call(value) else value
        for name, value in row.items()
    }


def _may_call(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _walk(value: Any, tools: list[Any], is_table: bool) -> Any:
    if isinstance(value, list):
        return [_walk(each, tools, is_table) for each in value]
    if not isinstance(value, dict):
        return value
    changed = {key: _walk(item, tools, is_table) for key, item in value.items()}
    for key in ("arguments", "parameters"):
        if isinstance(value.get("name"), str) and isinstance(value.get(key), dict):
            schema = parameters_of(value["name"], tools)
            changed[key] = _clean(value[key], schema or None, schema, is_table)
    return changed


def _clean(value: Any, schema: Any, root: Json, is_table: bool) -> Any:
    """Return a value of the schema without added nulls; None as the schema says that nothing is known."""
    if isinstance(value, list):
        items = [each["items"] for each in alternatives(schema, root) if "items" in each]
        return [_clean(each, {"anyOf": items} if items else None, root, is_table) for each in value]
    if not isinstance(value, dict):
        return value
    cleaned = {}
    for key, item in value.items():
        declared = property_of(schema, root, key)
        if item is None and not _is_meant(key, declared, schema, root, is_table):
            continue
        cleaned[key] = _clean(item, {"anyOf": declared} if declared else None, root, is_table)
    return cleaned


def _is_meant(key: str, declared: list[Any], schema: Any, root: Json, is_table: bool) -> bool:
    ways = alternatives(schema, root)
    if not declared and any("properties" in way for way in ways):
        if not any(way.get("additionalProperties") for way in ways):
            return False
    elif declared:
        types = types_of({"anyOf": declared}, root)
        if types is not None and "null" not in types:
            return False
        if all(key in (way.get("required") or ()) for way in ways):
            return True
    _warn(key, is_table)
    return not is_table


@functools.cache
def _warn_once(is_table: bool) -> list[str]:
    return []


def _warn(key: str, is_table: bool) -> None:
    said = _warn_once(is_table)
    if not said:
        said.append(key)
        log.warning(
            "a tool call of the data set has the argument %r with null, and it cannot be known whether the call has it or the file "
            "format added it, so it is %s; write arguments as JSON text, or define the parameter in a column 'tools'",
            key,
            "left out" if is_table else "kept",
        )
