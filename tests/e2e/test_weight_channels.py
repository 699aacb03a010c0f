"""Whole runs over the delta channel, and workers without an agent, which read the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_services import ForkedCluster
from watched_runs import finish

from paceline.calls.token import VARIABLE as TOKEN_VARIABLE
from paceline.client import Client
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection, RunSpec
from paceline.v1 import run_pb2
from paceline.weights.hosts.local_socket import FOLDER_VARIABLE
from paceline.weights.store.store_format import StoredVersion

RUN_TIMEOUT_S = 180.0
MakeSpec = Callable[..., RunSpec]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """As that of the other files, and of this one alone, since a joiner stays."""
    sizes = ClusterSection(rollout_workers=2, reward_workers=1, learner_ranks=2)
    with ForkedCluster(tmp_path_factory.mktemp("runs"), sizes) as running:
        yield running


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + RUN_TIMEOUT_S
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < deadline_s, what
        pause.wait(0.05)


def manifests(cluster: LocalCluster, run_id: str, kind: str) -> list[StoredVersion]:
    """Return the contents of the run's store, by version."""
    found = sorted((cluster.directory / run_id / "weights").glob(f"*/{kind}.json"))
    return [StoredVersion.from_bytes(path.read_bytes()) for path in found]


def stored(cluster: LocalCluster, run_id: str) -> list[tuple[int, int]]:
    """Versions in the run's own store."""
    return sorted({v.version for kind in ("anchor", "delta") for v in manifests(cluster, run_id, kind)})


@pytest.mark.slow
@pytest.mark.parametrize("age", [0, 2])
def test_a_run_over_the_delta_channel_ends_well(
    client: Client, cluster: LocalCluster, make_spec: MakeSpec, age: int
) -> None:
    spec = make_spec(
        name=f"delta{age}",
        async_grpo={"max_trajectory_age_steps": age},
        weights={"channel": "delta", "anchor_interval": 4},
        policy={"generation_precision": "bfloat16", "optimizer": {"lr": 3e-6}},
        checkpointing={"save_period": 5},
    )
    run_id = client.submit(spec).run_id
    wait_until(lambda: client.get(run_id).step >= 7, "no step 7")
    if age:
        cluster.kill("learner")
    summary = finish(client, cluster, run_id)
    assert summary["steps"] == 12
    assert summary["learner_sessions"] == (2 if age else 1)
    anchors, deltas = manifests(cluster, run_id, "anchor"), manifests(cluster, run_id, "delta")
    assert {len(version.parts) for version in anchors + deltas} == {2}  # each rank writes its own
    assert {version.version.session for version in anchors + deltas} == {summary["learner_sessions"]}
    assert deltas[-1].version.step == 12
    mean = sum(delta.size_bytes for delta in deltas) / len(deltas)
    assert mean < anchors[-1].size_bytes / 2


@pytest.mark.slow
def test_a_joiner_without_an_agent_reads_the_store_and_serves(
    client: Client, cluster: LocalCluster, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As long as it takes for another process to start and be served, on whatever machine.
    spec = make_spec(
        name="joined",
        grpo={"max_num_steps": 100_000},
        checkpointing={"enabled": False},
    )
    run_id = client.submit(spec).run_id
    wait_until(lambda: client.get(run_id).step >= 3, "no step 3")
    assert stored(cluster, run_id) == []  # agents bring the versions
    monkeypatch.setenv(FOLDER_VARIABLE, "/proc/nowhere")  # no agent can listen there
    name = cluster.add("rollout")

    def joined() -> list[Any]:
        return [m for m in client.members() if m.member_id.startswith(name)]

    wait_until(lambda: any(m.version.step > 0 for m in joined()), f"{name} got no weights")
    assert stored(cluster, run_id)
    wait_until(lambda: any(m.held > 0 for m in joined()), f"{name} got no lease")
    step = joined()[0].version.step
    wait_until(lambda: any(m.version.step > step + 3 for m in joined()), f"{name} stayed behind")
    client.cancel(run_id)
    wait_until(lambda: client.get(run_id).state == run_pb2.RUN_STATE_CANCELLED, "not cancelled")


@pytest.mark.slow
def test_a_run_without_agents_ends_well_by_the_store(
    make_spec: MakeSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "/proc/nowhere")
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)  # that of the other cluster
    sizes = ClusterSection(rollout_workers=1, reward_workers=1, learner_ranks=2)
    with ForkedCluster(tmp_path / "runs", sizes) as cluster, Client(cluster.address) as client:
        run_id = client.submit(make_spec(name="store")).run_id
        summary = finish(client, cluster, run_id)
        assert summary["steps"] == 12
        assert stored(cluster, run_id)[-1][1] == 12
        assert "a host of the learner has no relay for weights" in cluster.log_path("coordinator").read_text()
