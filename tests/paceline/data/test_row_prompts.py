"""Prompts from templates, and rows that a template cannot use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.data.prompts import open_prompts
from paceline.errors import DataError
from paceline.spec import DataSection

CHOICES = {"keys": ["options"], "answer_key": "right"}


def drawn(folder: Path, row: dict[str, Any], **data: Any) -> tuple[Any, dict[str, Any], tuple[str, ...]]:
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    section = DataSection.model_validate({"train": str(folder / "rows.jsonl"), **data})
    prompts = open_prompts(section, 0)
    return *prompts.draw(0), prompts.columns


def test_a_template_has_columns_and_the_lettered_answers(tmp_path: Path) -> None:
    row = {"question": "Which?", "options": ["one", "two"], "right": 1, "tests": ["a", "b"], "choices": 3}
    prompt, columns, names = drawn(tmp_path, row, prompt_template="{question}\n{choices}\n{tests}", choices=CHOICES)
    assert prompt == "Which?\nA. one\nB. two\na\nb"
    assert columns == {**row, "answer_choices": ["one", "two"], "answer_letter": "B"}
    assert set(names) == columns.keys()


def test_a_system_prompt_makes_a_chat_of_a_template(tmp_path: Path) -> None:
    prompt, _, _ = drawn(tmp_path, {"question": "Which?"}, prompt_template="Q: {question}", system_prompt="Be brief.")
    assert [message["content"] for message in prompt] == ["Be brief.", "Q: Which?"]


@pytest.mark.parametrize(
    ("row", "data", "message"),
    [
        (
            {"question": "Which?"},
            {"prompt_template": "{questoin}"},
            r"line 1: .*\{questoin\}, but the columns",
        ),
        ({"question": None}, {"prompt_template": "{question}"}, "line 1: column 'question' is null"),
        ({"prompt": "Which?", "options": [], "right": 0}, {"choices": CHOICES}, "line 1: .*have 0 answers"),
        ({"prompt": "", "options": ["a", "b"], "right": 0}, {"choices": CHOICES}, "column 'prompt' is empty"),
    ],
)
def test_a_row_that_gives_no_prompt_is_an_error_at_its_line(
    row: dict[str, Any], data: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        drawn(tmp_path, row, **data)
