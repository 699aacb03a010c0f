"""Inspect's command line for an endpoint, and the log that its version 0.3.285 writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.apps.evaluation.harnesses import inspect_command as command
from paceline.apps.evaluation.harnesses import inspect_variables as variables
from paceline.apps.evaluation.harnesses import read_inspect as read
from paceline.apps.evaluation.harnesses import result_of
from paceline.errors import InvalidInput


def log(status: str, samples: list[dict[str, Any]]) -> str:
    about = {"task": "made", "packages": {"inspect_ai": "0.3.285"}}
    error = {"message": "no such column"} if status == "error" else None
    return json.dumps({"status": status, "eval": about, "error": error, "results": {}, "samples": samples})


def sample(name: str, epoch: int, value: Any) -> dict[str, Any]:
    return {
        "id": name,
        "epoch": epoch,
        "input": f"Question {name}",
        "output": {"completion": "four"},
        "scores": {"match": {"value": value}},
    }


def test_epochs_are_samples_of_a_problem_and_letters_are_numbers(tmp_path: Path) -> None:
    rows = [
        sample("b", 1, "C"),
        sample("b", 2, "P"),
        sample("a", 1, "I"),
        sample("a", 2, {"x": 2, "y": "none"}),
    ]
    (tmp_path / "log.json").write_text(log("success", rows))
    run = read(tmp_path)
    assert [(each.index, each.sample, each.scores) for each in run.samples] == [
        (0, 0, {"match": 1.0}),
        (0, 1, {"match": 0.5}),
        (1, 0, {"match": 0.0}),
        (1, 1, {"match/x": 2.0}),
    ]
    result, samples = result_of(run, "inspect", [], "model", 0)
    assert (result["k"], result["problems"], result["harness"]["version"]) == (2, 2, "0.3.285")
    assert result["metrics"]["reward/made/match"]["value"] == pytest.approx((0.75 + 0.0) / 2)
    assert len({each["problem"] for each in samples}) == 2


def test_the_endpoint_is_in_arguments_and_variables(tmp_path: Path) -> None:
    found = command("http://h/v1", "tiny", "unused", tmp_path, ["task.py", "--epochs", "2"])
    assert found[:4] == ["eval", "task.py", "--epochs", "2"]
    assert found[found.index("--model") + 1] == "openai-api/paceline/tiny"
    assert variables("http://h/v1") == {"PACELINE_BASE_URL": "http://h/v1", "PACELINE_API_KEY": "none"}


def test_a_failed_task_is_named_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="has written no log"):
        read(tmp_path)
    (tmp_path / "log.json").write_text(log("error", []))
    with pytest.raises(InvalidInput, match="made ended with error: no such column"):
        read(tmp_path)
