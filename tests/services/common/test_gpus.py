"""Simulated hosts with 0 to 8 GPUs: which GPUs are found, how they are divided, and which divisions are refused."""

from __future__ import annotations

import stat
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from command_line import paceline

from paceline.errors import SpecError, Unavailable
from paceline.services.cli.running.up import _with_division
from paceline.services.common.gpus import (
    divide,
    for_cuda,
    installed_gpus,
    refuse_cpu,
    share_gpus,
    torch_is_for_cpus,
    unused_gpus,
    usable_gpus,
    visible_gpus,
)
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection
from paceline.spec.reading import parse_spec, spec_from_yaml, spec_to_yaml


def division(number: int, **cluster: Any) -> tuple[int, tuple[int, ...], int, tuple[int, ...]]:
    """Return ranks, their GPUs, rollout workers, their GPUs."""
    divided, _ = divide(ClusterSection(**cluster), number)
    return divided.learner_ranks, divided.learner_gpus, divided.rollout_workers, divided.rollout_gpus


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, (1, (), 2, ())),
        (1, (1, (0,), 1, (0,))),
        (2, (1, (0,), 1, (1,))),
        (3, (1, (0,), 2, (1, 2))),
        (4, (2, (0, 1), 2, (2, 3))),
        (8, (4, (0, 1, 2, 3), 4, (4, 5, 6, 7))),
    ],
)
def test_gpus_are_divided_where_the_spec_names_none(number: int, expected: tuple[object, ...]) -> None:
    assert division(number) == expected


@pytest.mark.parametrize(
    ("number", "cluster", "expected"),
    [
        (1, {"rollout_workers": 3}, (1, (0,), 3, (0,))),
        (4, {"learner_ranks": 1}, (1, (0,), 3, (1, 2, 3))),
        (4, {"learner_ranks": 3}, (3, (0, 1, 2), 1, (3,))),
        (8, {"rollout_workers": 3}, (4, (0, 1, 2, 3), 3, (4, 5, 6))),
        (8, {"rollout_workers": 2}, (4, (0, 1, 2, 3), 2, (4, 5, 6, 7))),
    ],
)
def test_numbers_that_the_spec_sets_stay(number: int, cluster: dict[str, int], expected: tuple[object, ...]) -> None:
    assert division(number, **cluster) == expected


def test_runs_on_examples_give_every_gpu_to_the_learner() -> None:
    divided, sentence = divide(ClusterSection(), 4, rollout=False)
    assert (divided.learner_ranks, divided.learner_gpus, divided.rollout_gpus) == (4, (0, 1, 2, 3), ())
    assert sentence.startswith("4 GPUs on this host: learner GPU 0 to 3 (one for each rank); ")


def test_the_division_is_said(tmp_path: Path) -> None:
    assert divide(ClusterSection(), 0) == (ClusterSection(), "")
    _, sentence = divide(ClusterSection(), 1)
    assert sentence == (
        "1 GPU on this host: learner GPU 0 (one for each rank), rollout GPU 0 (1 worker); set cluster.learner_gpus and "
        "cluster.rollout_gpus to divide them otherwise, or cluster.device=cpu to use no GPU"
    )
    assert "rollout GPU 4 to 6 (3 workers), 1 left idle;" in divide(ClusterSection(rollout_workers=3), 8)[1]


@pytest.mark.parametrize("number", [1, 2, 4, 8])
def test_every_division_can_be_started(tmp_path: Path, number: int) -> None:
    for workers in range(1, 10):
        divided, _ = divide(ClusterSection(rollout_workers=workers), number)
        LocalCluster(tmp_path, divided, gpus=[str(gpu) for gpu in range(number)])


def test_opting_out_is_said_and_named_gpus_stay() -> None:
    cpu = ClusterSection(device="cpu")
    assert divide(cpu, 2) == (cpu, "cluster.device is cpu, which leaves 2 GPUs of this host unused")
    assert divide(cpu, 0) == (cpu, "")
    named = ClusterSection(learner_gpus=(1,), rollout_gpus=(0,))
    assert divide(named, 2) == (named, "")


@pytest.mark.parametrize(
    ("cluster", "rollout", "said"),
    [
        ({"rollout_gpus": (0, 1)}, True, "learner computes on CPUs: cluster.learner_gpus is empty"),
        ({"learner_gpus": (0,)}, True, "rollout computes on CPUs: cluster.rollout_gpus is empty"),
        ({"learner_gpus": (0,)}, False, ""),
        ({"reward_gpus": (1,)}, True, "learner computes on CPUs: cluster.learner_gpus is empty"),
    ],
)
def test_a_role_left_on_cpus_beside_named_gpus_is_said(cluster: dict[str, Any], rollout: bool, said: str) -> None:
    named = ClusterSection(**cluster)
    kept, sentence = divide(named, 2, rollout=rollout)
    assert kept == named
    assert sentence.startswith(said)
    assert bool(sentence) == bool(said)


def test_a_service_that_finds_no_device_among_gpus_says_so() -> None:
    assert unused_gpus("learner", []) == ""
    assert unused_gpus("learner", ["0", "1"]) == (
        "this learner computes on CPUs although the host shows 2 GPUs, because torch cannot use any GPU; see "
        "`paceline doctor`, or give --device cpu if CPUs are intended"
    )


@pytest.mark.parametrize(
    ("number", "cluster", "message"),
    [
        (
            1,
            {"learner_ranks": 2},
            "cluster.learner_ranks is 2 on a host with 1 GPU: each rank needs a GPU; lower the ranks",
        ),
        (2, {"learner_ranks": 2}, "each rank needs a GPU and the rollout workers need another GPU; lower the ranks"),
        (0, {"rollout_gpus": (0,)}, r"GPU 0 \(counted from 0; cluster.rollout_gpus\), but this host shows 0 GPUs"),
        (
            4,
            {"rollout_gpus": (4,)},
            r"GPU 4 \(counted from 0; cluster.rollout_gpus\), but this host shows 4 GPUs;",
        ),
        (
            1,
            {"reward_gpus": (0, 2)},
            r"GPU 2 \(counted from 0; cluster.reward_gpus\), but this host shows 1 GPU; .*reward_gpus=\[\]",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_keys(number: int, cluster: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        divide(ClusterSection(**cluster), number)


def test_a_role_does_not_compute_on_cpus_where_the_spec_names_gpus() -> None:
    cluster = ClusterSection(learner_gpus=(0, 1), learner_ranks=2)
    refuse_cpu(cluster, "rollout")
    with pytest.raises(Unavailable) as refused:
        refuse_cpu(cluster, "learner")
    assert str(refused.value) == (
        "the run asks for GPU 0 to 1 (cluster.learner_gpus), but torch finds no GPU in this process; see `paceline doctor`, or set "
        "cluster.learner_gpus=[] for CPUs"
    )


@pytest.mark.parametrize(
    ("version", "is_for_cpus"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", True),
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", False),
        ("cuda = None\nhip = '6.2'\n", False),
        ("__version__ = '3.0'\n", False),
    ],
)
def test_a_torch_for_cpus_is_told_without_its_import(
    version: str, is_for_cpus: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(version)
    spec = ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert torch_is_for_cpus() == is_for_cpus
    monkeypatch.setattr("paceline.services.common.gpus.visible_gpus", lambda: ("0",))
    assert usable_gpus() == (() if is_for_cpus else ("0",))


def test_the_run_keeps_its_division() -> None:
    tree = {"policy": {"model_name": "m"}, "data": {"train": "d"}, "rewards": [{"function": "length"}]}
    spec = parse_spec(tree)
    divided, _ = divide(spec.cluster, 4)
    later = spec_from_yaml(spec_to_yaml(_with_division(spec, divided)))
    assert later.cluster == divided
    assert divide(later.cluster, 4) == (divided, "")


def test_cpu_with_named_gpus_is_a_contradiction() -> None:
    with pytest.raises(ValueError, match="device is 'cpu', and GPUs are named"):
        ClusterSection(device="cpu", learner_gpus=(0,))


@pytest.mark.parametrize(
    ("wanted", "visible"),
    [
        (None, ("0", "1", "2", "3")),
        ("", ()),
        ("-1", ()),
        ("2,3", ("2", "3")),
        ("1, 7, 2", ("1",)),
        ("GPU-aa,1", ("GPU-aa", "1")),
        ("MIG-aa", ("MIG-aa",)),
        ("none", ()),
    ],
)
def test_cuda_visible_devices_is_honoured(wanted: str | None, visible: tuple[str, ...]) -> None:
    environment = {} if wanted is None else {"CUDA_VISIBLE_DEVICES": wanted}
    assert visible_gpus(environment, lambda: 4) == visible
    assert visible_gpus(environment, lambda: 0) == ()


def test_processes_get_the_gpus_of_the_list_that_this_one_was_given() -> None:
    assert for_cuda((1, 0), ("2", "GPU-aa")) == "GPU-aa,2"
    assert for_cuda((3,), ()) == "3"
    assert for_cuda((), ("2",)) == ""


def program(folder: Path, text: str) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_gpus_are_found_by_the_drivers_program_or_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gpus"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installed_gpus(folder, tmp_path) == 0
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert installed_gpus(folder, tmp_path) == 3  # a container with only the devices
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (folder / name).mkdir(parents=True)
    assert installed_gpus(folder, tmp_path) == 2
    program(tmp_path, "exit 9")  # the program does not fit the driver
    assert installed_gpus(folder, tmp_path) == 2
    program(tmp_path, "echo 'GPU 0: H100 (UUID: GPU-aa)'\necho '  MIG 1g Device 0: (UUID: MIG-bb)'")
    assert installed_gpus(folder, tmp_path) == 1


def test_a_cluster_that_leaves_gpus_unused_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    cluster = LocalCluster(tmp_path, ClusterSection(), say=said.append, gpus=["0", "1"])
    cluster.add = lambda role: role  # type: ignore[method-assign]
    cluster.start_workers()
    assert said == [
        "everything runs on CPUs, although this host has GPUs (2): name them in cluster.learner_gpus and cluster.rollout_gpus"
    ]


def test_a_service_with_a_gpu_gets_no_other_and_must_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, tuple[list[str], dict[str, str]]] = {}

    class Recorded:
        def __init__(self, name: str, command: list[str], environment: dict[str, str], *_: Any) -> None:
            started[name] = (command, environment)

        def start(self) -> None:
            pass

    monkeypatch.setattr("paceline.services.local.cluster.Service", Recorded)
    sizes = ClusterSection(rollout_workers=1, rollout_gpus=(1,), learner_gpus=(0,))
    LocalCluster(tmp_path, sizes, gpus=["4", "6"]).start_workers()
    visible = {name: environment["CUDA_VISIBLE_DEVICES"] for name, (_, environment) in started.items()}
    assert visible == {"rollout-0": "6", "learner-0": "4", "reward-0": ""}
    on_gpus = {name for name, (command, _) in started.items() if command[-2:] == ["--device", "cuda"]}
    assert on_gpus == {"rollout-0", "learner-0"}


def test_up_refuses_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.services.cli.running.up.visible_gpus", lambda: ("0",))
    spec = tmp_path / "spec.yaml"
    spec.write_text("{policy: {model_name: m}, data: {train: d}, rewards: [{function: length}]}")
    result = paceline("up", spec, "cluster.learner_ranks=2", "--directory", tmp_path / "runs")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: cluster.learner_ranks is 2 on a host with 1 GPU: each rank needs a GPU")
    assert not (tmp_path / "runs" / "logs").exists()


@pytest.mark.parametrize(
    ("gpus", "workers", "shares"),
    [
        ((), 2, [(), ()]),
        ((0, 1, 2, 3), 2, [(0, 1), (2, 3)]),
        ((4, 5), 2, [(4,), (5,)]),
        ((0,), 3, [(0,), (0,), (0,)]),
    ],
)
def test_gpus_are_shared_evenly(gpus: tuple[int, ...], workers: int, shares: list[tuple[int, ...]]) -> None:
    assert share_gpus(gpus, workers) == shares


def test_gpus_that_leave_a_rest_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"rollout_gpus has 3 GPUs for cluster.rollout_workers 2"):
        LocalCluster(tmp_path, ClusterSection(rollout_gpus=(0, 1, 2), rollout_workers=2))
    with pytest.raises(SpecError, match=r"learner_gpus has 1 GPUs for cluster.learner_ranks 2"):
        LocalCluster(tmp_path, ClusterSection(learner_gpus=(0,), learner_ranks=2))
