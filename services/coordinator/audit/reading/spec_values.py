"""RecordsService.GetSpec and CompareSpecs: the values of resolved specs, what differs from the defaults and from another run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from paceline.spec import RunSpec
from paceline.spec.keys import dotted, keys
from paceline.spec.reading import spec_to_yaml
from paceline.v1 import records_pb2 as pb

Location = tuple[str | int, ...]


def get_spec(spec: RunSpec) -> pb.GetSpecResponse:
    """Return a spec with its values by key."""
    response, known = pb.GetSpecResponse(spec_yaml=spec_to_yaml(spec)), keys()
    for location, value in values(spec):
        key = known.get(dotted(location))
        default = key.default_text if key is not None else ""
        response.keys.add(
            path=".".join(map(str, location)),
            value_json=json.dumps(value),
            default=default,
            differs=not _is_default(value, default),
            description=key.description if key is not None else "",
            type=key.type_text if key is not None else "",
        )
    return response


def compare_specs(spec: RunSpec, other: RunSpec) -> pb.CompareSpecsResponse:
    """Return the values that differ."""
    ours, theirs = dict(values(spec)), dict(values(other))
    response = pb.CompareSpecsResponse()
    for location in dict.fromkeys([*ours, *theirs]):
        if location in ours and location in theirs and ours[location] == theirs[location]:
            continue
        response.differences.add(
            path=".".join(map(str, location)),
            value_json=json.dumps(ours[location]) if location in ours else "",
            other_json=json.dumps(theirs[location]) if location in theirs else "",
        )
    return response


def values(spec: RunSpec) -> Iterator[tuple[Location, Any]]:
    """Yield every value of a spec with its location: a section's keys one by one, all else whole."""
    yield from _below(spec.model_dump(mode="json"), ())


def _below(tree: Any, location: Location) -> Iterator[tuple[Location, Any]]:
    key = keys().get(dotted(location)) if location else None
    is_section = (
        not location or isinstance(location[-1], int) or (key is not None and key.section is not None)
    )
    if isinstance(tree, dict) and is_section:
        for name, value in tree.items():
            yield from _below(value, (*location, name))
    elif isinstance(tree, list) and key is not None and key.section is not None:
        for index, value in enumerate(tree):
            yield from _below(value, (*location, index))
    else:
        yield location, tree


def _is_default(value: Any, default: str) -> bool:
    if default == "required":
        return False
    try:
        return bool(yaml.safe_load(default) == value)
    except yaml.YAMLError:
        return False
