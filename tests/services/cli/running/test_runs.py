"""`runs` and `watch` without a coordinator: what a directory has on record."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from command_line import NOBODY, paceline

from paceline.calls.token import VARIABLE
from paceline.services.cli.main import main
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.spec.reading import parse_spec, spec_to_yaml

SPEC = parse_spec(
    {
        "name": "sums",
        "policy": {"model_name": "m"},
        "data": {"train": "d"},
        "rewards": [{"function": "length"}],
        "grpo": {"max_num_steps": 2},
    }
)

LONG = "loss is nan at step 3; correct policy.optimizer.lr, " * 9


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A directory with a run that has succeeded and one that is paused; its ledger is still open."""
    folder = tmp_path / "runs"
    ledger = Ledger(folder / "ledger.sqlite")
    with ledger.transaction():
        for number, state in ((1, "succeeded"), (2, "paused")):
            run_id = f"sums-{number}"
            (folder / run_id).mkdir()
            ledger.add_run(run_id, spec_to_yaml(SPEC), str(folder / run_id), 2)
            is_over = state == "succeeded"
            ledger.update_run(run_id, state=state, next_step=2 if is_over else 1, message="" if is_over else LONG)
            ledger.add_event(run_id, "state", {"state": "running"})
            ledger.add_event(run_id, "step", {"step": 0, "reward": 0.25, "loss": 0.5, "age/0": 2})
            ledger.add_event(run_id, "step", {"step": 1, "reward": 0.75, "loss": None})
            ledger.add_event(run_id, "evaluation", {"step": 2, "reward": 0.875, "samples": 4})
            ledger.add_event(run_id, "state", {"state": state})
    yield folder
    ledger.close()


def test_runs_of_a_directory_are_listed(directory: Path) -> None:
    result = paceline("runs", "--directory", directory, "--json")
    assert result.exit_code == 0, result.output
    facts = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(run["run_id"], run["state"], run["step"]) for run in facts] == [
        ("sums-1", "succeeded", 2),
        ("sums-2", "paused", 1),
    ]
    assert facts[0]["directory"] == str(directory / "sums-1")


def test_a_long_message_makes_no_wide_table(directory: Path) -> None:
    result = paceline("runs", "--directory", directory)
    assert max(map(len, result.stdout.splitlines())) <= 120
    table, _, below = result.stdout.partition("sums-2:\n")
    assert len(table.splitlines()) == 3
    assert below.split() == LONG.split()


def test_a_paused_run_of_a_directory_is_cancelled_without_a_coordinator(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    monkeypatch.setenv(VARIABLE, str(copy / "token"))
    with contextlib.closing(Ledger(directory / "ledger.sqlite", read_only=True)) as ledger:
        copy.mkdir()
        ledger.db.execute("VACUUM INTO ?", (str(copy / "ledger.sqlite"),))
    result = paceline("cancel", "sums-2", "--directory", copy, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["state"] == "cancelled"
    listed = paceline("runs", "--directory", copy, "--json").stdout.splitlines()
    assert [json.loads(line)["state"] for line in listed] == ["succeeded", "cancelled"]
    empty = paceline("cancel", "sums-2", "--directory", tmp_path)
    assert empty.exit_code == 1
    assert "no ledger in" in empty.stderr


def test_a_recorded_run_is_shown_and_its_state_is_the_exit_status(directory: Path) -> None:
    ended = paceline("watch", "sums-1", "--directory", directory)
    assert ended.exit_code == 0, ended.output
    assert "evaluation of version 2 (after step 1): reward 0.875" in ended.stdout
    assert "sums-1 succeeded after 2 of 2 steps" in ended.stdout
    paused = paceline("watch", directory / "sums-2")
    assert paused.exit_code == 1
    assert "sums-2 paused after 1 of 2 steps" in paused.stdout
    missing = paceline("watch", "sums-9", "--directory", directory)
    assert missing.stderr.startswith("Error: no run 'sums-9'")


def test_a_copy_shows_its_own_place(directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    shutil.rmtree(directory / "sums-1")
    facts = json.loads(paceline("runs", "--directory", copy, "--json").stdout.splitlines()[0])
    assert facts["directory"] == str(copy / "sums-1")


def test_the_default_directory_is_read_only_when_nobody_named_a_coordinator(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory.parent)
    monkeypatch.setattr("paceline.services.cli.recorded.source._answers", lambda client: False)
    monkeypatch.delenv("PACELINE_COORDINATOR", raising=False)
    result = CliRunner().invoke(main, ["runs"])
    assert result.exit_code == 0, result.output
    assert "the command reads the records in runs" in result.stderr
    assert "sums-2" in result.stdout
    named = paceline("runs", coordinator=NOBODY)
    assert named.exit_code == 1
    assert named.stderr.startswith("Error: no coordinator answers at")


def test_a_directory_without_a_ledger_is_named(tmp_path: Path) -> None:
    result = paceline("runs", "--directory", tmp_path)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: no ledger at {tmp_path / 'ledger.sqlite'}")
