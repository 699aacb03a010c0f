"""Compares the final answer of a completion with the gold answer.

A completion without an answer, or with an unreadable one, is wrong (0.0). A row without a readable gold answer is not
scored (None). Equal texts are always equal.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from paceline.reward.builtin.answers import clean, find_answer, holds_value, is_answer, without_label
from paceline.reward.builtin.equality import equal_values
from paceline.reward.builtin.expressions import read
from paceline.reward.builtin.inputs import column_values, completion_text
from paceline.reward.builtin.notation import THOUSANDS, spelling

if TYPE_CHECKING:
    from paceline.spec import RewardFunctionSection

logger = logging.getLogger(__name__)

DECIMAL_COMMA = re.compile(r"^([-+]?\d+),(\d+)$")
MAX_CHECKED = 1000
"""Number of rows of a data set whose gold answers are checked before a run."""


def math_accuracy(
    prompts: list[Any], completions: list[Any], *, answer_column: str = "answer", **columns: Any
) -> list[float | None]:
    r"""Return [C] 1.0 if the completion's final answer equals the gold answer, else 0.0; None without a gold answer.

    The completion must state its answer in a form that `paceline.reward.builtin.answers.find_answer` finds:
    `\boxed{…}`, `#### …`, `<answer>…</answer>`, a line `A: …` or `Answer: …`, or `answer is …`. The gold answer in
    `answer_column` is stated in the same way (GSM8K ends in `#### 72`), or is the whole text or a number. A null or
    unreadable gold answer gives None and a warning in the log. Raises LookupError if there is no such column.
    """
    golds = column_values(columns, answer_column)
    return [_score(completion_text(completion), gold) for completion, gold in zip(completions, golds, strict=True)]


def equal_answers(gold: str, answer: str) -> bool:
    """Return whether two cleaned answers are equal, as texts without spacing or as values."""
    if (text := spelling(gold)) and text == spelling(answer):
        return True
    value = read(gold)
    candidates = {answer, without_label(answer)}
    # If one answer is a number, a comma in the other one is a decimal comma and separates no list.
    if value is not None and value.kind == "number":
        candidates.add(_with_point(answer))
    elif (number := read(answer)) is not None and number.kind == "number":
        value = read(_with_point(gold))
    return value is not None and any(tree is not None and equal_values(value, tree) for tree in map(read, candidates))


def _with_point(text: str) -> str:
    return text if THOUSANDS.fullmatch(text) else DECIMAL_COMMA.sub(r"\1.\2", text)


def gold_answer(gold: Any) -> tuple[str | None, str]:
    """Return (answer, "") for a row's gold answer, or (None, reason) if it cannot be compared."""
    if gold is None or gold != gold:
        return None, "the gold answer is null"
    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        return None, f"the gold answer is {type(gold).__name__} {repr(gold)[:80]}, not text or a number"
    answer = find_answer(text := str(gold)) or clean(text)
    if not (spelling(answer) and is_answer(answer)):
        return None, f"the gold answer {answer[:80]!r} is not a mathematical value; exact_match compares text"
    return answer, ""


def gold_warnings(rewards: Iterable[RewardFunctionSection], field: str, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a warning for each `math_accuracy` that cannot score some of the first `rows` of `field`, or that compares
    most of them as words."""
    checked, found = list(itertools.islice(rows, MAX_CHECKED)), []
    columns = {r.kwargs.get("answer_column", "answer"): None for r in rewards if r.function == "math_accuracy"}
    for column in columns if checked else ():
        answers = [gold_answer(row.get(column)) for row in checked]
        if reasons := [reason for answer, reason in answers if answer is None]:
            found.append(
                f"math_accuracy gives no score to {len(reasons):,} of the first {len(checked):,} rows of {field} "
                f"({len(reasons) / len(checked):.1%}), so they get no reward from it: {reasons[0]}; correct the column "
                f"{column!r} of these rows or leave them out"
            )
        words = [answer for answer, _ in answers if answer is not None and not holds_value(answer)]
        if 2 * len(words) > len(checked):
            found.append(
                f"math_accuracy compares the column {column!r} of {len(words):,} of the first {len(checked):,} rows of {field} as words, "
                f"like {words[0][:80]!r}: an answer is right only if it has the same words; check answer_column"
            )
    return found


def _score(text: str, gold: Any) -> float | None:
    expected, reason = gold_answer(gold)
    if expected is None:
        _warn_once(reason)
        return None
    answer = find_answer(text)
    return float(bool(answer) and equal_answers(expected, answer or ""))


@functools.lru_cache(maxsize=256)
def _warn_once(reason: str) -> None:
    logger.warning("math_accuracy gives no score: %s", reason)
