"""The built-in reward functions by their names in a spec.

All have TRL's signature, `f(prompts, completions, completion_ids=..., **columns) -> list[float | None]`. The keys of a
spec's `kwargs` are the function's keyword-only parameters, or settings that SETTINGS parses. Importing this module
loads no mpmath or numpy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidInput, nearest
from paceline.reward.builtin import judges
from paceline.reward.builtin.choices import bbq_bias, choice_accuracy
from paceline.reward.builtin.code_tests import code_settings, code_tests
from paceline.reward.builtin.formats import (
    environment,
    exact_match,
    format_regex,
    length,
    refusal,
    soft_overlong,
    think_answer_format,
)
from paceline.reward.builtin.mathematics import math_accuracy
from paceline.reward.builtin.reward_model import process_reward_model, reward_model

if TYPE_CHECKING:
    from paceline.spec import RewardFunctionSection

BUILTIN_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "bbq_bias": bbq_bias,
    "choice_accuracy": choice_accuracy,
    "environment": environment,
    "code_tests": code_tests,
    "exact_match": exact_match,
    "format_regex": format_regex,
    "judge": judges.judge,
    "judge_pairwise": judges.judge_pairwise,
    "length": length,
    "math_accuracy": math_accuracy,
    "process_reward_model": process_reward_model,
    "refusal": refusal,
    "reward_model": reward_model,
    "soft_overlong": soft_overlong,
    "think_answer_format": think_answer_format,
}

SETTINGS: dict[str, Callable[[object], Any]] = {
    "code_tests": code_settings,
    "judge": judges.score_settings,
    "judge_pairwise": judges.pair_settings,
}
"""Maps a function with a parameter `settings` to the parser of its `kwargs`. A parser raises InvalidInput, or returns
settings with the `columns` that the function reads; the settings' `check_submitted` raises if a run cannot use them,
and `check_host` if a worker cannot."""


def builtin(name: str) -> Callable[..., Any]:
    """Return the built-in function. Raises InvalidInput with the nearest name if there is no such function."""
    if name in BUILTIN_FUNCTIONS:
        return BUILTIN_FUNCTIONS[name]
    raise InvalidInput(
        f"reward function {name!r} is not built in{nearest(name, BUILTIN_FUNCTIONS)}; the built-in functions are "
        f"{', '.join(sorted(BUILTIN_FUNCTIONS))}; name your own function as path/to/file.py:function"
    )


def check_builtin(function: str, kwargs: Mapping[str, Any]) -> None:
    """Raise InvalidInput if there is no such built-in function, if it does not take these `kwargs`, or if it needs
    more."""
    if ":" not in function:
        loaded = builtin(function)
        if function not in SETTINGS:
            check_names(function, keyword_only(loaded), kwargs)
            check_needed(function, loaded, kwargs)


def check_rewards(rewards: Iterable[RewardFunctionSection]) -> None:
    """Check the built-in functions among the rewards of a spec. Raises InvalidInput with the faulty key of the spec."""
    for index, reward in enumerate(rewards):
        try:
            check_builtin(reward.function, reward.kwargs)
        except InvalidInput as error:
            raise InvalidInput(f"rewards.{index}: {error}") from None


def check_needed(function: str, loaded: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise InvalidInput unless `kwargs` has every setting without a default."""
    parameters = inspect.signature(loaded).parameters
    for name in keyword_only(loaded):
        if parameters[name].default is inspect.Parameter.empty and name not in kwargs:
            raise InvalidInput(f"reward function {function!r} needs {name!r}; write it into the function's kwargs")


def keyword_only(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters
    return [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]


def check_names(function: str, settings: list[str], kwargs: Mapping[str, Any]) -> None:
    """Raise InvalidInput, with the nearest setting, if a name in `kwargs` is not a setting of the function."""
    for name in kwargs:
        if name not in settings:
            raise InvalidInput(
                f"reward function {function!r} takes no {name!r}{nearest(name, settings)}; "
                f"its kwargs are {', '.join(settings) or 'none'}"
            )
