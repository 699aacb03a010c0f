"""A run that is watched until a step or until its end, and its records."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

from paceline.client import Client
from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.local.cluster import LocalCluster

RUN_TIMEOUT_S = 240.0


def finish(client: Client, cluster: LocalCluster, run_id: str) -> dict[str, Any]:
    """Wait until a run succeeds; return its summary, after every record was compared with every other."""
    run = client.wait(run_id, timeout_s=RUN_TIMEOUT_S)
    cluster.check()
    summary: dict[str, Any] = json.loads((Path(run.directory) / "summary.json").read_text())
    assert summary["state"] == "succeeded", summary["message"]
    ledger = Ledger(cluster.directory / "ledger.sqlite", read_only=True)
    report = verify(ledger, run_id)
    ledger.close()
    assert report.problems == []
    books = {name: summary[f"{name}_tokens"] for name in ("generated", "trained", "dropped", "live")}
    assert books["generated"] == books["trained"] + books["dropped"] + books["live"]
    return summary


def metrics(summary: dict[str, Any], cluster: LocalCluster, kind: str = "train") -> list[dict[str, Any]]:
    """Return the run's lines of one kind of metrics.jsonl."""
    path = cluster.directory / summary["run_id"] / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def wait_for_step(client: Client, cluster: LocalCluster, run_id: str, step: int) -> None:
    """Return when `step` steps were trained. Fail when that takes too long or a service was given up."""
    deadline_s = time.monotonic() + RUN_TIMEOUT_S
    pause = threading.Event()
    while client.get(run_id).step < step:
        cluster.check()
        assert time.monotonic() < deadline_s, f"{run_id} did not reach step {step}"
        pause.wait(0.05)
