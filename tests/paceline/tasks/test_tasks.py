"""Every task file on made rows with exactly the columns of its public data set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.data.rows import open_prompts
from paceline.spec import RunSpec
from paceline.tasks import task_file, task_names
from reward.builtin import BUILTIN_FUNCTIONS
from reward.builtin.code_tests import code_settings, read_tests
from services.cli.evaluating.evaluate import evaluation_spec

MODEL = RunSpec.model_validate(
    {
        "policy": {"model_name": "model", "max_total_sequence_length": 4096},
        "data": {"train": "none"},
        "rewards": [{"function": "exact_match"}],
    }
)
ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "3 * 24?", "answer": "3 * 24 = <<3*24=72>>72\n#### 72"},
    "math500": {
        "problem": "Half of one?",
        "solution": "It is $\\boxed{\\frac{1}{2}}$.",
        "answer": "\\frac{1}{2}",
        "subject": "Prealgebra",
        "level": 1,
        "unique_id": "test/prealgebra/1.json",
    },
    "aime24": {
        "id": 60,
        "problem": "How many?",
        "solution": "033",
        "answer": "033",
        "url": "https://example.org",
        "year": "2024",
    },
    "humaneval": {
        "task_id": "HumanEval/0",
        "prompt": "def one():\n",
        "canonical_solution": "    return 1\n",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
        "entry_point": "one",
    },
}
ANSWERS = {"gsm8k": r"\boxed{72}", "math500": r"\boxed{1/2}", "aime24": r"\boxed{33}"}


def spec_and_row(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[RunSpec, Any, dict[str, Any]]:
    (folder / "rows.jsonl").write_text(json.dumps(ROWS[name]) + "\n")
    monkeypatch.chdir(folder)
    file = task_file(name)
    assert file is not None
    overrides = ("data.validation=rows.jsonl", "data.validation_config=null")
    spec = evaluation_spec(file, overrides, MODEL)
    return spec, *open_prompts(spec.data, 0, validation=True).draw(0)


def test_every_task_is_tested() -> None:
    assert task_names() == sorted(ROWS)
    assert task_file("no such task") is None


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_mathematics_is_scored_by_the_columns_of_the_data_set(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, prompt, columns = spec_and_row(name, tmp_path, monkeypatch)
    assert prompt[-1] == {"role": "user", "content": ROWS[name].get("question") or ROWS[name]["problem"]}
    (reward,) = spec.rewards
    completions = [[{"role": "assistant", "content": text}] for text in (ANSWERS[name], r"\boxed{5}")]
    lists = {column: [value] * 2 for column, value in columns.items()}
    scores = BUILTIN_FUNCTIONS[reward.function]([prompt] * 2, completions, **reward.kwargs, **lists)
    assert scores == [1.0, 0.0]


def test_programs_have_their_tests_and_their_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, prompt, columns = spec_and_row("humaneval", tmp_path, monkeypatch)
    assert prompt == "def one():\n"
    chosen = code_settings(spec.rewards[0].kwargs)
    cases: Any = read_tests(columns["test"], columns["entry_point"], chosen)
    assert cases.entry_point == "one"
    assert chosen.columns <= columns.keys()
