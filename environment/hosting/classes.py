"""Loads a user's environment class and tools, and finds out what they offer, in the process of the user code.

Two contracts are supported. A class of TRL's contract has `reset(**columns)`, public methods as tools, and
`get_reward()`. A class of the other contract has `step(text) -> (observation, reward, done)`: the parameter of `step`
is called `text` or `action`, and `step` is not annotated to return text, because a class of TRL may have a tool called
`step`.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import InvalidInput, nearest
from paceline.user_code.loading import load_from_file

RESERVED = ("reset", "get_reward", "save", "load")
STEP_PARAMETERS = ("text", "action")


class ClassFacts(NamedTuple):
    tools: list[dict[str, Any]]
    """Schemas of the tools in OpenAI's format; empty for a class with `step`."""
    steps: bool
    """True if the class has `step` and therefore no tools."""
    deterministic: bool
    saves: bool
    """True if the class has `save` and `load`."""
    rewards: bool
    """True if the class has `get_reward`."""
    asynchronous: list[str]
    """Methods that are coroutine functions."""


def load_class(named: str) -> type:
    """Return the class of `path/to/file.py:Class`. Raises InvalidInput, Unreadable. Runs the user's module."""
    path, _, name = named.rpartition(":")
    loaded = load_from_file(Path(path), name, "environment class")
    if not isinstance(loaded, type):
        raise InvalidInput(
            f"environment.class: {name!r} in {path} is {type(loaded).__name__}, not a class; name a class, or "
            "use environment.agent for a function"
        )
    reset = getattr(loaded, "reset", None)
    if not callable(reset):
        methods = [key for key in vars(loaded) if not key.startswith("_")]
        raise InvalidInput(
            f"environment.class: {name!r} in {path} has no method 'reset'{nearest('reset', methods)}; add a method "
            "`reset` that begins an episode and gets the columns of the row"
        )
    return loaded


class NoEnvironment:
    """The environment of a run that has only tools."""

    def reset(self, **columns: Any) -> None:
        """Begin an episode."""


def load_tools(named: Sequence[str], facts: Iterable[ClassFacts]) -> dict[str, Callable[..., Any]]:
    """Return the functions by name. Raises Unreadable and InvalidInput; InvalidInput also if the name of a tool is
    taken."""
    tools: dict[str, Callable[..., Any]] = {}
    taken = {tool["function"]["name"] for each in facts for tool in each.tools}
    for index, each in enumerate(named):
        function = load_function(each, f"environment.tools.{index}", "tool")
        if (name := function.__name__) in taken:
            raise InvalidInput(f"environment.tools.{index}: there are two tools called {name!r}; rename one")
        taken.add(name)
        tools[name] = function
    return tools


def load_function(named: str, field: str, kind: str) -> Callable[..., Any]:
    """Return the function of `path/to/file.py:function`. Raises InvalidInput, Unreadable. Runs the user's module."""
    path, colon, name = named.rpartition(":")
    if not colon:
        raise InvalidInput(f"{field} is {named!r}; name a function as path/to/file.py:function")
    loaded: Callable[..., Any] = load_from_file(Path(path), name, kind)
    return loaded


def facts_of(cls: type) -> ClassFacts:
    """Return the properties of a class. Raises InvalidInput for a tool without a schema."""
    methods = dict(inspect.getmembers(cls, inspect.isfunction))
    steps = _steps(methods.get("step"))
    tools = [] if steps else [name for name in methods if name not in RESERVED and not name.startswith("_")]
    return ClassFacts(
        # Bound to any object, because the class may not be constructed before its first episode.
        tools=[
            schema_of(
                types.MethodType(methods[name], object()), f"environment.class: the tool {name!r} of {cls.__name__}"
            )
            for name in tools
        ],
        steps=steps,
        deterministic=bool(getattr(cls, "deterministic", False)),
        saves="save" in methods and "load" in methods,
        rewards="get_reward" in methods,
        asynchronous=sorted(name for name, method in methods.items() if inspect.iscoroutinefunction(method)),
    )


def _steps(step: Callable[..., Any] | None) -> bool:
    if step is None:
        return False
    signature = inspect.signature(step)
    parameters = list(signature.parameters)[1:2]
    return bool(parameters) and parameters[0] in STEP_PARAMETERS and signature.return_annotation not in (str, "str")


def schema_of(tool: Callable[..., Any], what: str) -> dict[str, Any]:
    """Return the schema of a function or bound method. Raises InvalidInput with a message that begins with `what`."""
    from transformers.utils import chat_template_utils

    try:
        with _without_torch(chat_template_utils):
            schema: dict[str, Any] = chat_template_utils.get_json_schema(tool)
    except Exception as error:  # from transformers or from evaluating an annotation
        raise InvalidInput(
            f"{what} has no schema: {error}; give it type hints and a docstring with an Args section, or begin its name with "
            "an underscore if it is not a tool"
        ) from None
    return schema


@contextlib.contextmanager
def _without_torch(module: Any) -> Iterator[None]:
    """Let schemas be made without torch, unless user code has imported it: importing torch takes seconds and hundreds
    of MB."""
    available = module.is_torch_available
    if "torch" not in sys.modules:
        module.is_torch_available = lambda: False
    try:
        yield
    finally:
        module.is_torch_available = available
