"""`math_accuracy`: comparison of a completion's final answer with the gold answer.

Plain numbers are compared exactly; all other answers go to math-verify (sympy), which is imported only then. A
completion that states no readable answer is wrong (0.0); an example without a readable gold answer is not scored (None).
"""

from __future__ import annotations

import functools
import logging
import re
from fractions import Fraction
from typing import Any

from reward.builtin.answers import MAX_ANSWER_CHARS, as_number, clean, find_answer
from reward.builtin.inputs import answer_text, column_values

logger = logging.getLogger(__name__)

TOLERANCE = Fraction(1, 2_000_000)
"""A fraction may be answered to six decimal places; an integer has to be exact."""

# Sympy would evaluate these for minutes or gigabytes, and one completion must not cost its group the score.
EXPLOSIVE = re.compile(
    r"(?:\^|\*\*)\s*[{(]*\s*[\w.]{0,12}\s*(?:\^|\*\*|!)"  # a power as an exponent
    r"|(?:\^|\*\*)\s*[{(]*\s*-?\d{4,}"
    r"|\d{4,}\s*\)*!|!\s*\)*!"
)
LATEX_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{[^{}]*\}|\\[a-zA-Z]+")
WORD = re.compile(r"(?<![^\W\d_])(?!(?:sin|cos|tan|cot|log|exp|sqrt|inf)\b)[^\W\d_]{3,}")


def math_accuracy(
    prompts: list[Any],
    completions: list[Any],
    *,
    answer_column: str = "answer",
    **columns: Any,
) -> list[float | None]:
    r"""Return [C] 1.0 where the completion's final answer equals the gold answer, 0.0 where not, None without a gold answer.

    The completion has to state its answer: `\boxed{…}`, `#### …`, `<answer>…</answer>`, a line `A: …` or `Answer: …`, or
    `answer is …`; the last statement counts. The gold answer, in `answer_column`, is stated in the same way (GSM8K
    ends in `#### 72`) or is the whole text or a number. A null or unreadable gold answer gives None and a warning in the
    log. Raises LookupError when there is no such column.
    """
    golds = column_values(columns, answer_column)
    return [
        _score(answer_text(completion), gold) for completion, gold in zip(completions, golds, strict=True)
    ]


def equal_answers(gold: str, answer: str) -> bool:
    """Return whether two cleaned answers are the same value: numbers exactly (fractions to six decimal places), else by sympy."""
    gold_number, number = as_number(gold), as_number(answer)
    if gold_number is not None and number is not None:
        if gold_number.denominator == 1:
            return gold_number == number
        return abs(gold_number - number) < TOLERANCE
    if gold == answer:
        return True
    expressions, gold_expressions = _parsed(answer), _parsed(gold)
    if not expressions or not gold_expressions:
        return False
    from math_verify import verify

    # No timer: math-verify's works by SIGALRM, and the result would depend on the machine's load. The function's time limit
    # ends the cases that EXPLOSIVE does not catch, as a failure and not as a wrong answer.
    return bool(verify(list(gold_expressions), list(expressions), timeout_seconds=None))


def _score(text: str, gold: Any) -> float | None:
    gold_answer, reason = _gold_answer(gold)
    if gold_answer is None:
        _warn_once(reason)
        return None
    answer = find_answer(text)
    return float(bool(answer) and equal_answers(gold_answer, answer or ""))


def _gold_answer(gold: Any) -> tuple[str | None, str]:
    if gold is None:
        return None, "the gold answer is null"
    if isinstance(gold, bool) or not isinstance(gold, str | int | float):
        return None, f"the gold answer is {type(gold).__name__} {repr(gold)[:80]}, not text or a number"
    text = str(gold)
    answer = find_answer(text) or clean(text)
    if as_number(answer) is None and not _parsed(answer):
        return None, f"the gold answer {answer[:80]!r} is not a mathematical value; exact_match compares text"
    return answer, ""


@functools.lru_cache(maxsize=1024)
def _parsed(answer: str) -> tuple[Any, ...]:
    """Return sympy's readings of `answer`; none for prose, which sympy would read as a product of letters."""
    if len(answer) > MAX_ANSWER_CHARS or EXPLOSIVE.search(answer) or WORD.search(LATEX_TEXT.sub(" ", answer)):
        return ()
    from math_verify import parse

    _quiet_math_verify()
    return tuple(parse(f"${answer}$", fallback_mode="no_fallback", parsing_timeout=None))


@functools.cache
def _quiet_math_verify() -> None:
    """Suppress math-verify's warning that its timer is off, which is intended."""
    import math_verify.grader
    import math_verify.parser

    math_verify.parser.TIMEOUT_WARNING_SHOWN = True
    math_verify.grader.TIMEOUT_WARNING_SHOWN = True


@functools.lru_cache(maxsize=256)
def _warn_once(reason: str) -> None:
    logger.warning("math_accuracy gives no score: %s", reason)
