"""`tools` and `tool_choice` of a request: the definitions that the template gets, and which calls the model may make."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.chat.messages import Json, Unsupported

MAX_TOOLS = 512
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class Choice(NamedTuple):
    """What `tool_choice` allows."""

    kind: str
    """`auto`, `none` (no tools in the prompt, no calls in the answer), `required` (at least one call) or `function` (a call of
    `name`)."""
    name: str = ""


AUTO, NONE, REQUIRED = Choice("auto"), Choice("none"), Choice("required")


def read_tools(tools: Sequence[Json] | None) -> list[Json]:
    """Return the definitions in the API's form, `{"type": "function", "function": {...}}`, as templates take them.

    Raises Unsupported for another type of tool, a missing or repeated name, or parameters that are no object.
    """
    if tools is not None and len(tools) > MAX_TOOLS:
        raise Unsupported(f"tools has {len(tools)} entries, at most {MAX_TOOLS} are possible", "tools")
    seen: set[str] = set()
    for tool in tools or ():
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise Unsupported(f"tools has one that is no function: {tool!r:.80}", "tools")
        name = function.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise Unsupported(f"tools has a function with the name {name!r:.80}", "tools")
        if name in seen:
            raise Unsupported(f"tools has two functions with the name {name!r}; rename one", "tools")
        if not isinstance(function.get("parameters", {}), dict | None):
            raise Unsupported(f"tools has a function {name!r} whose parameters are no JSON schema", "tools")
        seen.add(name)
    return list(tools or ())


def read_choice(choice: Any, tools: Sequence[Json]) -> Choice:
    """Return what `tool_choice` allows. Raises Unsupported for an unknown value or a function that `tools` does not have."""
    if choice is None:
        return AUTO if tools else NONE
    if choice in ("auto", "none"):
        return Choice(choice) if tools else NONE
    if not tools:
        raise Unsupported(f"tool_choice is {choice!r:.80}, but the request has no tools", "tool_choice")
    if choice == "required":
        return REQUIRED
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else choice.get("name")
        if name not in (tool["function"]["name"] for tool in tools):
            raise Unsupported(
                f"tool_choice names the function {name!r:.80}, which tools does not have", "tool_choice"
            )
        return Choice("function", str(name))
    raise Unsupported(
        f"tool_choice is {choice!r:.80}; it can be 'auto', 'none', 'required' or a function", "tool_choice"
    )
