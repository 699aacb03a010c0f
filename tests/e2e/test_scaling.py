"""Pools that a reader of `/scale` sizes, as KEDA does, while the load of a run changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked_services import ForkedCluster
from free_ports import free_port
from keda_client import Keda

from paceline.client import ENDED_STATES, Client, state_name
from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection, RunSpec

pytestmark = pytest.mark.slow

TIMEOUT_S = 240.0
ROUND_S = 0.5
SETTINGS = "minWorkers=0,maxWorkers=3,coldStartSeconds=5,holdSeconds=4"


@pytest.fixture
def idle_s() -> float:
    """Seconds without a run until the rollout pool goes to zero."""
    return 2.0


@pytest.fixture
def metrics_port() -> int:
    return free_port()


@pytest.fixture
def cluster(tmp_path: Path, metrics_port: int, idle_s: float) -> Iterator[LocalCluster]:
    """A coordinator and a learner; workers are KEDA's."""
    sizes = ClusterSection(learner_ranks=1).model_copy(update={"rollout_workers": 0, "reward_workers": 0})
    pools = [f"role=rollout,{SETTINGS},idleSeconds={idle_s:g}", f"role=reward,{SETTINGS},idleSeconds=2"]
    options = {
        "coordinator": [
            *("--metrics-port", str(metrics_port), "--scaling-period", "1"),
            *(option for pool in pools for option in ("--pool", pool)),
        ],
        "reward": ["--processes", "1"],
    }
    with ForkedCluster(tmp_path / "runs", sizes, options=options, max_deaths=5) as running:
        yield running


def test_pools_follow_the_load_and_no_lease_is_lost(
    cluster: LocalCluster, metrics_port: int, make_spec: Callable[..., RunSpec], tmp_path: Path
) -> None:
    seconds = tmp_path / "seconds"
    source = tmp_path / "slow.py"
    source.write_text(
        "import pathlib, time\n"
        "def slow(completions, **columns):\n"
        f"    time.sleep(float(pathlib.Path({str(seconds)!r}).read_text()))\n"
        "    return [sum(c.isdigit() for c in text) / 4 for text in completions]\n"
    )
    spec = make_spec(rewards=[{"function": f"{source}:slow"}], grpo={"max_num_steps": 1_000_000})
    pools = {"rollout": (0, 3), "reward": (0, 3)}
    keda = Keda(f"http://127.0.0.1:{metrics_port}/scale", cluster, pools)
    client = Client(cluster.address)

    def until(condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"{what}; sizes {keda.sizes}; {client.status()}"
            cluster.check()
            keda.round()
            time.sleep(ROUND_S)

    def sizes() -> dict[str, int]:
        return {role: cluster.size(role) for role in keda.pools}

    run_ids = []
    try:
        until(lambda: len(keda.sizes["reward"]) > 0, "an answer without a run")
        assert sizes() == {"rollout": 0, "reward": 0}, "there is no run"

        seconds.write_text("0.5")  # one worker scores two groups a second
        run_ids.append(client.submit(spec).run_id)
        until(lambda: cluster.size("reward") == 3, "the reward pool grows under load")
        until(lambda: "reward pool limits" in client.status().advice, "the advice names the bottleneck")
        step = client.get(run_ids[0]).step

        seconds.write_text("0")
        until(lambda: cluster.size("reward") == 1, "the reward pool shrinks when its load falls")
        assert client.get(run_ids[0]).step > step

        keda.pools["rollout"] = (3, 3)
        until(lambda: _ready(client, "rollout") == 3, "the rollout pool has its fewest workers")
        keda.pools["rollout"] = (0, 1)
        until(lambda: _ready(client, "rollout") == 1, "the rollout pool shrinks while it holds leases")
        step = client.get(run_ids[0]).step
        until(lambda: client.get(run_ids[0]).step > step + 5, "the run goes on with fewer workers")

        client.cancel(run_ids[0])
        until(lambda: not any(sizes().values()), "the pools go to zero between runs")
        until(lambda: len(client.members()) == 1, "the workers have left")

        run_ids.append(client.submit(make_spec(grpo={"max_num_steps": 6})).run_id)
        until(lambda: state_name(client.get(run_ids[1])) in ENDED_STATES, "the pools come back for a run")
        assert state_name(client.get(run_ids[1])) == "succeeded"
    finally:
        client.close()
    rewards = keda.sizes["reward"]
    grown = rewards.index(3)
    assert {0, 1} <= set(rewards[grown:]), rewards
    assert rewards[0] == 0
    assert rewards[-1] > 0, "back for the second run"
    _check_nothing_was_lost(cluster, keda, run_ids, least_departures=4)


@pytest.mark.parametrize("idle_s", [600.0])
def test_the_rollout_pool_follows_the_length_of_completions(
    cluster: LocalCluster, metrics_port: int, make_spec: Callable[..., RunSpec]
) -> None:
    """Long completions need more workers; steps of one short group need one, to which the pool shrinks in the middle of its work."""
    pools = {"rollout": (0, 3), "reward": (0, 1)}
    keda = Keda(f"http://127.0.0.1:{metrics_port}/scale", cluster, pools)
    client = Client(cluster.address)

    def until(condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"{what}; sizes {keda.sizes}; {client.status()}"
            cluster.check()
            keda.round()
            time.sleep(ROUND_S)

    endless = {"max_num_steps": 1_000_000}
    long = make_spec(
        policy={
            "max_total_sequence_length": 256,
            "generation": {"max_new_tokens": 240, "min_new_tokens": 240, "allow_biased_sampling": True},
        },
        grpo=endless,
    )
    short = make_spec(grpo={**endless, "num_prompts_per_step": 1})
    run_ids = []
    try:
        run_ids.append(client.submit(long).run_id)
        until(
            lambda: cluster.size("rollout") == 3,
            "the pool grows while the learner waits for long completions",
        )
        until(lambda: "rollout pool limits" in client.status().advice, "the advice names the bottleneck")
        client.cancel(run_ids[0])
        run_ids.append(client.submit(short).run_id)
        until(lambda: cluster.size("rollout") == 1, "the pool shrinks to what short completions need")
        until(lambda: _ready(client, "rollout") == 1, "two workers have left")
        step = client.get(run_ids[1]).step
        until(lambda: client.get(run_ids[1]).step > step + 20, "the run goes on with one worker")
        client.cancel(run_ids[1])
    finally:
        client.close()
    _check_nothing_was_lost(cluster, keda, run_ids, least_departures=2)


def _ready(client: Client, name: str) -> int:
    return next((pool.ready for pool in client.status().pools if pool.name == name), 0)


def _check_nothing_was_lost(cluster: LocalCluster, keda: Keda, run_ids: list[str], least_departures: int) -> None:
    """Every worker that was removed returned its work: nothing counts as a crash or was generated twice."""
    cluster.stop()
    ledger = Ledger(cluster.directory / "ledger.sqlite", read_only=True)
    try:
        for run_id in run_ids:
            assert verify(ledger, run_id).found == []
            assert ledger.token_books(run_id)["wasted"] == 0
            assert ledger.failures(run_id) == {}
            left = [event["json"] for event in ledger.events(run_id, 0, 100_000) if '"left: ' in event["json"]]
            assert all("left: in good order" in text for text in left)
        departures = sum(
            '"left: in good order' in text for run_id in run_ids for text in _member_events(ledger, run_id)
        )
        assert departures >= least_departures
    finally:
        ledger.close()
    for role, sizes in keda.sizes.items():
        assert not any(cluster.deaths(role, index) for index in range(max(sizes)))


def _member_events(ledger: Ledger, run_id: str) -> list[str]:
    return [event["json"] for event in ledger.events(run_id, 0, 100_000) if event["kind"] == "member"]
