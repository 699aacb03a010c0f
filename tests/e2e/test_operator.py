"""An operator's commands on a run with real services: a checkpoint now, a worker that leaves, and a wait with an exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import paceline

from paceline.client import Client
from paceline.services.local.cluster import LocalCluster
from paceline.spec import RunSpec
from paceline.spec.reading import spec_to_yaml

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
    (tmp_path / "broken.py").write_text("def broken(completions, **columns):\n    raise ValueError('no such thing')\n")
    functions = f"rewards=[{{function: {tmp_path / 'broken.py'}:broken}}]"
    paused = paceline("submit", spec, functions, "--wait", coordinator=cluster.address)
    assert paused.exit_code == 4, paused.output
    assert "paused at step 0: " in paused.stderr
    assert "no such thing" in paused.stderr


def test_an_urgent_run_goes_first_and_the_other_goes_on_from_its_checkpoint(
    client: Client,
    cluster: LocalCluster,
    make_spec: Callable[..., RunSpec],
    tmp_path: Path,
) -> None:
    long, urgent = tmp_path / "long.yaml", tmp_path / "urgent.yaml"
    long.write_text(spec_to_yaml(make_spec(grpo={"max_num_steps": 60}, checkpointing={"save_period": 100})))
    urgent.write_text(spec_to_yaml(make_spec(priority=5, grpo={"max_num_steps": 2})))
    first = client.submit(long)
    for event in client.watch(first.run_id):
        if event.kind == "step" and event.content["step"] == 1:
            break
    second = client.submit(urgent)
    assert client.wait(second.run_id, timeout_s=180).step == 2
    assert client.wait(first.run_id, timeout_s=300).step == 60
    events = [event for event in client.watch(first.run_id) if event.kind in ("session", "checkpoint", "state")]
    states = [event.content["state"] for event in events if event.kind == "state"]
    assert states == ["queued", "running", "queued", "running", "succeeded"]
    sessions = [event.content["step"] for event in events if event.kind == "session"]
    steps = [event.content["step"] for event in events if event.kind == "checkpoint"]
    assert len(sessions) == 2
    assert sessions[1] == steps[0] > 0, "it goes on from the checkpoint that it wrote before it yielded"
    verified = paceline("ledger", "verify", str(cluster.directory / first.run_id))
    assert verified.exit_code == 0, verified.output


def test_a_run_whose_hours_are_over_ends_in_good_order(
    client: Client, cluster: LocalCluster, make_spec: Callable[..., RunSpec], tmp_path: Path
) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(spec_to_yaml(make_spec(max_hours=2 / 3600, grpo={"max_num_steps": 5000})))
    done = paceline("submit", spec, "--wait", coordinator=cluster.address)
    assert done.exit_code == 0, done.output
    (run,) = [run for run in client.runs() if run.max_num_steps == 5000]
    assert 0 < run.step < 5000
    assert run.message == f"the max_hours of {2 / 3600:g} are over: the run ends after step {run.step} of 5000"
    checkpoints = [e.content["step"] for e in client.watch(run.run_id) if e.kind == "checkpoint"]
    assert checkpoints[-1] == run.step
    assert list((cluster.directory / run.run_id / "export").glob("*.safetensors"))
    verified = paceline("ledger", "verify", str(cluster.directory / run.run_id))
    assert verified.exit_code == 0, verified.output
