"""`paceline metrics`: a table of last values, CSV and JSON from a run's record."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from command_line import paceline

from paceline.client import Event
from paceline.services.cli.recorded.metrics import metric_rows, selected
from paceline.services.coordinator.ledger.ledger import Ledger

STEPS = (
    {"step": 0, "reward": 0.25, "loss": 0.5, "age/0": 2, "note": "text"},
    {"step": 1, "reward": 0.75, "loss": None},
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    with ledger.transaction():
        ledger.add_run("sums-1", "{}", str(tmp_path / "sums-1"), 2)
        for content in STEPS:
            ledger.add_event("sums-1", "step", dict(content))
        ledger.add_event("sums-1", "evaluation", {"step": 2, "reward": 0.875})
    ledger.close()
    (tmp_path / "sums-1").mkdir()
    return tmp_path


def test_rows_have_the_numbers_of_the_wanted_kind_and_names() -> None:
    events = [Event(number, "step", dict(content)) for number, content in enumerate(STEPS)]
    assert metric_rows(events, "step") == [
        {"step": 0, "reward": 0.25, "loss": 0.5, "age/0": 2},
        {"step": 1, "reward": 0.75, "loss": None},
    ]
    assert selected(metric_rows(events, "step"), ["age/*"]) == [{"step": 0, "age/0": 2}, {"step": 1}]
    assert metric_rows(events, "evaluation") == []


def test_the_table_has_last_and_range(directory: Path) -> None:
    result = paceline("metrics", "sums-1", "--directory", directory)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["loss", "0.5", "0.5", "0.5", "1"] in lines
    assert ["reward", "0.75", "0.25", "0.75", "2"] in lines
    assert paceline("metrics", directory / "sums-1", "--kind", "evaluation").stdout.count("0.875") == 3


def test_csv_and_json_have_every_step(directory: Path) -> None:
    text = paceline("metrics", "sums-1", "--csv", "--directory", directory).stdout
    rows = list(csv.DictReader(text.splitlines()))
    assert [row["reward"] for row in rows] == ["0.25", "0.75"]
    assert rows[1]["loss"] == ""
    lines = paceline("metrics", "sums-1", "reward", "--json", "--directory", directory).stdout
    assert [json.loads(line) for line in lines.splitlines()] == [
        {"step": 0, "reward": 0.25},
        {"step": 1, "reward": 0.75},
    ]


def test_a_run_that_is_not_there_is_named(directory: Path) -> None:
    result = paceline("metrics", "sums-7", "--directory", directory)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: no run 'sums-7'")


def test_a_metric_that_is_not_there_is_answered_with_the_nearest(directory: Path) -> None:
    result = paceline("metrics", "sums-1", "rewrd", "--directory", directory)
    assert (result.exit_code, result.stderr) == (
        1,
        "Error: sums-1 has no metric 'rewrd'; did you mean 'reward'?\n",
    )
    result = paceline("metrics", "sums-1", "x/*", "--directory", directory)
    assert result.stderr == "Error: sums-1 has no metric 'x/*'; `paceline metrics sums-1` lists its metrics\n"


def test_a_metric_is_explained_without_a_run(directory: Path) -> None:
    result = paceline("metrics", "--explain", "age")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("age (")
    assert "healthy: at most `async_grpo.max_trajectory_age_steps`" in result.stdout
    names = [
        json.loads(line)["name"] for line in paceline("metrics", "--explain", "age*", "--json").stdout.splitlines()
    ]
    assert {"age", "age/<age>"} <= set(names)
    assert "did you mean 'age'?" in paceline("metrics", "--explain", "agee").stderr
    assert "name a RUN" in paceline("metrics").stderr
    assert "takes no RUN" in paceline("metrics", "sums-1", "--explain", "age", "--directory", directory).stderr
