"""Loader of the function that a spec names: a built-in, or `path/to/file.py:function`.

Every fault of a function is reported before the first group is scored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import InvalidInput
from paceline.user_code.loading import load_from_file, nearest

RewardFunction = Callable[..., Any]
"""`f(prompts, completions, completion_ids=..., **columns) -> list[float | None]`, plain or async."""


def load_function(function: str, kwargs: Mapping[str, Any] | None = None) -> RewardFunction:
    """Return the function that `function` names, checked to take `kwargs`.

    Raises InvalidInput: unknown built-in (with the nearest name), a file that fails to import (with its error), no such
    function in it, something that cannot be called, kwargs that the function does not have; Unreadable: no such file, or
    one that it imports.
    Runs the user's module: call it only in a process that may run their code.
    """
    path, colon, name = function.rpartition(":")
    loaded: RewardFunction = (
        load_from_file(Path(path), name, "reward function") if colon else _builtin(function)
    )
    if not colon and function in _settings():
        _settings()[function](dict(kwargs or {})).check_host()
    else:
        _check_kwargs(function, loaded, dict(kwargs or {}), takes_columns_only=not colon)
    return loaded


def _builtin(name: str) -> RewardFunction:
    from paceline.reward.builtin import BUILTIN_FUNCTIONS

    if name in BUILTIN_FUNCTIONS:
        return BUILTIN_FUNCTIONS[name]
    raise InvalidInput(
        f"reward function {name!r} is not built in{nearest(name, BUILTIN_FUNCTIONS)}; built in are "
        f"{', '.join(sorted(BUILTIN_FUNCTIONS))}; your own is named path/to/file.py:function"
    )


def _settings() -> Mapping[str, Callable[[object], Any]]:
    from paceline.reward.builtin import SETTINGS

    return SETTINGS


def _check_kwargs(
    function: str, loaded: RewardFunction, kwargs: dict[str, Any], takes_columns_only: bool
) -> None:
    """Check that the function takes `kwargs`. With `takes_columns_only` its `**` is for columns, as of a built-in, so a
    misspelt setting is refused."""
    try:
        parameters = inspect.signature(loaded).parameters
    except (TypeError, ValueError):  # a callable written in C has no signature
        return
    settings = [n for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    catches_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if takes_columns_only:
        settings = [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
        for name in settings:
            if parameters[name].default is inspect.Parameter.empty and name not in kwargs:
                raise InvalidInput(f"reward function {function!r} needs {name!r} in its kwargs")
    if takes_columns_only or not catches_all:
        for name in kwargs:
            if name not in settings:
                raise InvalidInput(
                    f"reward function {function!r} takes no {name!r}{nearest(name, settings)}; "
                    f"its kwargs are {', '.join(settings) or 'none'}"
                )
