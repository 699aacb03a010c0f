"""The benchmark on recorded GSM8K solutions: its split, its pairs, its interval, and one short run of it."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
RECORDED = ROOT.parent / "shared" / "data" / "gsm8k" / "example_model_solutions.jsonl"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = ROOT / "benchmarks" / "gsm8k_preferences.py"
    spec = importlib.util.spec_from_file_location("gsm8k_preferences", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_wilsons_interval(benchmark: ModuleType) -> None:
    # Newcombe 1998, table I: 81 of 263, 95 %.
    assert benchmark.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)


def test_questions_are_held_out_once_and_whole(benchmark: ModuleType, tmp_path: Path) -> None:
    if not RECORDED.is_file():
        pytest.skip("the recorded solutions are not on this machine")
    questions = benchmark.read_questions(RECORDED)
    assert len(questions) == 731
    held_out: list[str] = []
    for fold in range(3):
        benchmark.write_fold(questions, fold, 3, tmp_path / str(fold))
        own = [row["prompt"] for row in read(tmp_path / str(fold) / "validation.jsonl")]
        assert not set(own) & {row["prompt"] for row in read(tmp_path / str(fold) / "train.jsonl")}
        held_out += own
    assert sorted(held_out) == sorted({question["prompt"] for question in questions})


@pytest.mark.merge
@pytest.mark.slow
def test_a_short_run_judges_every_held_out_question(benchmark: ModuleType, tmp_path: Path) -> None:
    questions = [
        {
            "prompt": f"Ann has {a} pens and buys {b}. How many?\n",
            "right": [f"{a}+{b}={a + b}\nA: {a + b}"],
            "wrong": [f"{a}-{b}={a - b}\nA: {a - b}", f"A: {a}"],
        }
        for a in range(5, 9)
        for b in range(2, 5)
    ]
    options = argparse.Namespace(
        algorithms=benchmark.ALGORITHMS,
        folds=2,
        vocabulary=300,
        hidden=16,
        sft_steps=2,
        steps=12,
        dpo_lr=3e-3,
        rm_lr=3e-3,
        offline_lr=3e-3,
    )
    results = benchmark.run_fold(questions, 0, tmp_path, options)
    held_out = len(read(tmp_path / "data" / "validation.jsonl"))
    assert 0 < held_out < 12
    for name in ("dpo", "rm", "offline_grpo"):
        assert results[name]["after"]["n"] == held_out
    assert results["offline_grpo"]["before"]["accuracy"] == 0.5
    assert results["offline_grpo"]["after"]["accuracy"] > 0.5
    for name in ("dpo", "rm"):
        assert results[name]["after"]["margin"] > results[name]["before"]["margin"]
