"""Definitions and choices of tools are checked before they are rendered."""

from typing import Any

import pytest

from paceline.chat.messages import Unsupported
from paceline.services.openai.requests import (
    AUTO,
    MAX_TOOLS,
    NONE,
    REQUIRED,
    ToolChoice,
    read_choice,
    read_tools,
)


def tool(name: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def test_definitions_are_taken_as_they_are() -> None:
    tools = [
        tool("add", description="Adds.", parameters={"type": "object"}, strict=True),
        tool("now", parameters=None),
    ]
    assert read_tools(tools) == tools
    assert read_tools(None) == []


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([{"type": "web_search"}], "not a function"),
        ([{"type": "function"}], "not a function"),
        ([tool(1)], "the invalid name 1"),
        ([tool("a b")], "the invalid name 'a b'"),
        ([tool("a"), tool("a")], "two functions"),
        ([tool("a", parameters=[])], "not a JSON schema"),
        ([tool(f"f{i}") for i in range(MAX_TOOLS + 1)], f"at most {MAX_TOOLS}"),
    ],
)
def test_other_definitions_are_refused(tools: Any, words: str) -> None:
    with pytest.raises(Unsupported, match=words) as refused:
        read_tools(tools)
    assert refused.value.field == "tools"


def test_a_choice_needs_tools_and_names_one_of_them() -> None:
    tools = [tool("add")]
    assert read_choice(None, tools) == read_choice("auto", tools) == AUTO
    assert read_choice(None, []) == read_choice("auto", []) == read_choice("none", tools) == NONE
    assert read_choice("required", tools) == REQUIRED
    assert read_choice({"type": "function", "function": {"name": "add"}}, tools) == ToolChoice("function", "add")
    assert read_choice({"type": "function", "name": "add"}, tools) == ToolChoice("function", "add")
    for choice, given in (
        ("required", []),
        ("any", tools),
        ({"type": "function", "function": {"name": "sub"}}, tools),
        ({"type": "function", "name": ["add"]}, tools),
        ({"type": "custom"}, tools),
        (1, tools),
        ([], tools),
    ):
        with pytest.raises(Unsupported) as refused:
            read_choice(choice, given)
        assert refused.value.field == "tool_choice"
