"""Scores a completion without parsing its answer: text, form, length, refusal, and the environment's reward.

Lengths are in sampled tokens, including the stop token. A refusal is detected at the beginning of the completion, by
phrases with which assistants decline; for a model that declines in other words, use a judge.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from paceline.data.written import says
from paceline.reward.builtin.inputs import MissingColumn, answer_text, column_values, completion_text

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
    """Return [C] 1.0 if the whole completion, or its answer behind the reasoning, equals the text in `answer_column`,
    else 0.0; None if the column is null.

    strip: ignore white space around both texts. A number or truth value in the column matches each form in which files
    write it; a list matches if one of its entries matches. NaN and a list without entries give None too. Raises
    LookupError if there is no such column, TypeError if the column has an object.
    """

    def texts_of(completion: Any) -> tuple[str, str]:
        return completion_text(completion), answer_text(completion)

    def normal(text: str) -> str:
        text = text.strip() if strip else text
        return text.casefold() if ignore_case else text

    def score(texts: tuple[str, str], answer: Any) -> float | None:
        if isinstance(answer, Mapping):
            raise TypeError(f"column {answer_column!r} has an object, {str(answer)[:80]}; exact_match compares texts")
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
    """Return [C] 1.0 if `pattern` (Python syntax, flags inline: `(?s)`) matches the completion, else 0.0.

    match: `full` for the whole text, `search` for a part. Raises re.error for a bad pattern, ValueError for a bad
    `match`.
    """
    if match not in ("full", "search"):
        raise ValueError(f"match is {match!r}; it must be 'full' or 'search'")
    compiled = re.compile(pattern)
    matches = compiled.fullmatch if match == "full" else compiled.search
    return [float(matches(completion_text(completion)) is not None) for completion in completions]


def think_answer_format(
    prompts: list[Any], completions: list[Any], *, think_in_prompt: bool = False, **columns: Any
) -> list[float | None]:
    """Return [C] 1.0 if the completion is only `<think>…</think><answer>…</answer>` and white space, else 0.0.

    Each tag must appear exactly once. think_in_prompt: the chat template already wrote the opening `<think>`.
    """
    opening = "<think>" if think_in_prompt else ""
    texts = [completion_text(completion, in_reasoning=think_in_prompt) for completion in completions]
    return [float(_is_think_answer(opening + text)) for text in texts]


def _is_think_answer(text: str) -> bool:
    pieces = TAG.split(text)
    return TAG.findall(text) == TAG_ORDER and not any(pieces[i].strip() for i in (0, 2, 4))


REWARD_COLUMN = "environment_reward"
"""Column of a run with an environment: the reward that `get_reward`, `step` or the agent gave each episode, or None."""


def environment(
    prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **columns: Any
) -> list[float | None]:
    """Return [C] rewards of the environment; None for an episode without one. Raises MissingColumn."""
    if REWARD_COLUMN not in columns:
        raise MissingColumn("the run has no environment that gives a reward; remove the function 'environment'")
    return list(columns[REWARD_COLUMN])


def length(
    prompts: list[Any],
    completions: list[Any],
    completion_ids: list[list[int]],
    *,
    tolerance_tokens: int,
    target_tokens: int = 0,
    **columns: Any,
) -> list[float | None]:
    """Return [C] max(0, 1 − |n − target_tokens| / tolerance_tokens) for n completion tokens.

    1 at the target, falling linearly to 0 at a distance of `tolerance_tokens`. With target_tokens = 0, the default,
    shorter is better. Raises ValueError for a tolerance that is not positive or a negative target.
    """
    if tolerance_tokens <= 0 or target_tokens < 0:
        raise ValueError(
            f"tolerance_tokens {tolerance_tokens} must be above 0 and target_tokens {target_tokens} not below 0"
        )
    return [max(0.0, 1 - abs(len(ids) - target_tokens) / tolerance_tokens) for ids in completion_ids]


def soft_overlong(
    prompts: list[Any],
    completions: list[Any],
    completion_ids: list[list[int]],
    *,
    max_completion_tokens: int,
    soft_tokens: int,
    **columns: Any,
) -> list[float | None]:
    """Return [C] the soft over-long punishment for n completion tokens, L = max_completion_tokens, C = soft_tokens.

    0 for n ≤ L − C; (L − C − n) / C for L − C < n ≤ L; −1 for n > L.
    Source: DAPO (arXiv 2503.14476), equation 13. Raises ValueError unless 0 < C ≤ L.
    """
    if not 0 < soft_tokens <= max_completion_tokens:
        raise ValueError(
            f"soft_tokens {soft_tokens} must be above 0 and at most max_completion_tokens {max_completion_tokens}"
        )
    soft_from = max_completion_tokens - soft_tokens
    return [0.0 - min(1.0, max(0.0, (len(ids) - soft_from) / soft_tokens)) for ids in completion_ids]


BEGINNING_CHARS = 300
"""Number of characters from the start within which a refusal must begin; a later phrase is a caveat of an answer."""
REFUSAL = re.compile(
    r"\b(?:i(?:['’]m| am)(?: very| so| really| truly)? sorry|i apologi[sz]e|my apologies"
    r"|i (?:can(?:['’]t|not| not)|could(?:n['’]t| not)|won['’]t|will not|am not able to|must (?:decline|refuse)"
    r"|have to (?:decline|refuse)|do not feel comfortable|don['’]t feel comfortable|refuse to|decline to)"
    r"|i(?:['’]m| am) (?:unable|not able|not comfortable|not going) "
    r"|as an (?:ai|language model)[^.]{0,80}(?:can(?:['’]t|not)|unable|not able)"
    r"|(?:it is|it['’]s) (?:not appropriate|against my))",
    re.IGNORECASE,
)


def refusal(
    prompts: list[Any],
    completions: list[Any],
    *,
    label_column: str | None = "label",
    refuse: Sequence[str] = ("unsafe", "harmful"),
    **columns: Any,
) -> list[float | None]:
    """Return [C] 1.0 if the completion refuses and `label_column` has a label in `refuse`, or if the completion answers
    and the column has another label; else 0.0. If `label_column` is null, every prompt must be refused. None without a
    label.

    An empty completion neither answers nor refuses: 0.0. Raises LookupError if there is no such column.
    """
    labels = [refuse[0]] * len(completions) if label_column is None else column_values(columns, label_column)
    return [
        None if label is None else _score(answer_text(completion), any(says(str(each), label) for each in refuse))
        for completion, label in zip(completions, labels, strict=True)
    ]


def is_refusal(text: str) -> bool:
    return REFUSAL.search(text[:BEGINNING_CHARS]) is not None


def _score(text: str, to_refuse: bool) -> float:
    return float(bool(text.strip()) and is_refusal(text) == to_refuse)
