"""One run with its rollout worker at one of the sites, everything else at the near one, and what it came to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from end_to_end.paceline_side import make_spec
from end_to_end.workload import Workload

from paceline.client import Client, state_name
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection
from slow_link.site import FAR, NEAR, Sites

RUN_TIMEOUT_S = 3600.0


def measure(
    directory: Path,
    workload: Workload,
    sites: Sites,
    store: str,
    place: str,
    warm_up: int,
    steps: int,
    overrides: list[str],
) -> dict[str, Any]:
    """Trains `warm_up` + `steps` steps and a few more; tokens and samples a second over `steps` of them."""
    overrides = [
        *("weights.channel=delta", f"weights.store={store}/{directory.name}"),
        *("policy.generation_precision=bfloat16", "logger.tensorboard=false"),
        *overrides,
    ]
    spec = make_spec(directory.parent, workload, warm_up + steps, overrides)
    cluster = LocalCluster(directory, ClusterSection(learner_ranks=1), host=NEAR)
    worker: subprocess.Popen[bytes] | None = None
    try:
        coordinator = cluster.start_coordinator()
        cluster.add("reward")
        cluster.add("learner")
        worker = _start_worker(directory, sites, place, coordinator)
        before = sites.received_bytes()
        with Client(coordinator) as client:
            run = client.submit(spec)
            ended = client.wait(run.run_id, timeout_s=RUN_TIMEOUT_S)
        link_bytes = sites.received_bytes() - before
    finally:
        if worker is not None:
            worker.terminate()
            worker.wait()
        cluster.stop()
    if state_name(ended) != "succeeded":
        raise SystemExit(f"the run {state_name(ended)}: {ended.message}; see {directory}/logs")
    lines = [json.loads(line) for line in (directory / run.run_id / "metrics.jsonl").read_text().splitlines()]
    samples = spec.grpo.num_prompts_per_step * spec.grpo.num_generations_per_prompt
    return {"place": place, "link_bytes": link_bytes} | _evaluate(lines, warm_up, steps, samples)


def _start_worker(directory: Path, sites: Sites, place: str, coordinator: str) -> subprocess.Popen[bytes]:
    namespace, host = (sites.near, NEAR) if place == "near" else (sites.far, FAR)
    command = [
        sys.executable,
        "-m",
        "paceline.services.rollout.main",
        "--coordinator",
        coordinator,
        "--host",
        host,
        "--insecure",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PACELINE_STARTER": str(os.getpid())}
    with (directory / "logs" / f"rollout-{place}.log").open("wb") as log:
        return subprocess.Popen(
            sites.command(namespace, [*command, "--name", place]), env=environment, stdout=log, stderr=log
        )


def _evaluate(lines: list[dict[str, Any]], warm_up: int, steps: int, samples: int) -> dict[str, Any]:
    """The step before the first that counts starts the clock."""
    train = [line for line in lines if line["kind"] == "train"][warm_up - 1 : warm_up + steps]
    versions = [
        line
        for line in lines
        if line["kind"] == "weights" and warm_up <= line["step"] <= warm_up + steps and "publish_s" in line
    ]
    seconds = train[-1]["time"] - train[0]["time"]
    tokens = sum(line["trained_tokens"] for line in train[1:])
    return {
        "steps": steps,
        "seconds": round(seconds, 3),
        "step_s": round(seconds / steps, 3),
        "tokens_per_s": round(tokens / seconds, 1),
        "samples_per_s": round(steps * samples / seconds, 3),
        "learner_wait_s": round(sum(line["learner_wait_s"] for line in train[1:]) / steps, 3),
        "mean_age_steps": round(sum(line["age"] for line in train[1:]) / steps, 3),
        "versions": len(versions),
        "version_bytes": round(median(line["size_bytes"] for line in versions)),
        "publish_s": round(median(line["publish_s"] for line in versions), 3),
        "pause_s": round(median(line["pause_s"] for line in versions), 4),
    }
