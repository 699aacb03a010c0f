"""A spec with other values at some of its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import InvalidInput
from paceline.spec import RunSpec


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
    return section.model_copy(
        update={name: _with_key(getattr(section, name), below, value) if below else value}
    )
