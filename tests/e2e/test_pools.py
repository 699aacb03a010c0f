"""Rollout pools of one run whose engines differ in size (`--engine`), reached over an interface that is named (`--fabric`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked_services import ForkedCluster
from pool_workers import another_worker, pools_of
from watched_runs import finish

from paceline.client import Client
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection, RunSpec

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One rollout worker, a reward worker, a learner whose weights take the interface of loopback."""
    sizes = ClusterSection(rollout_workers=1, reward_workers=1, learner_ranks=1)
    fabric = ("--fabric", "127.0.0.0/8")
    options = {"learner": fabric, "rollout": fabric}
    with ForkedCluster(tmp_path_factory.mktemp("runs"), sizes, options=options) as running:
        yield running


def test_workers_of_different_sizes_share_a_run(
    client: Client, cluster: LocalCluster, make_spec: Callable[..., RunSpec], tmp_path: Path
) -> None:
    assert "PACELINE_FABRIC" not in os.environ
    with another_worker(cluster, tmp_path, "--engine", "max_batch_size=4", "--fabric", "127.0.0.1"):
        run_id = client.submit(make_spec(grpo={"max_num_steps": 30})).run_id
        finish(client, cluster, run_id)
    assert pools_of(cluster, run_id) == {"rollout-0", "other"}


def test_settings_that_do_not_fit_are_told_and_the_others_go_on(
    client: Client, cluster: LocalCluster, make_spec: Callable[..., RunSpec], tmp_path: Path
) -> None:
    with another_worker(cluster, tmp_path, "--engine", "backend=vllm", "--engine", "vllm_cfg.no_such=1"):
        run_id = client.submit(make_spec(grpo={"max_num_steps": 4})).run_id
        finish(client, cluster, run_id)
        messages = [e.content["message"] for e in client.watch(run_id) if e.kind == "warning"]
    assert any("--engine backend=vllm vllm_cfg.no_such=1 does not fit the run" in text for text in messages)
    assert pools_of(cluster, run_id) == {"rollout-0"}
