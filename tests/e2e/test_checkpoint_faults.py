"""Checkpoints that are damaged or gone, and backups that are put back: the run goes on with right books."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from test_runs import RUN_TIMEOUT_S, wait_for_step

from paceline.client import Client
from paceline.spec import RunSpec
from paceline.up import LocalCluster

MakeSpec = Callable[..., RunSpec]


def succeeded(client: Client, run_id: str) -> dict[str, Any]:
    """Waits for a run's good end; its summary, whose books balance."""
    run = client.wait(run_id, timeout_s=RUN_TIMEOUT_S)
    summary: dict[str, Any] = json.loads((Path(run.directory) / "summary.json").read_text())
    assert summary["state"] == "succeeded", summary["message"]
    books = {name: summary[f"{name}_tokens"] for name in ("generated", "trained", "dropped", "live")}
    assert books["generated"] == books["trained"] + books["dropped"] + books["live"]
    return summary


def warnings(client: Client, run_id: str) -> list[str]:
    return [event.content["message"] for event in client.watch(run_id) if event.kind == "warning"]


def test_a_damaged_and_a_missing_checkpoint_are_passed_over(
    client: Client,
    cluster: LocalCluster,
    make_spec: MakeSpec,
    gated: Callable[[int], tuple[dict[str, Any], Path]],
) -> None:
    reward, gate = gated(11 * 8)
    run = client.submit(make_spec(grpo={"max_num_steps": 20}, rewards=[reward]))
    wait_for_step(client, cluster, run.run_id, 10)
    checkpoints = Path(run.directory) / "checkpoints"
    file = checkpoints / "1-8" / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    shutil.rmtree(checkpoints / "1-4")
    assert cluster.kill("learner", 0)
    gate.touch()

    summary = succeeded(client, run.run_id)
    assert summary["learner_sessions"] == 4  # from 8, from 4, and from the model
    assert summary["samples"] == 20 * 8 * 4
    said = [message for message in warnings(client, run.run_id) if "could not begin" in message]
    assert len(said) == 2
    assert "1-8 refused" in said[0]
    assert "1-4: " in said[1]
