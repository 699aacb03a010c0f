"""A learner on two nodes of this host: a killed node comes back, a smaller and a larger learner go on, and the books balance."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from free_ports import free_port

from paceline.client import Client, state_name
from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection, RunSpec

pytestmark = pytest.mark.slow
DEADLINE_S = 240.0
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """Services without a learner."""
    running = LocalCluster(tmp_path / "runs", ClusterSection())
    try:
        running.start_coordinator()
        for role in ("rollout", "reward"):
            running.add(role)
        yield running
    finally:
        running.stop()


@pytest.fixture
def start(cluster: LocalCluster, tmp_path: Path) -> Iterator[Start]:
    """`start(node_rank, nodes="2")`: a node of the learner with one rank, as its command starts it."""
    address = f"127.0.0.1:{free_port()}"
    started: list[subprocess.Popen[bytes]] = []

    def start(node_rank: int, nodes: str = "2") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "paceline.services.learner.main"]
        command += ["--coordinator", cluster.address, "--nodes", nodes, "--node-rank", str(node_rank)]
        log = (tmp_path / f"node-{node_rank}.log").open("ab")
        started.append(
            subprocess.Popen(
                [*command, "--rendezvous", address],
                stdout=log,
                stderr=log,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        )
        log.close()
        return started[-1]

    yield start
    for process in started:
        process.send_signal(signal.SIGTERM)
    for process in started:
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def kill_node(process: subprocess.Popen[bytes]) -> None:
    """Kill a node's processes at once, as the loss of its host does."""
    for victim in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    process.wait()


def reach_step(client: Client, run_id: str, step: int, started: list[subprocess.Popen[bytes]]) -> None:
    """Wait until a step is trained; fail at once when a node has ended by itself."""
    deadline_s = time.monotonic() + DEADLINE_S
    while client.get(run_id).step < step:
        assert [node.returncode for node in started if node.poll() not in (None, -signal.SIGKILL)] == []
        assert time.monotonic() < deadline_s, f"step {step} is not trained"
        time.sleep(0.1)


def sessions(cluster: LocalCluster, run_id: str) -> list[int]:
    """Return the world size of each session that has trained, in order; and check that the books balance."""
    ledger = Ledger(cluster.directory / "ledger.sqlite", read_only=True)
    try:
        assert verify(ledger, run_id).problems == []
        rows = ledger.db.execute(
            "SELECT session, MAX(world_size) AS n FROM receipts WHERE run_id = ? GROUP BY session ORDER BY session",
            (run_id,),
        )
        return [row["n"] for row in rows]
    finally:
        ledger.close()


def sizes_until(cluster: LocalCluster, run_id: str, expected: list[int]) -> None:
    """Wait until sessions of these sizes have trained, in this order; sessions of one size in succession count once."""
    deadline_s = time.monotonic() + DEADLINE_S
    while (sizes := [size for size, _ in itertools.groupby(sessions(cluster, run_id))]) != expected:
        assert time.monotonic() < deadline_s, f"sessions have {sizes} ranks, not {expected}"
        time.sleep(0.5)


def test_a_killed_node_comes_back_and_the_run_ends_well(
    cluster: LocalCluster,
    start: Start,
    make_spec: Callable[..., RunSpec],
    gated: Callable[[int], tuple[dict[str, Any], Path]],
) -> None:
    nodes = [start(0), start(1)]
    reward, gate = gated(20 * 8)
    with Client(cluster.address) as client:
        run = client.submit(make_spec(grpo={"max_num_steps": 40}, rewards=[reward]))
        reach_step(client, run.run_id, 5, nodes)
        kill_node(nodes[1])
        gate.touch()
        start(1)
        ended = client.wait(run.run_id, timeout_s=DEADLINE_S)
    assert (state_name(ended), ended.step) == ("succeeded", 40), ended.message
    tokens = ended.tokens
    assert tokens["generated"] == tokens["trained"] + tokens["dropped"] + tokens["live"]
    sizes = sessions(cluster, run.run_id)
    assert set(sizes) == {2}
    assert len(sizes) > 1


def test_a_rank_that_stands_still_ends_the_session_on_every_node(
    cluster: LocalCluster, start: Start, make_spec: Callable[..., RunSpec]
) -> None:
    nodes = [start(0), start(1)]
    with Client(cluster.address) as client:
        run = client.submit(make_spec(grpo={"max_num_steps": 100_000}))
        reach_step(client, run.run_id, 5, nodes)
        [rank] = psutil.Process(nodes[1].pid).children()
        rank.suspend()
        reached = client.get(run.run_id).step
        reach_step(client, run.run_id, reached + 20, nodes)
        assert not rank.is_running()
    assert set(sessions(cluster, run.run_id)) == {2}


def test_another_number_of_ranks_goes_on_from_the_checkpoint(
    cluster: LocalCluster, start: Start, make_spec: Callable[..., RunSpec]
) -> None:
    nodes = [start(0, "1:2"), start(1, "1:2")]
    with Client(cluster.address) as client:
        run = client.submit(make_spec(grpo={"max_num_steps": 100_000}))
        reach_step(client, run.run_id, 5, nodes)
        kill_node(nodes[1])
        sizes_until(cluster, run.run_id, [2, 1])
        start(1, "1:2")
        sizes_until(cluster, run.run_id, [2, 1, 2])
        ended = client.get(run.run_id)
    lines = [json.loads(line) for line in (Path(ended.directory) / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"] for line in lines if line["kind"] == "train"}
    assert steps.issuperset(range(ended.step))
