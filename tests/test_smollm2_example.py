"""The example with SmolLM2: its data, and the whole study with a tiny random model in place of the pretrained one."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from python_path import python_path
from tiny_chat import save_tiny_chat

from paceline.services.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "smollm2"
TASKS = ("words", "gsm8k", "calculator")


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the example, with its data, files in GSM8K's form, and a tiny chat model."""
    copied = tmp_path / "smollm2"
    shutil.copytree(EXAMPLE, copied, ignore=shutil.ignore_patterns("data", "runs", "__pycache__"))
    subprocess.run([sys.executable, "prepare.py"], cwd=copied, check=True, capture_output=True)
    solutions = [
        (a, b, f"Ann has {a}+{b}=<<{a}+{b}={a + b}>>{a + b} pens.\n#### {a + b}")
        for a in range(2, 7)
        for b in range(2, 7)
    ]
    rows = [{"question": f"Ann has {a} pens and buys {b}. How many?", "answer": answer} for a, b, answer in solutions]
    for name, part in (("train", rows[:20]), ("test", rows[20:])):
        (copied / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return copied


def test_held_out_problems_are_in_no_training_file(folder: Path) -> None:
    words = {name: rows_of(folder / "data" / "words" / f"{name}.jsonl") for name in ("sft", "train", "held_out")}
    numbers = runpy.run_path(str(folder / "prepare.py"))
    names = [*numbers["NAMES"], *numbers["THINGS"]]

    def problem(row: dict[str, Any]) -> str:
        return " ".join(word for word in row["prompt"].rstrip("?.").split() if word.rstrip(".?") not in names)

    held_out = {problem(row) for row in words["held_out"]}
    assert not held_out & {problem(row) for name in ("sft", "train") for row in words[name]}
    kinds = [row["kind"] for row in words["held_out"]]
    assert {kinds.count(kind) for kind in numbers["KINDS"]} == {60}
    said = {row["prompt"]: row["answer"] for rows in words.values() for row in rows}
    assert said["What is seven times eight?"] == "56"
    before = {path: path.read_bytes() for path in (folder / "data").rglob("*.jsonl")}
    subprocess.run([sys.executable, "prepare.py"], cwd=folder, check=True, capture_output=True)
    assert before == {path: path.read_bytes() for path in (folder / "data").rglob("*.jsonl")}


def test_every_spec_reads_its_rows(folder: Path) -> None:
    files = [f"data.{key}={folder / name}" for key, name in (("train", "train.jsonl"), ("validation", "test.jsonl"))]
    for task in TASKS:
        overrides = [*files, "data.train_config=null"] if task == "gsm8k" else []
        for stage in ("sft", "grpo"):
            words = ["data", "inspect", str(folder / f"{task}-{stage}.yaml"), *overrides]
            done = CliRunner().invoke(main, words, catch_exceptions=False)
            assert done.exit_code == 0, done.output
            assert "warning" not in done.output


def test_gsm8k_rows_are_chosen_by_length_and_steps() -> None:
    rows = runpy.run_path(str(EXAMPLE / "rows.py"))
    step = "It is 2+3=<<2+3=5>>5."
    assert rows["short_solution"]({"answer": f"{step}\n#### 5"})["completion"] == "It is 2+3=5.\n#### 5"
    assert rows["short_solution"]({"answer": step * 20}) is None
    assert rows["at_most_two_steps"]({"answer": step * 2}) is not None
    assert rows["at_most_two_steps"]({"answer": step * 3}) is None


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_the_study_trains_compares_and_continues(folder: Path, task: str) -> None:
    tiny = ["policy.max_total_sequence_length=512", "cluster.threads_per_process=1"]
    grpo = ["grpo.max_num_steps=2", "grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=2"]
    short = ["grpo.max_val_samples=5", "grpo.val_samples_per_prompt=2", "grpo.use_dynamic_sampling=false"]
    command = [sys.executable, "train.py", task, "--model", str(save_tiny_chat(folder / "model")), "--ages", "1"]
    command += ["--gsm8k", str(folder)] if task == "gsm8k" else []
    command += ["--sft", "sft.max_num_steps=2", "sft.num_examples_per_step=4", *tiny, "--grpo", *grpo, *short, *tiny]
    environment = os.environ | {"PYTHONPATH": python_path(ROOT)}

    def commands() -> list[str]:
        done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return [line for line in done.stdout.splitlines() if line.startswith("$ paceline")]

    assert sum(line.startswith("$ paceline up") for line in commands()) == 2
    results = folder / "runs" / task
    report = json.loads((results / "report.json").read_text())["seed-0-age-1"]
    assert report["tokens_per_s"] > 0
    assert len(report["curve"]) >= 2
    assert (results / "curve.svg").read_text().count("<polyline") == 1
    if task != "calculator":
        assert set(report) > {"against start", "against seed-0-sft"}
        assert 0 < report["against start"]["reward"]["p"] <= 1
    assert not any(line.startswith(("$ paceline up", "$ paceline eval")) for line in commands())
