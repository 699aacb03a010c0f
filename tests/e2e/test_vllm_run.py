"""Runs on the real vLLM: on-policy ratios, an engine whose worker is killed, services that are killed at any time."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pool_workers import another_worker, pools_of
from watched_runs import finish, metrics

from paceline.client import Client
from paceline.rollout.vllm.process_guard import VARIABLE
from paceline.services.demo.task import make_model
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection, RunSpec

pytestmark = pytest.mark.vllm
RUN_TIMEOUT_S = 900.0
"""An engine takes 20 s to start on two idle cores, and minutes on busy ones."""
KILLS = int(os.environ.get("PACELINE_KILLS", "4"))
"""Number of times that a service is started and killed; `make test-vllm-slow KILLS=20` takes longer."""
MakeSpec = Callable[..., RunSpec]


@pytest.fixture(scope="module")
def vllm_spec(make_spec: MakeSpec, tmp_path_factory: pytest.TempPathFactory) -> MakeSpec:
    """As `make_spec`, with vLLM and a model that its attention kernels for CPUs know (heads of 32)."""
    folder = tmp_path_factory.mktemp("vllm") / "model"
    make_model(folder, seed=0, hidden=64, layers=1, heads=2)

    def make(policy: dict[str, Any] | None = None, **sections: Any) -> RunSpec:
        defaults = {
            "model_name": str(folder),
            "max_total_sequence_length": 32,
            "optimizer": {"lr": 1e-3},
            "generation": {
                "backend": "vllm",
                "max_new_tokens": 6,
                "vllm_cfg": {"kv_cache_memory_bytes": 32 << 20},
            },
        }
        return make_spec(policy=defaults | (policy or {}), **sections)

    return make


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One rollout worker, a reward worker, a learner of one rank."""
    sizes = ClusterSection(rollout_workers=1, reward_workers=1, learner_ranks=1)
    with LocalCluster(tmp_path_factory.mktemp("runs"), sizes) as running:
        yield running


def engine_processes(of: int | None = None) -> dict[int, str]:
    """Processes that carry an engine's mark, with their titles; `of` keeps those that this service has started."""
    family = set()
    if of is not None:
        family = {child.pid for child in psutil.Process(of).children(recursive=True)}
    found = {}
    for process in psutil.process_iter():
        try:
            if VARIABLE in process.environ() and (of is None or process.pid in family):
                found[process.pid] = " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def mapped_memory(pids: list[int]) -> set[str]:
    """Files in /dev/shm that the processes have mapped."""
    files = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        files |= {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line}
    return {file for file in files if not file.endswith("(deleted)")}


def wait_for(holds: Callable[[], Any], timeout_s: float = RUN_TIMEOUT_S) -> Any:
    pause, deadline_s = threading.Event(), time.monotonic() + timeout_s
    while not (outcome := holds()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s"
        pause.wait(0.05)
    return outcome


def test_a_run_goes_on_when_an_engines_worker_is_killed_and_its_ratios_are_one(
    client: Client, cluster: LocalCluster, vllm_spec: MakeSpec
) -> None:
    spec = vllm_spec(
        grpo={"max_num_steps": 16, "num_prompts_per_step": 8, "num_generations_per_prompt": 4},
        async_grpo={"max_trajectory_age_steps": 0},
    )
    run_id = client.submit(spec).run_id
    wait_for(lambda: cluster.check() or client.get(run_id).step >= 4)
    service, deaths = cluster.pids("rollout")[0], len(cluster.deaths("rollout"))
    workers = [pid for pid, title in engine_processes(service).items() if "Worker" in title]
    assert len(workers) == 1
    os.kill(workers[0], signal.SIGKILL)
    wait_for(lambda: cluster.check() or client.get(run_id).step >= 16)
    summary = finish(client, cluster, run_id)
    assert len(cluster.deaths("rollout")) == deaths + 1
    assert "died" in cluster.log_path("rollout").read_text()
    lines = metrics(summary, cluster)
    left = [event.content for event in client.watch(run_id) if event.kind == "member"]
    assert any("engine died" in str(content) for content in left), left
    assert summary["samples"] == 16 * 8 * 4
    ratios = [line["ratio_behaviour"] for line in lines]
    print(f"ratios of {len(ratios)} steps at age 0: {min(ratios):.6f} to {max(ratios):.6f}")
    assert all(abs(ratio - 1) <= 5e-4 for ratio in ratios), ratios


def test_workers_with_another_engine_share_the_run(
    client: Client,
    cluster: LocalCluster,
    vllm_spec: MakeSpec,
    gated: Callable[[int], tuple[dict[str, Any], Path]],
    tmp_path: Path,
) -> None:
    reward, gate = gated(8)
    with another_worker(cluster, tmp_path, "--engine", "backend=native", "--engine", "max_batch_size=8"):
        run_id = client.submit(vllm_spec(grpo={"max_num_steps": 24}, rewards=[reward])).run_id
        wait_for(lambda: sum(member.HasField("version") for member in client.members()) == 2)
        gate.touch()
        finish(client, cluster, run_id)
    assert pools_of(cluster, run_id) == {"rollout-0", "other"}


@pytest.mark.parametrize("what", [pytest.param("the delta channel", marks=pytest.mark.slow), "an adapter"])
def test_what_reaches_a_native_worker_reaches_this_one_too(
    client: Client, cluster: LocalCluster, vllm_spec: MakeSpec, what: str
) -> None:
    lora = {"lora_cfg": {"enabled": True, "dim": 4}, "optimizer": {"lr": 1e-2}}
    spec = vllm_spec(
        policy=lora if what == "an adapter" else None,
        grpo={"max_num_steps": 8, "num_prompts_per_step": 8, "num_generations_per_prompt": 4},
        async_grpo={"max_trajectory_age_steps": 0},
        weights={"channel": "delta" if what == "the delta channel" else "collective", "anchor_interval": 4},
    )
    run_id = client.submit(spec).run_id
    wait_for(lambda: cluster.check() or client.get(run_id).step >= 8)
    summary = finish(client, cluster, run_id)
    lines = metrics(summary, cluster)
    sizes_bytes = {line["size_bytes"] for line in metrics(summary, cluster, "weights") if "size_bytes" in line}
    ratios = [line["ratio_behaviour"] for line in lines]
    print(f"{what}: ratios {min(ratios):.6f} to {max(ratios):.6f}, versions of {sorted(sizes_bytes)} bytes")
    assert all(abs(ratio - 1) <= 1e-4 for ratio in ratios), ratios
    model_bytes = sum(path.stat().st_size for path in Path(spec.policy.model_name).glob("*.safetensors"))
    if what == "an adapter":
        assert max(sizes_bytes) < model_bytes / 4
    else:
        stored = {path.name for path in (cluster.directory / run_id / "weights").glob("*/*.json")}
        assert stored == {"anchor.json", "delta.json"}


@pytest.mark.slow
def test_services_that_are_killed_leave_no_process_and_no_shared_memory(vllm_spec: MakeSpec, tmp_path: Path) -> None:
    sizes = ClusterSection(rollout_workers=1, reward_workers=1, learner_ranks=1)
    cluster = LocalCluster(tmp_path, sizes)
    choose = random.Random(5)
    try:
        address = cluster.start_coordinator()
        with Client(address) as client:
            client.submit(vllm_spec())
            for round_ in range(KILLS):
                stage = ["first process", "shared memory", "up"][round_ % 3 if round_ < 3 else choose.randrange(3)]
                how = ["SIGKILL", "SIGTERM", "SIGKILL of the group"][round_ % 3]
                one_life(address, tmp_path / f"{round_}.log", stage, how)
    finally:
        cluster.stop()


def one_life(address: str, log_path: Path, stage: str, how: str) -> None:
    """A rollout service from its start until nothing of it is left."""
    command = [
        sys.executable,
        "-m",
        "paceline.services.rollout.main",
        "--coordinator",
        address,
        "--grace",
        "1",
    ]
    with log_path.open("wb") as log:
        service = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    seen: set[int] = set()
    files: set[str] = set()

    def look() -> bool:
        assert service.poll() is None, log_path.read_text()
        seen.update(engine_processes(service.pid))
        files.update(mapped_memory(list(seen)))
        if stage == "up":
            return "vLLM has started" in log_path.read_text()
        return bool(files) if stage == "shared memory" else bool(seen)

    try:
        wait_for(look)
    finally:
        if how == "SIGTERM":
            service.terminate()
        elif how == "SIGKILL":
            service.kill()
        else:
            os.killpg(service.pid, signal.SIGKILL)
    service.wait(RUN_TIMEOUT_S)
    wait_for(lambda: not seen & set(engine_processes()))
    wait_for(lambda: not any(Path(file).exists() for file in files), 60)
    print(f"{how} at {stage!r}: {len(seen)} processes and {len(files)} files in /dev/shm, all gone")
