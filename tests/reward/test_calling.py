"""One call of a reward function: its arguments, and the check of its result."""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any

import numpy as np
import pytest

from paceline.reward.builtin.formats import exact_match
from paceline.reward.calling import InvalidRewards, call_function, checked_rewards, fails_always, form_hint
from paceline.reward.trainer_view import CallView

GROUP = {
    "prompts": ["1+1=", "1+1="],
    "completions": ["2", "3"],
    "completion_ids": [[5], [6]],
    "columns": {"answer": ["2", "2"], "level": [1, 1]},
}


def test_a_function_gets_the_arguments_that_it_names() -> None:
    def equals(completions: list[str], answer: list[str]) -> list[float]:
        return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]

    assert call_function(equals, GROUP, {}, asyncio.run) == [1.0, 0.0]


def test_a_function_with_keywords_gets_all_of_them_and_kwargs_win_over_columns() -> None:
    seen: dict[str, Any] = {}

    def keep(**given: Any) -> list[None]:
        seen.update(given)
        return [None, None]

    assert call_function(keep, GROUP, {"level": 7}, asyncio.run) == [None, None]
    assert seen.keys() == {
        *("prompts", "completions", "completion_ids", "answer", "level"),
        *("trainer_state", "log_metric", "log_extra"),
    }
    assert seen["level"] == 7


def test_an_async_function_is_waited_for() -> None:
    async def later(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return [0.5 for _ in completions]

    assert call_function(later, GROUP, {}, asyncio.run) == [0.5, 0.5]


def test_a_missing_argument_is_named() -> None:
    def needs(solution: list[str]) -> list[float]:
        raise AssertionError("not called")

    with pytest.raises(InvalidRewards, match=r"needs solution, .* \(given: answer, level, prompts"):
        call_function(needs, GROUP, {}, asyncio.run)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (1.0, "returned float 1.0; it must return a list"),
        ([1.0], "returned 1 values for 2 completions"),
        ([1.0, "x"], "at index 1; it must return a number or None"),
        ([math.nan, 0.0], "NaN at index 0"),
        ([0.0, 1e39], "at index 1, which is not a finite float32"),
        ([0.0, 10**400], "at index 1, which is not a finite float32"),
    ],
)
def test_anything_but_one_finite_number_for_each_completion_is_refused(returned: Any, message: str) -> None:
    with pytest.raises(InvalidRewards, match=message):
        checked_rewards(returned, 2)


def test_numbers_of_other_libraries_and_booleans_become_floats() -> None:
    assert checked_rewards(np.array([1, 2]), 2) == [1.0, 2.0]
    assert checked_rewards((np.float32(0.5), True, None), 3) == [0.5, 1.0, None]


def test_a_function_sees_the_training_and_logs_metrics_as_with_trl() -> None:
    def scheduled(completions: list[str], trainer_state: Any, log_metric: Any, log_extra: Any) -> list[float]:
        log_extra("extracted", completions)
        for value in (1.0, 3, np.float32(2.0), math.nan):
            log_metric("length", value)
        log_metric("n" * 49, 1.0)
        return [trainer_state.global_step / trainer_state.max_steps + trainer_state.epoch] * len(completions)

    view = CallView({"global_step": 3, "max_steps": 4, "epoch": 0.25})
    assert call_function(scheduled, GROUP, {}, asyncio.run, view) == [1.0, 1.0]
    assert view.metrics == {"length": (6.0, 3)}
    assert view.extra == {"extracted": GROUP["completions"]}
    no_run = CallView()
    assert no_run.arguments()["trainer_state"].global_step == 0


def test_default_none_is_replaced_and_a_column_of_that_name_wins() -> None:
    def optional(completions: list[str], log_metric: Any = None, trainer_state: Any = None) -> list[float]:
        log_metric("x", 1.0)
        return [float(value) for value in trainer_state]

    group = {**GROUP, "columns": {"trainer_state": [1, 2]}}
    assert call_function(optional, group, {}, asyncio.run) == [1.0, 2.0]


def test_a_built_in_gets_columns_alone() -> None:
    with pytest.raises(LookupError, match=r"\(its columns: completion_ids, level\)"):
        call_function(exact_match, {**GROUP, "columns": {"level": [1, 1]}}, {}, asyncio.run)


@pytest.mark.parametrize(
    ("completions", "function", "hint"),
    [
        (["2"], lambda c: c[0][0]["content"], "completions are texts because the prompts are texts"),
        (["2"], lambda c: c[0].get("content"), "completions are texts because the prompts are texts"),
        (
            [[{"role": "assistant", "content": "2"}]],
            lambda c: re.search("2", c[0]),
            "lists of messages because",
        ),
        ([[{"role": "assistant", "content": "2"}]], lambda c: c[0].strip(), "lists of messages because"),
        (["2"], lambda c: c[0] + 1, ""),
        (["2"], lambda c: c[0]["a"]["b"] if c[1] else 1, ""),
    ],
)
def test_a_function_for_the_other_form_of_completions_is_told_so(
    completions: list[Any], function: Any, hint: str
) -> None:
    with pytest.raises((TypeError, AttributeError, IndexError)) as error:
        function(completions)
    said = form_hint(error.value, completions)
    assert (hint in said) if hint else said == ""


def hidden(function: Any) -> Any:
    return lambda *args, **kwargs: function(*args, **kwargs)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda completions: [undefined_name], True),  # type: ignore[name-defined] # noqa: F821
        (hidden(lambda completions: [0.0]), True),  # further arguments, unseen by the signature
        (hidden(lambda solution, **_: [0.0]), True),
        (lambda completions: [c[0]["content"] for c in completions], True),
        (lambda completions, **columns: exact_match([], completions, [], answer_column="solution"), True),
        (lambda completions, **columns: columns["solution"], False),  # a KeyError may be of anything
        (lambda completions: float("a"), False),
        (lambda completions: [1.0], False),
    ],
)
def test_a_failure_that_every_call_repeats_is_told_from_others(function: Any, expected: bool) -> None:
    with pytest.raises(Exception) as failure:  # noqa: PT011
        call_function(function, GROUP, {}, asyncio.run)
    assert fails_always(failure.value, GROUP["completions"]) == expected
