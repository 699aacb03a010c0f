"""A folder with a tiny model and a file of questions with answers to choose from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from evaluation_questions import QUESTIONS
from tiny_chat import save_tiny_chat

CHOOSE = """
name: choose
policy: {generation: {max_new_tokens: 8, temperature: 1.0e-4}}
data:
  validation: questions.jsonl
  prompt_key: question
  prompt_template: "Question: {question}\\nAnswer: "
  apply_chat_template: never
  choices: {keys: [options], answer_key: right}
evaluation: {method: choose, group_by: [kind]}
rewards:
  - {function: choice_accuracy, name: acc}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_chat(tmp_path / "model")
    rows = [
        {"question": question, "options": options, "right": right, "kind": "odd" if index % 2 else "even"}
        for index, (question, options, right) in enumerate(QUESTIONS)
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "choose.yaml").write_text(CHOOSE)
    return tmp_path
