"""`paceline eval` and `paceline gate` on a tiny model: files, numbers, exit statuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tiny_chat import save_tiny_chat

from paceline.evaluation.results import read_result
from services.cli.main import main

EVALUATION = """
name: short
policy: {generation: {max_new_tokens: 6, stop_strings: [zz]}}
data: {validation: problems.jsonl}
grpo: {val_samples_per_prompt: 4, max_val_samples: 30}
rewards:
  - {function: "rewards.py:is_even", name: even}
"""
REWARDS = """
def is_even(prompts, completions, **columns):
    return [float(len(text) % 2 == 0) for text in completions]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny_chat(tmp_path / "model")
    (tmp_path / "eval.yaml").write_text(EVALUATION)
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [json.dumps({"prompt": f"{i}+{i}="}) for i in range(40)]
    (tmp_path / "problems.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


def evaluated(folder: Path, name: str, *more: str) -> Any:
    return run("eval", folder / "eval.yaml", *more, "--model", folder / "model", "--output", folder / name)


def test_an_evaluation_writes_what_its_samples_say(folder: Path) -> None:
    done = evaluated(folder, "first")
    assert done.exit_code == 0, done.output
    assert "30 problems, 0 failed, 4 completions each" in done.output
    result, samples = read_result(folder / "first")
    assert len(samples) == 120
    assert all(sample["rewards"]["even"] == float(len(sample["completion"]) % 2 == 0) for sample in samples)
    by_problem = [[s["reward"] for s in samples[start : start + 4]] for start in range(0, 120, 4)]
    assert len({sample["problem"] for sample in samples}) == 30
    metrics = result["metrics"]
    assert metrics["reward/even"]["value"] == pytest.approx(sum(map(sum, by_problem)) / 120)
    assert metrics["pass@4/even"]["value"] == pytest.approx(sum(any(each) for each in by_problem) / 30)
    assert metrics["pass@1/even"]["value"] == pytest.approx(metrics["reward/even"]["value"])
    assert {"pass@2/even", "cons@4/even"} <= metrics.keys()
    assert result["digests"].keys() == {"model", "samples", "spec"}
    assert evaluated(folder, "again").exit_code == 0
    assert read_result(folder / "again")[0] == result


def test_the_gate_has_an_exit_status_for_each_outcome(folder: Path) -> None:
    assert evaluated(folder, "first").exit_code == 0
    assert evaluated(folder, "few", "grpo.max_val_samples=5").exit_code == 0
    first, verdict = folder / "first", folder / "verdict.json"
    same = run("gate", first, "--baseline", first, "--output", verdict)
    assert same.exit_code == 0, same.output
    found = json.loads(verdict.read_text())
    assert found["outcome"] == "passed"
    assert found["digests"]["candidate"] == read_result(first)[0]["digest"]
    bounded = run("gate", first, "--baseline", first, "--min", "reward=2")
    assert bounded.exit_code == 1
    assert "must be at least 2: failed" in bounded.output
    assert run("gate", folder / "few", "--baseline", first).exit_code == 2
    assert run("gate", first, "--baseline", first, "--min", "reward").exit_code == 2


def test_a_file_without_problems_is_refused_with_the_key(folder: Path) -> None:
    (folder / "eval.yaml").write_text("rewards: [{function: exact_match}]")
    refused = run("eval", folder / "eval.yaml", "--model", folder / "model", "--output", folder / "none")
    assert refused.exit_code == 1
    assert "data.validation is not set" in refused.output
