"""Rewards for the form of a completion: exact text, a regular expression, the think/answer layout.

Each returns 1.0 or 0.0 per completion; `exact_match` returns None where the data set has no answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from paceline.data.written import says
from paceline.reward.builtin.inputs import answer_text, column_values, completion_text

TAG_ORDER = ["<think>", "</think>", "<answer>", "</answer>"]
TAG = re.compile(r"</?(?:think|answer)>")


def exact_match(
    prompts: list[Any],
    completions: list[Any],
    *,
    answer_column: str = "answer",
    strip: bool = True,
    ignore_case: bool = False,
    **columns: Any,
) -> list[float | None]:
    """Return [C] 1.0 where the whole completion, or its answer behind the reasoning, equals the text in `answer_column`, None
    where that is null.

    strip: ignore white space around both. A number or truth value in the column is compared with the texts that files have of
    it; of a list any entry will do. None also for NaN, and for a list without entries. Raises LookupError when there is no such
    column, TypeError for an object in it.
    """

    def texts_of(completion: Any) -> tuple[str, str]:
        return completion_text(completion), answer_text(completion)

    def normal(text: str) -> str:
        text = text.strip() if strip else text
        return text.casefold() if ignore_case else text

    def score(texts: tuple[str, str], answer: Any) -> float | None:
        if isinstance(answer, Mapping):
            raise TypeError(
                f"column {answer_column!r} has an object, {str(answer)[:80]}; exact_match compares text"
            )
        answers = answer if isinstance(answer, list | tuple) else [answer]
        golds = [normal(each) if isinstance(each, str) else each for each in answers if not _is_missing(each)]
        return float(any(says(normal(text), gold) for text in texts for gold in golds)) if golds else None

    return [
        score(texts_of(completion), answer)
        for completion, answer in zip(completions, column_values(columns, answer_column), strict=True)
    ]


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def format_regex(
    prompts: list[Any],
    completions: list[Any],
    *,
    pattern: str,
    match: Literal["full", "search"] = "full",
    **columns: Any,
) -> list[float | None]:
    """Return [C] 1.0 where `pattern` (Python syntax, flags inline: `(?s)`) matches the completion.

    match: `full` the whole text has to match, `search` any part. Raises re.error for a pattern that is none, and
    ValueError for another `match`.
    """
    if match not in ("full", "search"):
        raise ValueError(f"match is {match!r}, it has to be 'full' or 'search'")
    compiled = re.compile(pattern)
    matches = compiled.fullmatch if match == "full" else compiled.search
    return [float(matches(completion_text(completion)) is not None) for completion in completions]


def think_answer_format(
    prompts: list[Any], completions: list[Any], *, think_in_prompt: bool = False, **columns: Any
) -> list[float | None]:
    """Return [C] 1.0 where the completion is `<think>…</think><answer>…</answer>` and nothing else but white space.

    Each tag has to appear exactly once. think_in_prompt: the chat template already wrote the opening `<think>`.
    """
    opening = "<think>" if think_in_prompt else ""
    texts = [completion_text(completion, in_reasoning=think_in_prompt) for completion in completions]
    return [float(_is_think_answer(opening + text)) for text in texts]


def _is_think_answer(text: str) -> bool:
    pieces = TAG.split(text)
    return TAG.findall(text) == TAG_ORDER and not any(pieces[i].strip() for i in (0, 2, 4))
