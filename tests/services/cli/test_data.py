"""data inspect: counts, what is left out, samples that cannot move the cursor, and test questions among the training data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import paceline

ROOT = Path(__file__).parents[3]
RECORDED = ROOT.parent / "shared" / "data" / "gsm8k"


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def spec_of(folder: Path, algorithm: str, **data: str) -> Path:
    path = folder / "spec.yaml"
    keys = ", ".join(f"{key}: {value}" for key, value in data.items())
    path.write_text(f"algorithm: {algorithm}\npolicy: {{model_name: none}}\ndata: {{{keys}}}\n")
    return path


def test_test_questions_among_the_training_data_are_warned_of(tmp_path: Path) -> None:
    questions = [f"Ann has {n} pens and buys {n + 1} more. How many has she?" for n in range(4)]
    write(
        tmp_path / "train.jsonl",
        [{"prompt": q, "completion": "\x1b[2J7"} for q in [*questions[:2], "How are you?"]],
    )
    write(tmp_path / "test.jsonl", [{"question": q, "answer": "7"} for q in questions])
    spec = spec_of(tmp_path, "sft", train="./train.jsonl")
    result = paceline("data", "inspect", spec)
    assert result.exit_code == 0, result.output
    assert "data.train: 3 rows with the columns prompt, completion" in result.output
    assert "warning: 2 rows of data.train" in result.output
    assert "\\x1b[2J7" in result.output
    facts = json.loads(paceline("data", "inspect", spec, "--json").stdout)
    (overlap,) = facts["overlap"]
    assert (overlap["rows"], overlap["compared"], overlap["first"]) == (2, 3, 0)
    assert facts["samples"][2]["read"] == "How are you?"


def test_traces_say_what_is_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": p, "completion": f"{r}", "final_reward": r} for p, r in [("a", 1), ("a", 0), ("b", 1)]]
    write(tmp_path / "traces.jsonl", rows)
    result = paceline("data", "inspect", spec_of(tmp_path, "offline_grpo", train="./traces.jsonl"))
    assert "1 groups of 2 traces" in result.output
    assert "left out: 1 (only trace of its prompt)" in result.output


def test_the_recorded_solutions_belong_to_test_questions(tmp_path: Path) -> None:
    if not RECORDED.is_dir():
        pytest.skip("the recorded solutions are not on this machine")
    (tmp_path / "test.jsonl").write_bytes((RECORDED / "test.jsonl").read_bytes())
    solutions = (RECORDED / "example_model_solutions.jsonl").read_text().splitlines()
    rows = [
        {"prompt": row["question"], "completion": row["ground_truth"]} for row in map(json.loads, solutions)
    ]
    write(tmp_path / "solutions.jsonl", rows)
    spec = spec_of(tmp_path, "sft", train="./solutions.jsonl")
    (overlap,) = json.loads(paceline("data", "inspect", spec, "--json").stdout)["overlap"]
    assert (overlap["rows"], overlap["compared"]) == (1319, 1319)
