"""The command: the report of a study that exists, one process at a time, and the faults of its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from sweep_coordinator import SPEC, SweepCoordinator, sweep_of, trials

from paceline.apps.sweeps.study import SweepStudy
from paceline.apps.sweeps.sweep_file import load_sweep
from paceline.services.cli.main import main
from paceline.services.local.folder_lock import FolderLock


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep_of().model_dump(mode="json", exclude_none=True)))
    return tmp_path


def test_the_report_is_written_of_the_trials_so_far_without_a_coordinator(folder: Path) -> None:
    place = folder / "runs" / "sweeps"
    place.mkdir(parents=True)
    (place / "spec.yaml").write_text(yaml.safe_dump(SPEC))
    trials(place, SweepCoordinator(), load_sweep(folder / "sweep.yaml")).run()
    result = CliRunner().invoke(main, ["sweep", "spec.yaml", "sweep.yaml", "--report", "out.html", "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.output)
    assert facts["trials"] == 6
    assert facts["best"]["values"].keys() == {"policy.optimizer.lr"}
    assert "History" in (folder / "out.html").read_text()


def test_no_trial_at_its_end_is_an_error(folder: Path) -> None:
    SweepStudy(folder / "runs" / "sweeps" / "lr", load_sweep(folder / "sweep.yaml"))
    result = CliRunner().invoke(main, ["sweep", "spec.yaml", "sweep.yaml", "--report", "out.html"])
    assert result.exit_code == 1
    assert "none of 0 trials ran to its end" in result.output


def test_a_report_of_no_study_is_told(folder: Path) -> None:
    result = CliRunner().invoke(main, ["sweep", "spec.yaml", "sweep.yaml", "--report", "out.html"])
    assert result.exit_code == 1
    assert "there is no study in runs/sweeps/lr" in result.output
    assert not (folder / "runs").exists()


def test_two_processes_do_not_run_one_sweep(folder: Path) -> None:
    lock = FolderLock(folder / "runs" / "sweeps" / "lr" / "sweep.lock", "a test")
    lock.take()
    try:
        result = CliRunner().invoke(main, ["sweep", "spec.yaml", "sweep.yaml"])
    finally:
        lock.release()
    assert result.exit_code == 1
    assert "sweep.lock" in result.output or "`paceline sweep`" in result.output


def test_a_misspelt_file_is_one_line(folder: Path) -> None:
    result = CliRunner().invoke(main, ["sweep", "spec.yaml", "no-such.yaml"])
    assert result.exit_code != 0
    assert "no-such.yaml" in result.output + str(result.exception)
