"""Groups the answers of a problem's completions into votes, by the equality with which they are scored.

Promise: answers that the built-in function treats as the same answer are one vote. `1/2` and `0.5` are one vote for
`math_accuracy`; `exact_match` compares whole texts by its own settings.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paceline.chat.completion_texts import answer_of
from paceline.reward.builtin.answers import find_answer
from paceline.reward.builtin.choices import TEXTS_COLUMN, chosen_letter
from paceline.reward.builtin.mathematics import equal_answers
from paceline.spec import RewardFunctionSection


class Vote(NamedTuple):
    answer: str
    score: float


def votes_of(
    reward: RewardFunctionSection, columns: Mapping[str, Any], texts: Sequence[str], scores: Sequence[float]
) -> list[Vote | None]:
    """Return the vote of each completion; None if it states no answer."""
    match reward.function:
        case "exact_match":
            answers = [_normal(answer_of(text), reward.kwargs) or None for text in texts]
        case "choice_accuracy":
            choices = columns.get(reward.kwargs.get("choices_column", TEXTS_COLUMN))
            answers = [chosen_letter(answer_of(text), choices) for text in texts]
        case _:
            answers = [find_answer(text) for text in texts]
    return [None if answer is None else Vote(answer, score) for answer, score in zip(answers, scores, strict=True)]


def same_vote(reward: RewardFunctionSection, one: Vote, other: Vote) -> bool:
    """Return whether two answers are the same vote: equal texts for `exact_match` and `choice_accuracy`, else equal
    values."""
    if one.answer == other.answer or reward.function in ("exact_match", "choice_accuracy"):
        return one.answer == other.answer
    if reward.function == "math_accuracy" and (one.score == 1.0 or other.score == 1.0):
        return one.score == other.score  # equal if both equal the gold answer
    return _equal(one.answer, other.answer)


@functools.lru_cache(maxsize=1 << 16)
def _equal(one: str, other: str) -> bool:
    # In both directions, because `equal_answers` is not symmetric.
    return equal_answers(one, other) and equal_answers(other, one)


def _normal(text: str, kwargs: Mapping[str, Any]) -> str:
    text = text.strip() if kwargs.get("strip", True) else text
    return text.casefold() if kwargs.get("ignore_case") else text
