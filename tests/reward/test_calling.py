"""One call of a reward function: its arguments, and the check of its result."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from reward.calling import InvalidRewards, call_function, checked_rewards

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
    assert seen.keys() == {"prompts", "completions", "completion_ids", "answer", "level"}
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
        (1.0, "returned float 1.0, it has to be a list"),
        ([1.0], "returned 1 values for 2 completions"),
        ([1.0, "x"], "at index 1, it has to be a number or None"),
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
