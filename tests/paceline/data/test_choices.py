"""Rows of the forms in which public data sets have answers, and rows whose right answer is not among them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from paceline.data.row_prompts import lettered, with_choices
from paceline.errors import DataError
from paceline.spec.sections.data import ChoicesSection

ARC = {"choices": {"text": ["sand", "water"], "label": ["1", "2"]}, "answerKey": "2"}


@pytest.mark.parametrize(
    ("row", "section", "letter"),
    [
        ({"choices": ["a", "b", "c"], "answer": 1}, {"keys": ["choices"], "answer_key": "answer"}, "B"),
        ({"endings": ["a", "b"], "label": "0"}, {"keys": ["endings"], "answer_key": "label"}, "A"),
        ({"options": ["a", "b"], "answer": "B"}, {"keys": ["options"], "answer_key": "answer"}, "B"),
        (ARC, {"keys": ["choices"], "answer_key": "answerKey"}, "B"),
        (
            {"ans0": "a", "ans1": "b", "ans2": "c", "label": 2},
            {"keys": ["ans0", "ans1", "ans2"], "answer_key": "label"},
            "C",
        ),
    ],
)
def test_the_right_letter(row: dict[str, Any], section: dict[str, Any], letter: str) -> None:
    found = with_choices(row, ChoicesSection.model_validate(section))
    assert found["answer_letter"] == letter
    assert len(found["answer_choices"]) in (2, 3)
    assert row.items() <= found.items()


def test_shuffled_answers_have_the_same_order_each_time_and_not_always_the_first_right() -> None:
    section = ChoicesSection(keys=("Right", "Wrong 1", "Wrong 2"), shuffle=True)
    rows = [{"Right": f"r{i}", "Wrong 1": f"v{i}", "Wrong 2": f"w{i}"} for i in range(30)]
    found = [with_choices(row, section) for row in rows]
    assert found == [with_choices(row, section) for row in rows]
    assert {each["answer_letter"] for each in found} == {"A", "B", "C"}
    for index, each in enumerate(found):
        assert each["answer_choices"]["ABC".index(each["answer_letter"])] == f"r{index}"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"options": ["a", "b"], "answer": 2}, "must name one of the 2 answers: 0 to 1, or A to B"),
        ({"options": ["a", "b"], "answer": None}, "is None, but must name one"),
        ({"options": ["a"], "answer": 0}, "have 1 answers, but must have 2 to 26"),
        ({"options": "a, b", "answer": 0}, "must be a list of answers"),
        ({"options": ["a", ""], "answer": 0}, "an answer without text"),
        ({"answer": 0}, "but the columns are"),
        ({"options": {"text": ["a", "b"], "label": ["1"]}, "answer": "1"}, "2 texts and 1 labels"),
        ({"options": {"text": ["a", "b"], "label": ["1", "2"]}, "answer": "3"}, "answers: 1, 2"),
    ],
)
def test_a_row_without_a_right_answer_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        with_choices(row, ChoicesSection(keys=("options",), answer_key="answer"))


def test_the_first_answer_must_not_be_right_in_every_prompt() -> None:
    with pytest.raises(ValidationError, match="shuffle is false"):
        ChoicesSection(keys=("Right", "Wrong"))


def test_the_list_of_answers() -> None:
    assert lettered(["one", "two"]) == "A. one\nB. two"
