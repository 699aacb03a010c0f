"""Whole runs over the delta channel, and joiners that catch up from the store before they enter an epoch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from watched_runs import finish

from paceline.client import Client
from paceline.spec import ClusterSection, RunSpec
from paceline.weights.store_format import StoredVersion
from protos.paceline.v1 import run_pb2
from services.local.cluster import LocalCluster

RUN_TIMEOUT_S = 180.0
MakeSpec = Callable[..., RunSpec]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """As that of the other files, and of this one alone, since a joiner stays."""
    sizes = ClusterSection(rollout_workers=2, reward_workers=1, learner_ranks=2)
    with LocalCluster(tmp_path_factory.mktemp("runs"), sizes) as running:
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
def test_a_joiner_catches_up_from_the_store_and_serves(
    client: Client, cluster: LocalCluster, make_spec: MakeSpec
) -> None:
    # As long as it takes for another process to start and be served, on whatever machine.
    # Workers that agents do not reach: the others read from their neighbours (tests/weights).
    spec = make_spec(
        name="joined",
        grpo={"max_num_steps": 100_000},
        checkpointing={"enabled": False},
        weights={"backend": "gloo"},
    )
    run_id = client.submit(spec).run_id
    wait_until(lambda: client.get(run_id).step >= 3, "no step 3")
    before = stored(cluster, run_id)  # nothing, or what the second worker needed if it came late
    name = cluster.add("rollout")

    def joined() -> list[Any]:
        return [m for m in client.members() if m.member_id.startswith(name)]

    wait_until(lambda: any(m.version.step > 0 for m in joined()), f"{name} got no weights")
    after = stored(cluster, run_id)
    assert after > before
    wait_until(lambda: any(m.held > 0 for m in joined()), f"{name} got no lease")
    # It has entered: what comes now comes over its link, and the store is left alone.
    step = joined()[0].version.step
    wait_until(lambda: any(m.version.step > step + 3 for m in joined()), f"{name} stayed behind")
    entered = stored(cluster, run_id)
    step = joined()[0].version.step
    wait_until(lambda: any(m.version.step > step + 5 for m in joined()), f"{name} stayed behind")
    assert stored(cluster, run_id) == entered
    client.cancel(run_id)
    wait_until(lambda: client.get(run_id).state == run_pb2.RUN_STATE_CANCELLED, "not cancelled")
    log = cluster.log_path("learner").read_text()
    assert "cannot catch up" not in log
    assert "has not caught up" not in log
