"""Votes are grouped by the equality that scores them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from paceline.apps.evaluation.statistics import consensus
from paceline.reward.builtin import BUILTIN_FUNCTIONS
from paceline.reward.builtin.votes import same_vote, votes_of
from paceline.spec import RewardFunctionSection

MATH = "math_accuracy"
VOTES: dict[str, tuple[Any, Any, list[str], float]] = {
    # function or function with kwargs, gold answer, texts (of mathematics: what stands in the box), the majority's score
    "a fraction and a decimal": (MATH, "1/2", ["1/2", "0.5", "3", "3.0", "2/4"], 1.0),
    "the same against them": (MATH, "3", ["1/2", "0.5", "3"], 0.0),
    "wrong ones are one": (MATH, "7", ["7", "7", "8", "8.0", "16/2"], 0.0),
    "LaTeX": (MATH, "\\frac{1}{2}", ["\\frac{1}{2}", "0.5", "3", "4"], 1.0),
    "LaTeX against one": (MATH, "3", ["\\frac{1}{2}", "\\dfrac12", "3"], 0.0),
    "expressions": (MATH, "x+1", ["x+1", "1+x", "x", "y"], 1.0),
    "wrong expressions": (MATH, "z", ["x+1", "1+x", "z"], 0.0),
    "thousands": (MATH, "5", ["1,000", "1000", "5"], 0.0),
    "signs": (MATH, "5", ["5", "-5", "5"], 1.0),
    "a tie": (MATH, "5", ["5", "6"], 0.5),
    "a tie of several": (MATH, "5", ["5", "5.0", "6", "6.0", "7", "7.0"], 1 / 3),
    "tiny numbers are two": (MATH, "3", ["1/3", "2/3", "3", "3"], 1.0),
    "words of a text": (MATH, "5", ["5", "no idea", "no idea"], 0.0),
    "one text": ("exact_match", "a", ["a", " a\n", "b"], 1.0),
    "the case counts": ("exact_match", "a", ["a", "A", "A"], 0.0),
    "the case does not count": (("exact_match", {"ignore_case": True}), "a", ["a", "A", "b"], 1.0),
    "white space counts": (("exact_match", {"strip": False}), "a", ["a", "a ", "a "], 0.0),
    "no mathematics in texts": ("exact_match", "0.5", ["0.5", "1/2", "1/2"], 0.0),
    "whole texts, not what they state": ("exact_match", "Answer: 5", ["Answer: 5", "Answer: 5", "The answer is 5"], 1.0),
    "letters": ("choice_accuracy", "B", ["B", "(B)", "B. red", "A"], 1.0),
    "letters in a box": ("choice_accuracy", "B", ["\\boxed{B}", "Answer: B", "A"], 1.0),
    "texts of choices": ("choice_accuracy", "B", ["Answer: green", "B", "A"], 1.0),
    "none is no vote": ("choice_accuracy", "B", ["hm", "so", "B"], 1.0),
    "a lower-case gold letter": ("choice_accuracy", "b", ["B", "B", "A"], 1.0),
    "an index": ("choice_accuracy", 1, ["B", "B", "A"], 1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", VOTES)
def test_the_score_of_the_majority(name: str) -> None:
    function, gold, texts, expected = VOTES[name]
    function, kwargs = (function, {}) if isinstance(function, str) else function
    reward = RewardFunctionSection(function=function, kwargs=kwargs)
    texts = [f"\\boxed{{{text}}}" for text in texts] if function == MATH else texts
    columns = {"answer": gold, "answer_letter": gold, "answer_choices": ["red", "green"]}
    lists = {key: [value] * len(texts) for key, value in columns.items()}
    scores = BUILTIN_FUNCTIONS[function]([""] * len(texts), texts, **kwargs, **lists)
    votes = votes_of(reward, columns, texts, scores)
    assert consensus(votes, scores, partial(same_vote, reward)) == pytest.approx(expected)


def test_functions_of_a_user_vote_by_the_answers_that_are_stated() -> None:
    reward = RewardFunctionSection(function="mine.py:prime")
    texts, scores = ["\\boxed{3}", "\\boxed{5}", "\\boxed{4}", "\\boxed{4.0}"], [1.0, 1.0, 0.0, 0.0]
    votes = votes_of(reward, {}, texts, scores)
    assert consensus(votes, scores, partial(same_vote, reward)) == 0.0  # 3 and 5 are both right, and two votes
