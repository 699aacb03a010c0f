"""An operator's commands on a run with real services: a checkpoint now, a worker that leaves, and a wait with an exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import paceline

from paceline.client import Client
from paceline.spec import RunSpec
from paceline.spec.reading import spec_to_yaml
from services.local.cluster import LocalCluster

pytestmark = pytest.mark.slow


def test_checkpoint_drain_and_wait(
    client: Client,
    cluster: LocalCluster,
    make_spec: Callable[..., RunSpec],
    gated: Callable[[int], tuple[dict[str, Any], Path]],
    tmp_path: Path,
) -> None:
    reward, gate = gated(4 * 8)
    spec = tmp_path / "spec.yaml"
    spec.write_text(spec_to_yaml(make_spec(rewards=[reward], checkpointing={"save_period": 100})))
    run = client.submit(spec)
    for event in client.watch(run.run_id):
        if event.kind == "step" and event.content["step"] == 1:
            break
    ordered = paceline("checkpoint", run.run_id, coordinator=cluster.address)
    assert ordered.exit_code == 0, ordered.output
    assert Path(ordered.stdout.strip()).is_dir()

    member = next(m.member_id for m in client.members() if m.member_id.startswith("rollout-0"))
    drained = paceline("drain", member, "--grace", "20", "--json", coordinator=cluster.address)
    assert json.loads(drained.stdout)["member_id"] == member
    assert member not in [m.member_id for m in client.members()]
    gate.touch()
    assert client.wait(run.run_id, timeout_s=180).step == 12


def test_the_exit_status_of_a_wait(
    client: Client, cluster: LocalCluster, make_spec: Callable[..., RunSpec], tmp_path: Path
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(spec_to_yaml(make_spec(grpo={"max_num_steps": 2})))
    done = paceline("submit", spec, "--wait", coordinator=cluster.address)
    assert done.exit_code == 0, done.output
    assert "succeeded at step 2" in done.stdout
    (tmp_path / "broken.py").write_text(
        "def broken(completions, **columns):\n    raise ValueError('no such thing')\n"
    )
    functions = f"rewards=[{{function: {tmp_path / 'broken.py'}:broken}}]"
    paused = paceline("submit", spec, functions, "--wait", coordinator=cluster.address)
    assert paused.exit_code == 4, paused.output
    assert "paused at step 0: " in paused.stderr
    assert "no such thing" in paused.stderr
