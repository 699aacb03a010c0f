"""Nulls that a table added to the arguments of calls are left out, and those that a call has stay."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from paceline.data.example_rows import read_demonstration
from paceline.data.json_schemas import without_added_nulls
from paceline.data.rows import open_rows
from paceline.spec import DataSection

USER = {"role": "user", "content": "?"}


def tool(properties: Any, name: str = "f", **keys: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties, **keys}}}


def row_of(arguments: Any, tools: Any = None) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}], "tools": tools}


TEXT, MAYBE = {"type": "string"}, {"type": ["string", "null"]}
NESTED = {"at": {"properties": {"city": TEXT, "zip": MAYBE}, "required": ["city", "zip"]}}


@pytest.mark.parametrize(
    ("tools", "arguments", "of_table", "of_json"),
    [
        (None, {"a": "x", "b": None}, {"a": "x"}, {"a": "x", "b": None}),
        (None, {"a": {"b": None, "c": 1}}, {"a": {"c": 1}}, {"a": {"b": None, "c": 1}}),
        (None, {"a": [None, {"b": None}]}, {"a": [None, {}]}, {"a": [None, {"b": None}]}),
        (None, {"a": "x"}, {"a": "x"}, {"a": "x"}),
        ([tool({"a": TEXT})], {"a": "x", "b": None}, {"a": "x"}, {"a": "x"}),
        ([tool({"a": TEXT})], {"a": None}, {}, {}),
        ([tool({"a": TEXT}, required=["a"])], {"a": None}, {}, {}),
        ([tool({"a": MAYBE}, required=["a"])], {"a": None}, {"a": None}, {"a": None}),
        ([tool({"a": MAYBE})], {"a": None}, {}, {"a": None}),
        ([tool({"a": {"anyOf": [TEXT, {"type": "null"}]}}, required=["a"])], {"a": None}, {"a": None}, {"a": None}),
        ([tool({"a": {"$ref": "#/$defs/T"}}, **{"$defs": {"T": TEXT}})], {"a": None}, {}, {}),
        ([tool({"a": {"enum": ["x", None]}}, required=["a"])], {"a": None}, {"a": None}, {"a": None}),
        ([tool({"a": {}})], {"a": None}, {}, {"a": None}),
        ([tool({}, additionalProperties=True)], {"a": None}, {}, {"a": None}),
        ([tool({})], {"a": None}, {}, {}),
        ([tool({"b": TEXT}, "g")], {"b": None}, {}, {"b": None}),
        ([tool(NESTED)], {"at": {"city": "x", "zip": None, "no": None}}, {"at": {"city": "x", "zip": None}}, {"at": {"city": "x", "zip": None}}),
        ([tool({"all": {"items": NESTED["at"]}})], {"all": [{"city": None, "zip": None}]}, {"all": [{"zip": None}]}, {"all": [{"zip": None}]}),
        (json.dumps([tool({"a": TEXT})]), {"a": "x", "b": None}, {"a": "x"}, {"a": "x"}),
        ("no tools", {"a": None}, {}, {"a": None}),
    ],
)  # fmt: skip
def test_a_null_is_left_out_unless_the_call_has_it(tools: Any, arguments: Any, of_table: Any, of_json: Any) -> None:
    for is_table, expected in ((True, of_table), (False, of_json)):
        row = row_of(arguments, tools)
        read = without_added_nulls(row, is_table=is_table)
        assert read == {**row_of(expected), "tools": tools}
        bare = {"prompt": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}]}
        read = without_added_nulls({**bare, "tools": tools}, is_table=is_table)
        assert read["prompt"][0]["tool_calls"] == [{"name": "f", "arguments": expected}]


def test_text_and_other_columns_stay_as_they_are() -> None:
    row = {**row_of('{"a": null}'), "extra": {"name": "f", "arguments": {"a": None}}, "answer": None}
    assert without_added_nulls(row, is_table=True) == row


def test_definitions_of_tools_are_no_calls(caplog: pytest.LogCaptureFixture) -> None:
    """A table gives the properties of each tool those of all others; `tools_of` reads them."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": None}}
    row = {**row_of({"a": "x", "b": None}), "tools": [{"function": {"name": "f", "parameters": schema}}]}
    with caplog.at_level(logging.WARNING):
        assert without_added_nulls(row, is_table=True) == {**row_of({"a": "x"}), "tools": row["tools"]}
    assert not caplog.records


def test_a_table_of_calls_is_read_as_it_was_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """huggingface/trl#3926, modelscope/ms-swift#6467: two tools in one column of structures."""
    import datasets

    city, code = {"city": "Rome"}, {"zip": "00100", "deep": True}
    rows = [
        {"messages": [USER, {**USER, "role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": each}}]}]}
        for name, each in (("weather", city), ("post", code))
    ]  # fmt: skip
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    with caplog.at_level(logging.WARNING):
        read = [
            read_demonstration(row, DataSection(train="x", messages_key="messages"))
            for row in map(open_rows(str(path), "").__getitem__, range(2))
        ]
    assert [each.prompt for each in read] == [[USER], [USER]]
    assert [each.completion[0]["tool_calls"] for each in read] == [
        [{"function": {"name": "weather", "arguments": city}}],
        [{"function": {"name": "post", "arguments": code}}],
    ]


def test_calls_of_a_table_are_checked_one_by_one(tmp_path: Path) -> None:
    import datasets

    from paceline.data.examples import check_example
    from paceline.errors import DataError
    from paceline.spec import RunSpec

    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list([row_of("{}"), row_of("{"), row_of("{}")]).to_parquet(str(path))
    data = {"train": "x", "messages_key": "messages"}
    spec = RunSpec.model_validate({"algorithm": "sft", "policy": {"model_name": "m"}, "data": data})
    with pytest.raises(DataError, match=r"row 1: column 'messages' has a message 1 .* arguments are no JSON"):
        open_rows(str(path), "", check=check_example(spec))


def test_values_that_a_table_keeps_as_json_have_their_own_nulls(tmp_path: Path) -> None:
    """huggingface/trl#5376: `datasets` has a type for JSON."""
    import datasets

    from paceline.data.examples import check_example
    from paceline.spec import RunSpec

    row = {"messages": row_of({"a": None, "b": 1})["messages"]}
    features = datasets.Features({"messages": datasets.List(datasets.Json())})
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list([row, row], features=features).to_parquet(str(path))
    data = {"train": "x", "messages_key": "messages"}
    spec = RunSpec.model_validate({"algorithm": "sft", "policy": {"model_name": "m"}, "data": data})
    rows = open_rows(str(path), "", check=check_example(spec))
    assert [rows[0], rows[1]] == [row, row]
