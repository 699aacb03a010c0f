"""All keys of a spec with their descriptions, types and defaults, read from the section classes."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from paceline.errors import InvalidInput
from paceline.spec.run import RunSpec
from paceline.spec.sections.base import Usual

ITEM = "N"
"""Part of a dotted key in place of a list index: `rewards.N.weight`."""

_PLAIN = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null", Any: "any value"}
_BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


@dataclass(frozen=True)
class Key:
    path: str
    """Dotted name from the top of the spec, such as `policy.optimizer.lr`."""
    field: FieldInfo
    section: type[BaseModel] | None
    """Class of the section that the key opens; None for a value."""

    @property
    def description(self) -> str:
        """Docstring and usual range of the field; for a section without one, the docstring of the section's class."""
        text = self.field.description or (self.section.__doc__ if self.section else None) or ""
        usual = [
            f"Usual: {each.low:g} to {each.high:g} ({each.source})."
            for each in self.field.metadata
            if isinstance(each, Usual)
        ]
        return " ".join([*text.split(), *usual])

    @property
    def type_text(self) -> str:
        """The type in words with bounds, such as `integer > 0`."""
        if self.section is not None:
            return "list of sections" if get_origin(self.field.annotation) is tuple else "section"
        return _words(self.field.annotation, self.field.metadata)

    @property
    def default_text(self) -> str:
        """The default as YAML; "required" if there is none, empty for a section."""
        if self.field.is_required():
            return "required"
        if self.section is not None:
            return ""
        value = self.field.get_default(call_default_factory=True)
        return _yaml(list(value) if isinstance(value, tuple) else value)


@cache
def keys() -> dict[str, Key]:
    """Map the dotted name of every key to the key, sections before their keys."""
    return {key.path: key for key in _below(RunSpec, "")}


def keys_of(section: str) -> list[str]:
    """Return the last parts of the keys directly below `section` (dotted; "" is the top)."""
    prefix = f"{section}." if section else ""
    rests = (path.removeprefix(prefix) for path in keys() if path.startswith(prefix))
    return [rest for rest in rests if "." not in rest and rest != ITEM]


def dotted(location: tuple[Any, ...]) -> str:
    """Return the dotted name of a location, with ITEM in place of indices."""
    return ".".join(ITEM if isinstance(part, int) else str(part) for part in location)


def _below(model: type[BaseModel], prefix: str) -> list[Key]:
    found = []
    for name, field in model.model_fields.items():
        section = _section_of(field.annotation)
        key = Key(f"{prefix}{name}", field, section)
        found.append(key)
        if section is not None:
            item = f".{ITEM}" if get_origin(field.annotation) is tuple else ""
            found += _below(section, f"{key.path}{item}.")
    return found


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _words(annotation: Any, metadata: list[Any]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return _words(arguments[0], list(annotation.__metadata__))
    if origin in (Union, types.UnionType):
        return " or ".join(_words(each, metadata) for each in arguments)
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in arguments)
    if origin is tuple:
        if arguments[-1] is ...:
            return f"list ({_words(arguments[0], [])})"
        inner = ", ".join(dict.fromkeys(_words(each, []) for each in arguments))
        return f"{len(arguments)} values ({inner})"
    if origin is dict:
        return "mapping"
    bounds = _bounds(metadata) if annotation in (int, float) else ""
    return " ".join(filter(None, (_PLAIN.get(annotation, str(annotation)), bounds)))


def _bounds(metadata: list[Any]) -> str:
    """Return the bounds of a number: "> 0, ≤ 1". pydantic keeps bounds as objects, or together in one FieldInfo."""
    items = [part for each in metadata for part in (each.metadata if isinstance(each, FieldInfo) else [each])]
    found = [
        f"{sign} {getattr(item, name):g}"
        for item in items
        for name, sign in _BOUNDS.items()
        if getattr(item, name, None) is not None
    ]
    return ", ".join(found)


def _yaml(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return text.removesuffix("\n").removesuffix("\n...")


def with_keys(spec: RunSpec, values: Mapping[str, Any]) -> RunSpec:
    """Return the spec with other values at dotted keys. Raises InvalidInput for values that contradict the spec."""
    changed = spec
    for dotted, value in values.items():
        changed = _with_key(changed, dotted.split("."), value)
    try:
        RunSpec.model_validate(changed.model_dump())
    except ValueError as error:
        raise InvalidInput(str(error)) from error
    return changed


def _with_key(section: Any, path: list[str], value: Any) -> Any:
    name, *below = path
    return section.model_copy(update={name: _with_key(getattr(section, name), below, value) if below else value})
