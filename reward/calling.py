"""Loads a spec's function, a built-in or `path/to/file.py:function`, calls it on a group and checks the result.

Promise: the result is a list of C finite numbers or None, or an exception with a message about the function. Faults
that the function's file shows are reported before the first group is scored.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.reward.builtin.inputs import MissingColumn
from paceline.reward.trainer_view import CallView
from paceline.user_code.loading import accepted_arguments, load_from_file

RewardFunction = Callable[..., Any]
"""`f(prompts, completions, completion_ids=..., **columns) -> list[float | None]`, plain or async."""


def load_function(function: str, kwargs: Mapping[str, Any] | None = None) -> RewardFunction:
    """Return the function that `function` names, after checking that it takes `kwargs`.

    Raises InvalidInput for an unknown built-in (with the nearest name), a file that fails to import (with its error), a
    file without the function, an object that cannot be called, or kwargs that the function does not take. Raises
    Unreadable if the file, or one that it imports, is missing. Runs the user's module: call it only in a process that
    may run user code.
    """
    from paceline.reward.builtin import builtin

    path, colon, name = function.rpartition(":")
    loaded: RewardFunction = load_from_file(Path(path), name, "reward function") if colon else builtin(function)
    if not colon and function in _settings():
        _settings()[function](dict(kwargs or {})).check_host()
    else:
        _check_kwargs(function, loaded, dict(kwargs or {}), takes_columns_only=not colon)
    return loaded


def _settings() -> Mapping[str, Callable[[object], Any]]:
    from paceline.reward.builtin import SETTINGS

    return SETTINGS


def _check_kwargs(function: str, loaded: RewardFunction, kwargs: dict[str, Any], takes_columns_only: bool) -> None:
    """Raise InvalidInput unless the function takes `kwargs`. With `takes_columns_only`, the function's `**` takes only
    columns, so that a misspelt setting is refused."""
    from paceline.reward.builtin import check_names, check_needed, keyword_only

    try:
        parameters = inspect.signature(loaded).parameters
    except (TypeError, ValueError):  # a callable written in C has no signature
        return
    settings = [n for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    catches_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if takes_columns_only:
        settings = keyword_only(loaded)
        check_needed(function, loaded, kwargs)
    if takes_columns_only or not catches_all:
        check_names(function, settings, kwargs)


TRAINER_ARGUMENTS = frozenset(CallView().arguments())
WRONG_CALL = re.compile(
    r"\(\) (?:missing \d+ required|got an unexpected keyword|takes (?:.* positional|no (?:keyword )?arguments))"
)
"""Texts of a TypeError for arguments that a function does not take, if a decorator hides the function's signature."""
FLOAT32_MAX = 3.4028234663852886e38


class InvalidRewards(Exception):
    """The function did not return one reward for each completion, or cannot be called with the group's columns."""


class WrongArguments(InvalidRewards):
    """The function cannot be called with the group's columns."""


def call_function(
    function: RewardFunction,
    group: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    run: Callable[[Awaitable[Any]], Any],
    view: CallView | None = None,
) -> list[float | None]:
    """Return [C] rewards of `group` (prompts, completions, completion_ids, columns); None where the function does not
    apply.

    All arguments are passed by name. A function without `**` gets only the arguments that it names. `kwargs` take
    precedence over columns, and columns over the arguments of `view`. A built-in with a parameter `settings` gets
    `kwargs` in it. `run` waits for an async function. Raises InvalidRewards, WrongArguments, and the function's
    exceptions.
    """
    view = view or CallView()
    given = {name: group[name] for name in ("prompts", "completions", "completion_ids")}
    arguments = {**view.arguments(), **group["columns"], **given}
    if takes_settings(function):
        arguments |= {"settings": kwargs, "call": view}
    else:
        arguments |= kwargs
    result = function(**_accepted(function, arguments))
    if inspect.isawaitable(result):
        result = run(result)
    return checked_rewards(result, len(group["completions"]))


def checked_rewards(result: Any, num_completions: int) -> list[float | None]:
    """Return `result` as a list of floats and None. Raises InvalidRewards if the list, its length or an entry is
    invalid."""
    if not isinstance(result, list | tuple):
        tolist = getattr(result, "tolist", None)
        values = tolist() if tolist is not None else result
        if not isinstance(values, list):
            raise InvalidRewards(f"returned {_short(result)}; it must return a list with one reward per completion")
        result = values
    if len(result) != num_completions:
        raise InvalidRewards(f"returned {len(result)} values for {num_completions} completions")
    return [_checked_reward(value, index) for index, value in enumerate(result)]


def _checked_reward(value: Any, index: int) -> float | None:
    if value is None:
        return None
    item = getattr(value, "item", None)  # unpacks scalars of NumPy and torch without importing either
    try:
        plain = item() if item is not None else value
    except (TypeError, ValueError, RuntimeError):
        plain = value
    if not isinstance(plain, bool | int | float):
        raise InvalidRewards(f"returned {_short(value)} at index {index}; it must return a number or None")
    try:
        number = float(plain)
    except OverflowError:
        number = math.inf
    if math.isnan(number):
        raise InvalidRewards(f"returned NaN at index {index}; return None where the reward does not apply")
    if abs(number) > FLOAT32_MAX:
        raise InvalidRewards(f"returned {_short(plain)} at index {index}, which is not a finite float32")
    return number


def _accepted(function: RewardFunction, arguments: dict[str, Any]) -> dict[str, Any]:
    accepted, missing = accepted_arguments(function, arguments)
    if missing:
        raise WrongArguments(
            f"needs {', '.join(missing)}, which is neither a column of the data set nor in its kwargs "
            f"(given: {', '.join(name for name in arguments if name not in TRAINER_ARGUMENTS)})"
        )
    if accepted is arguments and _is_builtin(function):  # its `**` is for columns
        return {name: value for name, value in arguments.items() if name not in TRAINER_ARGUMENTS}
    return accepted


def takes_settings(function: RewardFunction) -> bool:
    """Return whether the function is a built-in that takes its `kwargs` in one argument, `settings`."""
    return _is_builtin(function) and "settings" in inspect.signature(function).parameters


def _is_builtin(function: RewardFunction) -> bool:
    return getattr(function, "__module__", "").startswith("paceline.reward.builtin")


def fails_always(error: BaseException, completions: list[Any]) -> bool:
    """Return whether every call with the same group would raise `error`: an undefined name, wrong arguments, a missing
    column, or completions of the other form (texts or messages)."""
    if isinstance(error, NameError | NotImplementedError | SyntaxError | MissingColumn | WrongArguments):
        return True
    is_binding = isinstance(error, TypeError) and WRONG_CALL.search(str(error)) is not None
    return is_binding or bool(form_hint(error, completions))


def form_hint(error: BaseException, completions: list[Any]) -> str:
    """Return a hint if the function expects completions of the other form (texts or messages), else an empty text."""
    text = str(error)
    if not isinstance(error, TypeError | AttributeError):
        return ""
    if isinstance(completions[0], str):
        if "string indices must be integers" in text or "'str' object has no attribute 'get'" in text:
            return (
                "; completions are texts because the prompts are texts: a function that reads completion[0]['content'] "
                "needs chat prompts"
            )
        return ""
    if "got 'list'" in text or "'list' object has no attribute" in text or "not 'list'" in text:
        return (
            "; completions are lists of messages because the prompts are chats: the text of a completion is "
            "completion[0]['content']"
        )
    return ""


def _short(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:60]}"
