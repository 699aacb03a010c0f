"""math_accuracy: places of answers, equality, and agreement with recorded results on GSM8K."""

from __future__ import annotations

import json
import logging
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from reward.builtin import mathematics
from reward.builtin.answers import as_number, clean, find_answer
from reward.builtin.mathematics import equal_answers, math_accuracy

RECORDED = Path(__file__).parents[4] / "shared/data/gsm8k/example_model_solutions.jsonl"


def accuracy(completion: Any, gold: Any) -> float | None:
    (reward,) = math_accuracy([""], [completion], answer=[gold])
    return reward


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{4} no, \boxed{5}", "5"),
        (r"\boxed{5", None),
        ("work\n#### 1,234", "1,234"),
        ("work\n#### $18.", "$18"),
        ("work\nA: 18", "18"),
        ("A: 17\nno\nA: 18\n", "18"),
        ("**Final Answer:** 18", "18"),
        ("Answer: $x+1$", "x+1"),
        (r"A: \boxed{5}", "5"),
        ("#### 5 so\nA: 6", "6"),
        ("<think>the answer is 4</think><answer>5</answer>", "5"),
        ("The answer is 18. She keeps 3.", "18"),
        ("the answer is: 3.5", "3.5"),
        ("A: Janet sells 9 eggs\n#### 18", "18"),
        ("18", None),
        ("", None),
    ],
)
def test_the_last_statement_is_the_answer(text: str, answer: str | None) -> None:
    assert find_answer(text) == answer


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("18", Fraction(18)),
        ("1,234", Fraction(1234)),
        ("$1,234.50", Fraction(2469, 2)),
        ("-$5", Fraction(-5)),
        ("$-5", Fraction(-5)),
        ("−3", Fraction(-3)),
        (".5", Fraction(1, 2)),
        ("3.0", Fraction(3)),
        ("18$", Fraction(18)),
        ("1e5", Fraction(100_000)),
        ("7/14", Fraction(1, 2)),
        ("-3 1/2", Fraction(-7, 2)),
        ("18 eggs a day", Fraction(18)),
        ("1.8 billion", Fraction(1_800_000_000)),
        ("1/0", None),
        ("1,23", None),
        ("50%", None),
        ("5 pi", None),
        ("12 x", None),
        ("3 + 4", None),
        ("18 or 19", None),
        ("3" * 61, None),
        ("3" * 400, None),
        ("", None),
    ],
)
def test_plain_numbers_are_read_exactly(answer: str, value: Fraction | None) -> None:
    assert as_number(answer) == value


@pytest.mark.parametrize(
    ("raw", "cleaned"),
    [
        (" $18$. ", "18"),
        (r"\(x\)", "x"),
        ("**18**", "18"),
        ("1{,}234", "1,234"),
        (r"\$18", "$18"),
        ("$", "$"),
    ],
)
def test_cleaning_keeps_the_value_only(raw: str, cleaned: str) -> None:
    assert clean(raw) == cleaned


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("18", "18.0", True),
        ("18", "18.0000001", False),
        ("1/3", "0.333333", True),
        ("1/3", "0.333", False),
        (r"\frac{1}{2}", "0.5", True),
        ("50", "50%", True),
        ("x^2+1", "1+x^2", True),
        ("x^2+1", "x^2-1", False),
        (r"\sqrt{2}", "sqrt(2)", True),
        ("18", r"18\text{ eggs}", True),
        ("5", "x=5", True),
        ("(1,2)", "(2,1)", False),
        (r"\text{even}", r"\text{even}", True),
        ("18", "around noon", False),
    ],
)
def test_equality_beyond_plain_numbers(gold: str, answer: str, equal: bool) -> None:
    assert equal_answers(gold, answer) is equal


@pytest.mark.parametrize("answer", ["9^{9^{9^9}}", "9**9**9", "2^{123456}", "99999!", "((9!)!)!", "1" * 5000])
def test_an_answer_that_would_explode_is_wrong_and_not_a_failure(answer: str) -> None:
    assert accuracy(rf"\boxed{{{answer}}}", "5") == 0.0


def test_gold_as_gsm8k_writes_it_as_a_number_and_from_another_column() -> None:
    gold = "48/2 = <<48/2=24>>24 clips in May.\n48+24 = <<48+24=72>>72 altogether.\n#### 1,072"
    assert accuracy("#### 1072", gold) == 1.0
    assert accuracy("#### 72", gold) == 0.0
    assert accuracy([{"role": "assistant", "content": r"\boxed{72}"}], 72) == 1.0
    assert accuracy("A: 2.5", 2.5) == 1.0
    assert math_accuracy([""], ["A: 3"], target=["3"], answer_column="target") == [1.0]


def test_no_stated_answer_is_wrong() -> None:
    assert accuracy("it is 72", "72") == 0.0


@pytest.mark.parametrize(
    ("gold", "reason"), [(None, "null"), ("Paris", "'Paris'"), (["5"], "list"), ("", "''")]
)
def test_no_gold_answer_is_no_score_with_a_reason(
    gold: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    mathematics._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert accuracy("A: 5", gold) is None
    assert reason in caplog.text


def test_agrees_with_the_recorded_verdicts() -> None:
    """Four models on 1,319 problems; the recorded verdicts were made by comparing what stands behind `A:`."""
    if not RECORDED.exists():
        pytest.skip(f"{RECORDED} is not here")
    compared = agreed = 0
    for line in RECORDED.read_text().splitlines():
        problem = json.loads(line)
        solutions = [value for value in problem.values() if isinstance(value, dict)]
        rewards = math_accuracy(
            [problem["question"]] * len(solutions),
            [solution["solution"] for solution in solutions],
            answer=[problem["ground_truth"]] * len(solutions),
        )
        compared += len(solutions)
        agreed += sum(r == float(s["is_correct"]) for r, s in zip(rewards, solutions, strict=True))
    assert compared == 5276
    assert agreed == compared


def test_plain_numbers_agree_with_math_verify() -> None:
    """The exact path must not change a verdict that math-verify gives."""
    from math_verify import parse, verify

    values = ["18", "18.0", "-18", "1,234", "1234", "1234.5", "7/14", "0.5", "$18", "1/3", "0.333333"]
    for gold in values:
        for answer in values:
            theirs = verify(
                parse(gold, parsing_timeout=None), parse(answer, parsing_timeout=None), timeout_seconds=None
            )
            assert equal_answers(clean(gold), clean(answer)) is theirs, (gold, answer)
