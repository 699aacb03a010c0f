"""The exchange under load: a real coordinator process, simulated workers, no model.

    python benchmarks/exchange.py [--seconds 20] [--workers 200] [--secure] [--json]

Rollout workers lease and submit groups of random tokens as fast as they are acknowledged, all over the real protocol
(benchmarks/exchange_load.py). Loads run one after the other, each on a separate coordinator, arrays and texts together:

  whole life  groups of 100 kB; two reward workers score them, a learner of one rank takes the batches, sends receipts
  paced       the same, but 500 groups a second and no more: the wait for a lease when the exchange is not saturated by
              workers that generate in no time
  whole life  groups of 400 kB
  commit      groups of 400 kB that are leased, generated and committed, and nothing else: the ledger against the disk

Before and after each load the disk that the ledger is on is measured: appends of one group's size, each followed by
fdatasync; before it also with appends of 4 MB.

Printed for each load, over the time after a warm-up: groups trained and acknowledged per second, their bytes, the disk's,
the 99th percentile of all lease requests, and the CPU time of the coordinator for a group. With --json the last line is
one object: `groups_per_s` of the first load, `lease_p99_ms` of the paced one (`lease_p99_ms_saturated`: the worst of the
others), `payload_mb_per_s` and `disk_mb_per_s` of the last; beside them all loads in full.

With --secure each load runs twice, plain and then with TLS and CURVE; the usual figures are those of the encrypted runs, and
`throughput_over_plain` is the smallest ratio of groups per second, encrypted over plain, of the loads that are not paced.

That every acknowledgement follows its sync is shown by tests/services/coordinator/exchange/transport/test_sync_order.py, from the system calls.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zmq
from exchange_load import COMPLETIONS, REWARD_WORKERS, Load, Members
from short_form import parse

from paceline.client import Client
from paceline.host.resources import keep_freed_memory
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection, RunSpec
from paceline.spec.reading import parse_spec
from paceline.tls.authority import issue, make_authority
from paceline.tls.folder import VARIABLE
from paceline.v1 import common_pb2

GROUPS_PER_STEP = 128
MAX_AGE = 15
"""Versions are acknowledged about once a second, so several steps are generated with one."""

MAX_AGE_UNTRAINED = 255
"""Bound on the age in the load that trains nothing: 32,768 groups are admitted before admission stops."""

LOADS = ((100_000, True, None), (100_000, True, 500.0), (400_000, True, None), (400_000, False, None))
"""Bytes of a group, whether it is scored and trained too, and groups a second if not as many as possible."""

WARM_UP_S = 3.0
LARGE_BYTES = 4_000_000
"""Bytes of a further append that measures the disk's bandwidth: its rate when a sync costs little."""


def measure(
    group_bytes: int,
    workers: int,
    seconds: float,
    folder: Path,
    *,
    whole_life: bool,
    groups_per_s: float | None = None,
) -> dict[str, Any]:
    """One load on a separate coordinator."""
    large = measure_disk(folder, LARGE_BYTES)
    disk = [measure_disk(folder, group_bytes)]
    cluster = LocalCluster(folder / "runs", ClusterSection())
    try:
        address = cluster.start_coordinator()
        with Client(address) as client:
            client.submit(make_spec(folder, MAX_AGE if whole_life else MAX_AGE_UNTRAINED))
        roles = {f"rollout-{index}": common_pb2.ROLE_ROLLOUT for index in range(workers)}
        roles |= {f"reward-{index}": common_pb2.ROLE_REWARD for index in range(REWARD_WORKERS)}
        roles["learner-0"] = common_pb2.ROLE_LEARNER
        members = Members(address, roles)
        members.ready.wait()
        context = zmq.Context()
        load = Load(members, workers, group_bytes, context, whole_life=whole_life, groups_per_s=groups_per_s)
        figures = run(load, psutil.Process(cluster.pids("coordinator")[0]), seconds)
        load.close()
        context.term()
        members.stop()
    finally:
        cluster.stop()
    disk.append(measure_disk(folder, group_bytes))
    figures["payload_mb_per_s"] = figures["groups_per_s"] * group_bytes / 1e6
    figures["disk_mb_per_s"] = float(np.mean(disk))
    figures["disk_large_mb_per_s"] = large
    figures["share_of_disk"] = figures["payload_mb_per_s"] / figures["disk_mb_per_s"]
    return {"group_bytes": group_bytes, "whole_life": whole_life, "paced": groups_per_s is not None} | figures


def run(load: Load, coordinator: psutil.Process, seconds: float) -> dict[str, Any]:
    """Load the coordinator for `seconds` after the warm-up; return the figures of that time."""
    run_for(load, WARM_UP_S)
    load.lease_s.clear()
    before, committed, step, started_s = (
        coordinator.cpu_times(),
        load.committed,
        load.step,
        time.perf_counter(),
    )
    own = time.process_time()
    run_for(load, seconds)
    elapsed_s, after, groups = (
        time.perf_counter() - started_s,
        coordinator.cpu_times(),
        load.committed - committed,
    )
    return {
        "groups_per_s": groups / elapsed_s,
        "trained_groups_per_s": (load.step - step) * GROUPS_PER_STEP / elapsed_s,
        "lease_p50_ms": float(np.percentile(load.lease_s, 50)) * 1e3,
        "lease_p99_ms": float(np.percentile(load.lease_s, 99)) * 1e3,
        "lease_requests": len(load.lease_s),
        "coordinator_cpu_ms_per_group": (after.user + after.system - before.user - before.system) / groups * 1e3,
        "load_cpu_ms_per_group": (time.process_time() - own) / groups * 1e3,
        "rss_mb": coordinator.memory_info().rss / 1e6,
    }


def run_for(load: Load, seconds: float) -> None:
    """Go on with the load for that long."""
    end_s = time.perf_counter() + seconds
    load.run_until(lambda: time.perf_counter() > end_s)


def measure_disk(folder: Path, chunk_bytes: int, seconds: float = 2.0) -> float:
    """Bandwidth of sequential appends of `chunk_bytes`, each followed by fdatasync, in MB/s."""
    chunk, written = os.urandom(chunk_bytes), 0
    path = folder / "disk"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        started_s = time.perf_counter()
        while time.perf_counter() - started_s < seconds:
            written += os.write(fd, chunk)
            os.fdatasync(fd)
        return written / (time.perf_counter() - started_s) / 1e6
    finally:
        os.close(fd)
        path.unlink()


def use_certificates(folder: Path, encrypted: bool) -> None:
    """Give the processes of the next load certificates, or none."""
    os.environ.pop(VARIABLE, None)
    if encrypted:
        make_authority(folder / "ca")
        os.environ[VARIABLE] = str(issue(folder / "ca", "all", "up"))


def make_spec(folder: Path, max_age: int) -> RunSpec:
    """Return a run that does not end, over short prompts, which lets go of what was trained."""
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps({"prompt": str(i), "answer": str(i)}) + "\n" for i in range(1000)))
    return parse_spec(
        {
            "policy": {
                "model_name": "none",
                "max_total_sequence_length": 1_000_000,
                "generation": {"max_new_tokens": 500_000},
            },
            "data": {"train": str(data)},
            "grpo": {
                "num_prompts_per_step": GROUPS_PER_STEP,
                "num_generations_per_prompt": COMPLETIONS,
                "max_num_steps": 1_000_000,
            },
            "async_grpo": {"max_trajectory_age_steps": max_age},
            "rewards": [{"function": "exact_match"}],
            "logger": {"tensorboard": False},
        }
    )


def main() -> None:
    """All loads, then the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load, after the warm-up")
    parser.add_argument("--workers", type=int, default=200, help="simulated rollout workers")
    parser.add_argument("--directory", type=Path, help="where the ledger lies; a temporary folder by default")
    parser.add_argument("--secure", action="store_true", help="with TLS and CURVE, beside the same loads without")
    parser.add_argument("--json", action="store_true")
    arguments = parse(parser, seconds=1.0, workers=8)
    keep_freed_memory()
    gc.freeze()
    loads, plain = [], []
    for group_bytes, whole_life, groups_per_s in LOADS[:2] if arguments.short else LOADS:
        for encrypted in (False, True) if arguments.secure else (False,):
            with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
                use_certificates(Path(folder), encrypted)
                figures = measure(
                    group_bytes,
                    arguments.workers,
                    arguments.seconds,
                    Path(folder),
                    whole_life=whole_life,
                    groups_per_s=groups_per_s,
                )
                (plain if arguments.secure and not encrypted else loads).append(figures)
    small, paced, large = loads[0], loads[1], loads[-1]
    if arguments.json:
        summary = {
            "groups_per_s": small["groups_per_s"],
            "payload_mb_per_s": large["payload_mb_per_s"],
            "disk_mb_per_s": large["disk_mb_per_s"],
            "disk_large_mb_per_s": large["disk_large_mb_per_s"],
            "lease_p99_ms": paced["lease_p99_ms"],
            "lease_p99_ms_saturated": max(load["lease_p99_ms"] for load in loads if load is not paced),
            "load_average": os.getloadavg()[0],
            "loads": loads,
        }
        if plain:
            summary["throughput_over_plain"] = min(
                load["groups_per_s"] / before["groups_per_s"]
                for load, before in zip(loads, plain, strict=True)
                if not load["paced"]
            )
            summary["plain_loads"] = plain
        print(json.dumps(summary))
        return
    for load in loads:
        for name, value in load.items():
            print(f"{name:>30} {value:12.2f}")
        print()


if __name__ == "__main__":
    main()
