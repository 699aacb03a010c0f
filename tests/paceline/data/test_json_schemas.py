"""Types that schemas allow; the values of arguments are in `tests/paceline/chat/test_call_formats.py`."""

from typing import Any

import pytest

from paceline.data.json_schemas import parameters_of, property_of, types_of

BOTH = {"allOf": [{"properties": {"a": {"type": "string"}}}, {"properties": {"b": {"type": "null"}}}]}
ROOT = {"$defs": {"a/b": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}, "both": BOTH}}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"type": "integer", "nullable": True}, {"integer", "null"}),
        ({"$ref": "#/$defs/a~1b"}, {"integer"}),
        ({"$ref": "#/$defs/both"}, {"object"}),
        ({"enum": [1, "a", None, 2.5, [], {}, True]}, {"integer", "string", "null", "number", "array", "object", "boolean"}),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"const": 1}, {"type": "null"}]}]}, {"string", "integer", "null"}),
        ({"anyOf": [{"type": "string"}, {}]}, None),
        ({"$ref": "#/$defs/loop"}, None),
        ({"$ref": "#/nowhere"}, None),
        ({"$ref": 7}, None),
        ({"type": {}}, None),
        ({"type": []}, set()),
        ({}, None),
        (True, None),
        (None, None),
    ],
)  # fmt: skip
def test_types_of_a_schema(schema: Any, types: set[str] | None) -> None:
    assert types_of(schema, ROOT) == types


def test_parameters_and_their_properties_are_found() -> None:
    tools: list[Any] = [{"name": "f", "parameters": BOTH}, {"function": {"name": "g"}}]
    assert parameters_of("f", tools) == BOTH
    assert parameters_of("g", tools) == parameters_of("h", tools) == {}
    assert property_of(BOTH, BOTH, "a") == [{"type": "string"}]
    assert property_of(BOTH, BOTH, "b") == [{"type": "null"}]
    assert property_of(BOTH, BOTH, "c") == []
    assert property_of({"anyOf": [BOTH, BOTH]}, {}, "a") == [{"type": "string"}] * 2


@pytest.mark.parametrize("key", ["anyOf", "oneOf", "allOf"])
def test_a_schema_that_multiplies_itself_is_read_up_to_a_limit(key: str) -> None:
    step = {key: [{"$ref": "#"}] * 9}
    assert types_of(step, step) is None
    links = {f"d{i}": {key: [{"$ref": f"#/$defs/d{i + 1}"}] * 9} for i in range(40)}
    assert types_of({"$ref": "#/$defs/d0"}, {"$defs": links}) is None
