"""Questions that a model was trained on are found, and a set that cannot be compared is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.apps.evaluation.evaluate import compared, warnings_of
from paceline.spec.sections.data import DataSource

RECORDED = Path(__file__).resolve().parents[4] / "shared" / "data" / "gsm8k"
QUESTIONS = ["How many eggs does Janet sell each day at the market?", "What is two and two?"]


def source(path: Path, rows: list[dict[str, Any]]) -> DataSource:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSource("--trained-on", str(path), "train")


def test_questions_among_the_training_data_are_counted(tmp_path: Path) -> None:
    rows = [{"question": "Another one."}, {"question": QUESTIONS[0].upper()}]
    sets = [
        source(tmp_path / "with.jsonl", rows),
        source(tmp_path / "without.jsonl", rows[:1]),
        source(tmp_path / "other.jsonl", [{"text": "Another one."}]),
        DataSource("--trained-on", str(tmp_path / "nothing.jsonl"), "train"),
    ]
    found = compared(QUESTIONS, sets, "prompt")
    assert [each.get("questions") for each in found] == [1, 0, None, None]
    assert found[0]["first"] == [0]
    first, second, third = warnings_of(found, len(QUESTIONS))
    assert "1 of 2 questions" in first
    assert "(first: problem 0)" in first
    assert "no column with prompts; columns: ['text']" in second
    assert "nothing.jsonl could not be compared" in third


def test_gsm8ks_recorded_solutions_belong_to_its_test_questions() -> None:
    if not RECORDED.is_dir():
        pytest.skip("the recorded solutions are not on this machine")
    questions = [json.loads(line)["question"] for line in (RECORDED / "test.jsonl").read_text().splitlines()]
    names = ("example_model_solutions.jsonl", "train.jsonl")
    sets = [DataSource("--trained-on", str(RECORDED / name), "train") for name in names]
    solutions, training = compared(questions, sets, "question")
    assert (solutions["rows"], solutions["questions"]) == (1319, 1319)
    assert training["questions"] < 14  # 1 % of them
    assert warnings_of([solutions], len(questions))[0].startswith("1,319 of 1,319 questions")
