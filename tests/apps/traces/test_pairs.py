"""Pairs from traces: their choice, their split by prompt, and the numbers of GSM8K's recorded solutions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.apps.traces.traces import PairReport, PairRules, pairs_of_traces
from paceline.data.rows import open_rows
from paceline.data.traces import TraceKeys

ROOT = Path(__file__).parents[3]
RECORDED = ROOT.parent / "shared" / "data" / "gsm8k" / "example_model_solutions.jsonl"


RULES = PairRules()


def pairs_of(
    folder: Path, rows: list[dict[str, Any]], rules: PairRules = RULES
) -> tuple[list[tuple[dict[str, Any], bool]], PairReport]:
    path, report = folder / "traces.jsonl", PairReport()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(pairs_of_traces(open_rows(str(path), "train"), TraceKeys(), rules, report)), report


def traces(prompt: str, *rewards: float | None) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "completion": f"{r}", "final_reward": r} for r in rewards]


def test_every_good_completion_with_every_bad_one(tmp_path: Path) -> None:
    rows = [*traces("a", 1.0, 0.1, 0.7, 0.6, 0.4), *traces("b", 0.9, 0.8), *traces("c", None)]
    pairs, report = pairs_of(tmp_path, rows)
    assert [(row["chosen"], row["rejected"], round(row["margin"], 6)) for row, _ in pairs] == [
        ("1.0", "0.1", 0.9),
        ("1.0", "0.4", 0.6),
        ("0.7", "0.1", 0.6),
        ("0.7", "0.4", 0.3),
    ]
    assert report.left_out == {
        "reward from 0.5 to below 0.7": 1,
        "prompt with only chosen or only rejected completions": 2,
        "no reward": 1,
    }
    assert (report.traces, report.traces_used, report.prompts, report.prompts_used) == (8, 4, 3, 1)
    assert report.traces == report.traces_used + sum(report.left_out.values())


def test_of_too_many_pairs_the_largest_margins_stay(tmp_path: Path) -> None:
    rules = PairRules(max_pairs_per_prompt=1)
    pairs, report = pairs_of(tmp_path, traces("a", 0.7, 0.4, 1.0, 0.1), rules)
    assert [(row["chosen"], row["rejected"]) for row, _ in pairs] == [("1.0", "0.1")]
    assert report.pairs_left_out == {"beyond max_pairs_per_prompt": 3}
    assert report.traces == report.traces_used + sum(report.left_out.values())


def test_a_prompt_is_held_out_with_all_of_its_pairs(tmp_path: Path) -> None:
    rows = [row for number in range(200) for row in traces(f"prompt {number}", 1.0, 0.9, 0.0)]
    pairs, report = pairs_of(tmp_path, rows, PairRules(held_out=0.25))
    held_out = {row["prompt"] for row, is_held_out in pairs if is_held_out}
    trained = {row["prompt"] for row, is_held_out in pairs if not is_held_out}
    assert not held_out & trained
    assert 25 < len(held_out) < 75
    assert report.pairs_held_out == 2 * len(held_out)


def test_equal_completions_are_no_pair(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "same", "final_reward": reward} for reward in (1.0, 0.0)]
    pairs, report = pairs_of(tmp_path, rows)
    assert (pairs, report.pairs_left_out) == ([], {"equal completions": 1})


def test_the_recorded_solutions_of_gsm8k(tmp_path: Path) -> None:
    if not RECORDED.is_file():
        pytest.skip("the recorded solutions are not on this machine")
    rows = []
    for line in RECORDED.read_text().splitlines():
        question = json.loads(line)
        rows += [
            {
                "prompt": question["question"],
                "completion": value["solution"],
                "final_reward": float(value["is_correct"]),
            }
            for value in question.values()
            if isinstance(value, dict)
        ]
    pairs, report = pairs_of(tmp_path, rows)
    assert (report.prompts_used, len(pairs)) == (731, 2429)
    assert {row["margin"] for row, _ in pairs} == {1.0}
