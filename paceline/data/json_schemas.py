"""Finds the types of a value in a JSON schema of tool parameters: `type` (a name or a list), `enum`, `const`,
`nullable`, `$ref` within the schema, `anyOf`, `oneOf` and `allOf`. Other keywords are ignored.

The types show which nulls a file format added to the arguments of tool calls. A column of a table (Parquet, Arrow)
holds objects of one shape: if one call has `city` and another one `zip`, each gets both, one of them null. A JSON file
written from a table has such nulls too. A null was certainly added by the file format if the tool's definition has no
such parameter, or if the parameter cannot be null. A null certainly belongs to the call if the parameter is required
and can be null. Any other null is removed from rows of tables and kept in rows of JSON files, each with one warning.
Arguments as JSON text have no added nulls.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.data.messages import TOOLS_KEY, tools_of
from paceline.errors import DataError

Json = dict[str, Any]

MAX_DEPTH = 16
"""Largest depth of references and combinations; a recursive schema has no end."""
MAX_SCHEMAS, MAX_ALTERNATIVES = 500, 64
"""Largest number of schemas read within one schema, and of alternatives kept: references can multiply both."""
COMBINING = ("$ref", "anyOf", "oneOf", "allOf")

TYPE_NAMES = {
    "str": "string",
    "text": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
    "none": "null",
} | {name: name for name in ("string", "integer", "number", "boolean", "object", "array", "null")}
"""Maps a type's name in JSON or in Python to its name in JSON, because definitions of tools use either."""


def parameters_of(name: str, tools: Sequence[Any]) -> Json:
    """Return the schema of a function's parameters; empty if none is declared."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, dict) else {}
    return {}


def alternatives(schema: Any, root: Any) -> list[Json]:
    """Return the schemas without references and combinations; a value must fit one of them. A schema without keywords,
    or beyond the limits, allows everything. References begin at `root`."""
    return _Reader(root).alternatives(schema, 0)


@dataclass
class _Reader:
    root: Any
    num_read: int = 0

    def alternatives(self, schema: Any, depth: int) -> list[Json]:
        self.num_read += 1
        if not isinstance(schema, dict) or depth > MAX_DEPTH or self.num_read > MAX_SCHEMAS:
            return [{}]
        groups = [self._of_each([each], depth) for each in _list(schema, "allOf")]
        groups += [self._of_each(_list(schema, key), depth) for key in ("anyOf", "oneOf") if _list(schema, key)]
        if "$ref" in schema:
            groups.append(self._of_each([_target(schema["$ref"], self.root)], depth))
        made = [{key: value for key, value in schema.items() if key not in COMBINING}]
        for group in groups:
            made = [_merged(one, other) for one in made for other in group][:MAX_ALTERNATIVES]
        return made

    def _of_each(self, schemas: list[Any], depth: int) -> list[Json]:
        return [found for schema in schemas for found in self.alternatives(schema, depth + 1)]


def types_of(schema: Any, root: Any) -> frozenset[str] | None:
    """Return the names of the types that a value may have; None for any."""
    found: set[str] = set()
    for each in alternatives(schema, root):
        types = _types(each)
        if types is None:
            return None
        found |= types
    return frozenset(found)


def property_of(schema: Any, root: Any, name: str) -> list[Any]:
    """Return the schemas of a property, one from each alternative that declares the property."""
    properties = [each.get("properties") for each in alternatives(schema, root)]
    return [each[name] for each in properties if isinstance(each, dict) and name in each]


def type_of(value: Any) -> str:
    """Return the name of a value's type; `integer` for a whole number."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    names = {str: "string", int: "integer", dict: "object", list: "array", type(None): "null"}
    return names.get(type(value), "")


def fits(value: Any, types: frozenset[str]) -> bool:
    """Return whether a value has one of the types."""
    name = type_of(value)
    return name in types or (name == "integer" and "number" in types)


def _types(schema: Json) -> set[str] | None:
    values = _list(schema, "enum") if "enum" in schema else [schema["const"]] if "const" in schema else None
    named = schema.get("type")
    if values is not None:
        types = {type_of(value) for value in values}
    elif named is not None:
        names = [TYPE_NAMES.get(str(name).lower(), "") for name in (named if isinstance(named, list) else [named])]
        if "" in names:
            return None
        types = set(names)
    elif schema.keys() & {"properties", "additionalProperties"}:
        types = {"object"}
    elif schema.keys() & {"items", "prefixItems"}:
        types = {"array"}
    else:
        return None
    return types | ({"null"} if schema.get("nullable") is True else set())


def _list(schema: Json, key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _merged(one: Json, other: Json) -> Json:
    merged = {**one, **other}
    if isinstance(one.get("properties"), dict) and isinstance(other.get("properties"), dict):
        merged["properties"] = {**one["properties"], **other["properties"]}
    return merged


def _target(reference: Any, root: Any) -> Any:
    """Return the schema at `#/a/b`, a JSON pointer (RFC 6901); None for another reference."""
    found = root
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for key in reference[1:].split("/")[1:]:
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


log = logging.getLogger(__name__)


def without_added_nulls(row: Json, *, is_table: bool) -> Json:
    """Return the row without the nulls that a file format added to arguments of tool calls."""
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
    """Return a value without the nulls that its schema shows to be added. `schema`: None if unknown."""
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


_warned: set[bool] = set()
"""Contains True once the warning was logged for rows of tables, and False once for other rows."""


def _warn(key: str, is_table: bool) -> None:
    if is_table not in _warned:
        _warned.add(is_table)
        log.warning(
            "the argument %r of a tool call of the data set is null and is %s, because the null can be from the call "
            "or from the file format; write arguments as JSON text, or define the parameter in a column 'tools'",
            key,
            "left out" if is_table else "kept",
        )
