"""`paceline sweep` with real services on the demo's task: it finds a better learning rate than a bad start, and goes on after
SIGKILL without running a trial twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from command_line import paceline
from forked_services import ForkedCluster
from report_content import content_of

from paceline.client import Client, state_name
from paceline.services.cli.recorded.source import runs_of
from paceline.services.demo.run import make_files
from paceline.spec import ClusterSection, RunSpec
from paceline.spec.reading import spec_to_yaml

PACELINE = [sys.executable, "-c", "from paceline.services.cli.main import main; main()"]
TRIALS, KILLED_AT = 8, 3
LIMIT_S = 900
SWEEP = {
    "name": "lr",
    "trials": TRIALS,
    "search": {
        "policy.optimizer.lr": {"low": 1e-5, "high": 1e-2, "log": True},
        "loss_fn.ratio_clip_max": {"choices": [0.2, 0.28]},
        "async_grpo.max_trajectory_age_steps": {"low": 0, "high": 2},
    },
    "start": [{"policy.optimizer.lr": 1e-5, "loss_fn.ratio_clip_max": 0.2, "async_grpo.max_trajectory_age_steps": 1}],
    "pruning": {"startup_trials": 3, "warmup_steps": 8},
}
SHORT = ["grpo.max_num_steps=24", "grpo.val_period=8", "grpo.max_val_samples=256"]


def command(folder: Path) -> list[str]:
    return [*PACELINE, "sweep", str(folder / "grpo.yaml"), "sweep.yaml", *SHORT]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo's files, with the model of its first stage, and the sweep's file."""
    files = make_files(tmp_path, seed=0)
    sft = [*PACELINE, "sft", str(files / "sft.yaml"), "--directory", str(tmp_path / "first"), "--quiet"]
    subprocess.run(sft, check=True, timeout=LIMIT_S, capture_output=True)
    (tmp_path / "first" / "sft-1" / "export").rename(files / "sft")
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
    return files


@pytest.mark.slow
def test_a_sweep_that_was_killed_goes_on_and_finds_a_better_learning_rate(folder: Path, tmp_path: Path) -> None:
    killed = subprocess.Popen(command(folder), cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert killed.stdout is not None
        for line in killed.stdout:
            if line.startswith(f"trial {KILLED_AT} is "):
                break
        else:
            pytest.fail("the sweep ended before it could be killed")
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
    again = subprocess.run([*command(folder), "--json"], cwd=tmp_path, timeout=LIMIT_S, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert f"trial {KILLED_AT} goes on as " in again.stderr
    facts = json.loads(again.stdout)
    with runs_of("", tmp_path / "runs") as records:
        runs = [run for run in records.runs() if run.run_id.startswith("lr-")]
        start = next(run for run in runs if "-t0-" in run.run_id)
        course = [event.content for event in records.watch(start.run_id) if event.kind == "evaluation"]
    names = {run.run_id.rpartition("-")[0] for run in runs}
    assert facts["trials"] == len(runs) == len(names) == TRIALS
    assert facts["best"]["values"]["policy.optimizer.lr"] > 1e-4
    assert facts["best"]["value"] > course[-1]["reward"] + 0.1
    page = (tmp_path / "runs" / "sweeps" / "lr" / "report.html").read_text()
    *_, trials = (block for block in content_of(page)["blocks"] if block[0] == "table")
    assert len(trials[3]) == TRIALS


@pytest.mark.slow
def test_trials_are_runs_of_a_coordinator_that_is_there(make_spec: Callable[..., RunSpec], tmp_path: Path) -> None:
    """Its services go on afterwards, and the study lies where the sweep ran."""
    (tmp_path / "spec.yaml").write_text(spec_to_yaml(make_spec()))
    search = {"policy.optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True}}
    sweep = {"trials": 2, "search": search, "of": "step", "metric": "reward", "name": "there"}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    with ForkedCluster(tmp_path / "runs", ClusterSection()) as cluster, Client(cluster.address) as client:
        result = paceline(
            *("sweep", tmp_path / "spec.yaml", tmp_path / "sweep.yaml", "--coordinator", cluster.address),
            *("--directory", tmp_path / "mine", "--json"),
        )
        assert result.exit_code == 0, result.output
        states = {run.run_id: state_name(run) for run in client.runs()}
    facts = json.loads(result.stdout)
    assert list(states.values()) == ["succeeded"] * 2
    assert facts["best"]["run_id"] in states
    assert (tmp_path / "mine" / "sweeps" / "there" / "journal.log").is_file()
    assert not (tmp_path / "runs" / "sweeps").exists()
