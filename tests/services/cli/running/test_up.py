"""`paceline up` without its services: what it refuses, how it ends, and its exit status."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from command_line import paceline
from model_shapes import HALF_BILLION

from paceline.client import Client
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.local.cluster import LocalCluster

SPEC = "{policy: {model_name: m}, data: {train: d}, rewards: [{function: length}]}"


@pytest.fixture
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Return a function that runs `paceline up` over a cluster that starts nothing, whose methods it may replace."""

    class Idle(LocalCluster):
        """Cluster without services."""

        def start_coordinator(self) -> str:
            self.address = "127.0.0.1:1"
            return self.address

        def start_workers(self) -> None:
            pass

        def stop(self) -> None:
            pass

    def submit(self: Client, spec: Any, *_: Any, **__: Any) -> Any:
        return type("Run", (), {"run_id": "default-1"})

    monkeypatch.setattr("paceline.services.cli.running.up.LocalCluster", Idle)
    monkeypatch.setattr(Client, "submit", submit)
    monkeypatch.setattr("paceline.services.cli.running.up._follow", lambda *_: True)
    monkeypatch.setattr("paceline.services.cli.running.up.start_page", lambda *_: None)
    (tmp_path / "spec.yaml").write_text(SPEC)

    def run(*arguments: str, **methods: Any) -> Result:
        for name, method in methods.items():
            monkeypatch.setattr(Idle, name, method)
        return paceline("up", tmp_path / "spec.yaml", "--directory", tmp_path / "runs", *arguments)

    return run


def interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_a_signal_after_success_with_keep_is_no_failure(up: Callable[..., Result]) -> None:
    result = up("--keep", wait=interrupted)
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[-2:] == ["the services stay until Ctrl-C", "stopping"]
    assert "continues" not in result.stderr


def test_a_signal_during_a_run_names_the_way_to_go_on(
    up: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.services.cli.running.up._follow", interrupted)
    result = up()
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1].startswith("stopping; `paceline up --directory")


def test_a_run_that_ends_after_the_signal_is_named(up: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(cluster: LocalCluster) -> None:
        ledger = Ledger(cluster.directory / "ledger.sqlite")
        with ledger.transaction():
            ledger.add_run("default-1", SPEC, str(cluster.directory / "default-1"))
            ledger.update_run("default-1", state="succeeded")
        ledger.close()

    monkeypatch.setattr("paceline.services.cli.running.up._follow", interrupted)
    result = up(stop=finish)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == (
        "run default-1 has ended before its services (succeeded); nothing of it is left to continue"
    )


def test_a_second_signal_ends_without_a_word_of_click(
    up: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.services.cli.running.up._follow", interrupted)
    result = up(stop=interrupted)
    assert result.exit_code == 130
    assert "Aborted!" not in result.output
    assert result.stderr.splitlines()[-1].startswith("ended without waiting for the services")


def test_a_signal_before_anything_runs_ends_without_a_word_of_click(up: Callable[..., Result]) -> None:
    result = up(start_coordinator=interrupted)
    assert result.exit_code == 130
    assert "Aborted!" not in result.output


def test_scaled_pools_have_the_bounds_of_the_command(
    up: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: list[str] = []
    scalers: list[object] = []

    def start(cluster: LocalCluster) -> str:
        options[:] = cluster._options["coordinator"]
        cluster.address = "127.0.0.1:1"
        return cluster.address

    class Scaler(contextlib.nullcontext[None]):
        def __init__(self, cluster: object, _say: object):
            scalers.append(cluster)
            super().__init__()

    monkeypatch.setattr("paceline.services.local.scaling.LocalScaler", Scaler)
    assert up(start_coordinator=start).exit_code == 0
    assert "--pool" not in options
    assert not scalers
    result = up("--scale", "--bounds", "rollout=1:7", start_coordinator=start)
    assert result.exit_code == 0, result.output
    rollout, reward = (options[i + 1] for i, option in enumerate(options) if option == "--pool")
    assert rollout.startswith("role=rollout,minWorkers=1,maxWorkers=7,")
    assert reward.startswith("role=reward,minWorkers=0,")
    assert len(scalers) == 1


@pytest.mark.parametrize("bounds", ["rollout", "rollout=3", "rollout=3:1", "rollout=0:0", "learner=1:2", "reward=-1:2"])
def test_bounds_that_are_none_are_refused(bounds: str, up: Callable[..., Result]) -> None:
    result = up("--scale", "--bounds", bounds)
    assert result.exit_code == 2
    assert f"--bounds {bounds}: must be POOL=FEWEST:MOST, such as rollout=0:4" in result.output


def test_trackers_start_where_the_spec_names_them(up: Callable[..., Result]) -> None:
    started: list[object] = []

    def start(cluster: object) -> None:
        started.append(cluster)

    assert up(start_trackers=start).exit_code == 0
    assert not started
    assert up("logger.trackers=[{kind: tensorboard}]", start_trackers=start).exit_code == 0
    assert len(started) == 1
    refused = up("logger.trackers=[{kind: wandb}, {kind: wandb, offline: true}]")
    assert "kind wandb occurs 2 times" in refused.stderr


def test_bounds_need_scale(up: Callable[..., Result]) -> None:
    assert "--bounds needs --scale" in up("--bounds", "rollout=1:2").output


@pytest.mark.parametrize("role", ["learner", "rollout", "reward"])
def test_a_gpu_that_is_not_there_is_refused(
    role: str, up: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.services.cli.running.up.visible_gpus", lambda: ())
    result = up(f"cluster.{role}_gpus=[0]", "cluster.rollout_workers=1")
    assert result.exit_code == 1
    assert result.stderr == (
        f"Error: the spec asks for GPU 0 (counted from 0; cluster.{role}_gpus), but this host shows 0 GPUs; see "
        f"`paceline doctor` and CUDA_VISIBLE_DEVICES, name other GPUs, or set cluster.{role}_gpus=[] for CPUs\n"
    )


def test_a_torch_for_cpus_on_a_host_with_gpus_is_refused(
    up: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.services.cli.running.up.visible_gpus", lambda: ("0",))
    monkeypatch.setattr("paceline.services.cli.running.up.torch_is_for_cpus", lambda: True)
    result = up()
    assert result.exit_code == 1
    assert "Error: this host shows GPUs (1), but the installed torch is a build for CPUs" in result.stderr
    assert up("cluster.device=cpu").exit_code == 0


@pytest.mark.parametrize("place", ["file", "below"])
def test_a_directory_that_cannot_be_made_is_one_sentence(place: str, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    file = tmp_path / "file"
    file.touch()
    directory = file if place == "file" else file / "runs"
    result = paceline("up", tmp_path / "spec.yaml", "--directory", directory, "--port", "0")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: --directory {directory} cannot be made: ")
    assert result.stderr.count("\n") == 1
    result = paceline("serve", "coordinator", "--directory", str(directory), "--port", "0")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: --directory {directory} cannot be made: ")


def test_too_little_memory_is_a_warning_with_numbers(
    up: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HALF_BILLION))
    monkeypatch.setattr("paceline.services.cli.running.up.available_bytes", lambda: 6 * 10**9)
    result = up(f"policy.model_name={tmp_path}", "cluster.device=cpu")
    assert result.exit_code == 0, result.output
    assert "warning: a model of 494 M parameters takes an estimated 1 learner rank with " in result.stderr
    assert "6.0 GB are free here" in result.stderr
    assert "warning" not in up().stderr, "the model's config.json is not here"


def test_submit_warns_where_the_workers_are_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HALF_BILLION))
    (tmp_path / "spec.yaml").write_text(SPEC)
    monkeypatch.setattr("paceline.host.resources.available_bytes", lambda: 6 * 10**9)
    model = f"policy.model_name={tmp_path}"
    assert "6.0 GB are free here" in paceline("submit", tmp_path / "spec.yaml", model).stderr
    monkeypatch.setattr(Client, "submit", interrupted)
    elsewhere = paceline("submit", tmp_path / "spec.yaml", model, coordinator="192.0.2.1:1")
    assert "are free here" not in elsewhere.stderr
