"""Failures by cause: equal errors, reports, and the messages about drops in a row."""

from __future__ import annotations

import math

import pytest

from paceline.services.coordinator.exchange.failure_causes import DropsInARow, FailureCounts, cause_of


def nothing(reason: str) -> None:
    """No group is under way."""


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("the prompt has 3001 tokens", "the prompt has 4,512 tokens", True),
        ("raised KeyError: 'a' (r.py:3 in f)", "raised KeyError: 'b' (r.py:3 in f)", True),
        ("raised KeyError: 'a' (r.py:3 in f)", "raised KeyError: 'a' (r.py:9 in f)", False),
        ("raised KeyError: 'a' (r.py:3 in f)", "raised ValueError: 'a' (r.py:3 in f)", False),
        ("raised ValueError: no it's (r.py:3 in f)", 'raised ValueError: say "x (r.py:3 in f)', True),
        ("raised ValueError: no (r.py:3 in f)", "raised ValueError: no (r.py:4 in f)", False),
        ("g raised ValueError: no (r.py:3 in f)", "f raised ValueError: no (r.py:3 in f)", False),
        (
            "the chat template raised TemplateError: no, for the messages [{'role': 'user', 'content': 'it",
            "the chat template raised TemplateError: no, for the messages [{'role': 'user', 'content': \"it's",
            True,
        ),
        (
            "the tokenizer has no tokens for the prompt 'a'",
            "the tokenizer has no tokens for the prompt 'b",
            True,
        ),
    ],
)
def test_errors_that_differ_in_values_alone_have_one_cause(one: str, other: str, alike: bool) -> None:
    assert (cause_of(one) == cause_of(other)) is alike


def test_a_warning_is_due_for_the_first_failure_and_drop_and_then_ever_more_seldom() -> None:
    counts = FailureCounts()
    assert [counts.failed("a 1"), counts.failed("a 2"), counts.failed("b")] == [True, False, True]
    due = [number for number in range(1, 3001) if counts.dropped(f"group {number}")]
    assert due == [1, 10, 100, 1000]


def test_the_number_of_causes_is_bounded() -> None:
    counts = FailureCounts()
    for number in range(1000):
        counts.failed("x" * (number % 400))
    assert len(counts._failures) <= 256


def test_only_failures_in_a_row_for_one_cause_pause() -> None:
    drops = DropsInARow()
    for number in range(7):
        drops.add(number, "reward_failed", "the same")
        drops.add(number, "stale", "")  # is unrelated to the function
    assert not drops.is_of_one_cause(4, nothing)
    drops.add(7, "reward_failed", "the same")
    assert drops.is_of_one_cause(4, nothing)
    drops.add(8, "reward_failed", "another")
    assert not drops.is_of_one_cause(4, nothing)
    drops.reset()
    for number in range(100):
        drops.add(number, "no_variance", "", [0.0, 0.0])
    assert not drops.is_of_one_cause(4, nothing), "grpo.max_generation_batches bounds these"


def test_a_small_batch_takes_more_than_two_groups() -> None:
    drops = DropsInARow()
    for number in range(3):
        drops.add(number, "bad_prompt", "too long")
    assert not drops.is_of_one_cause(1, nothing)


def test_groups_after_one_that_is_under_way_are_not_counted() -> None:
    drops = DropsInARow()
    for number in range(20):
        drops.add(number, "bad_prompt", "too long")
    asked: list[str] = []

    def first(reason: str) -> int:
        asked.append(reason)
        return 7 + len(asked)

    assert not drops.is_of_one_cause(5, first)  # groups 0 to 7 are before it
    assert not drops.is_of_one_cause(5, first)
    assert drops.is_of_one_cause(5, first)
    assert asked == ["bad_prompt"] * 3


@pytest.mark.parametrize(
    ("totals", "words"),
    [
        ([(0.0, 0.0), (-1.0, -1.0)], "no completion of 2 groups scored above 0"),
        ([(0.5, 0.5), (0.5, 0.5)], "every completion of 2 groups scored 0.5"),
        ([(0.0, 0.0), (1.0, 1.0)], "in each of 2 groups all completions scored alike, between 0 and 1"),
        ([(math.nan, math.nan), (math.nan,)], "every reward function returned None"),
    ],
)
def test_rewards_without_variance_are_told_apart(totals: list[tuple[float, ...]], words: str) -> None:
    drops = DropsInARow()
    for number, rewards in enumerate(totals):
        drops.add(number, "no_variance", "", rewards)
    assert words in drops.explain_limit(2, "no_variance", "r-1")
    assert words not in drops.explain_limit(9, "no_variance", "r-1"), "others were dropped before"
