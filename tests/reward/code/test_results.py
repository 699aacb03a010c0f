"""Rewards and texts of outcomes."""

from __future__ import annotations

from paceline.reward.code.grading import CaseResult, describe, reward_of

RESULTS = [
    CaseResult("passed", 0.1),
    CaseResult("wrong", 0.02, "AssertionError:\n\x1b[0m no"),
    CaseResult("passed"),
]


def test_all_or_the_share() -> None:
    assert reward_of(RESULTS, "all") == 0.0
    assert reward_of(RESULTS, "share") == 2 / 3
    assert reward_of(RESULTS[:1], "all") == 1.0
    assert reward_of([], "all") == reward_of([], "share") == 0.0


def test_the_text_names_each_failure_in_one_short_line() -> None:
    assert describe(RESULTS) == "2/3 passed in 0.12 s; test 1 wrong (0.02 s): AssertionError: [0m no"
    long = describe([CaseResult("error", 0.0, "x" * 5000)] * 100)
    assert len(long) < 6000
    assert long.endswith("and 80 more")
    assert long.isprintable()
