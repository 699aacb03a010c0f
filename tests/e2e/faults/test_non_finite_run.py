"""A gradient that is not finite, through real services and two ranks: the run is paused and can be resumed, or goes on without
the update."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.client import Client, Event, state_name
from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.local.cluster import LocalCluster
from paceline.spec import RunSpec

DEADLINE_S = 180.0
MakeSpec = Callable[..., RunSpec]


@pytest.fixture
def exploding(make_spec: MakeSpec, tmp_path: Path) -> Callable[..., RunSpec]:
    """A run whose 30th scored group has a reward so large that the square of its gradient overflows."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "import itertools\n"
        "scored = itertools.count(1)\n"
        "def digits(completions, **columns):\n"
        "    if next(scored) == 30:\n"
        "        return [3e38] + [0.0] * (len(completions) - 1)\n"
        "    return [sum(c.isdigit() for c in text) / 4 for text in completions]\n"
    )

    def make(**policy: Any) -> RunSpec:
        return make_spec(
            rewards=[{"function": f"{rewards}:digits"}],
            grpo={"advantage": "dr_grpo"},
            checkpointing={"save_period": 2},
            policy=policy,
        )

    return make


def wait_for(client: Client, cluster: LocalCluster, run_id: str, state: str, sessions: int) -> None:
    """Until the run is in `state` and so many learner sessions have begun."""
    deadline_s, pause = time.monotonic() + DEADLINE_S, threading.Event()
    while True:
        cluster.check()
        begun = sum(event.kind == "session" for event in events(cluster, run_id))
        if state_name(client.get(run_id)) == state and begun == sessions:
            return
        assert time.monotonic() < deadline_s
        pause.wait(0.05)


def events(cluster: LocalCluster, run_id: str) -> list[Event]:
    ledger = Ledger(cluster.directory / "ledger.sqlite", read_only=True)
    try:
        return [Event(e["sequence"], e["kind"], json.loads(e["json"])) for e in ledger.events(run_id, 0)]
    finally:
        ledger.close()


@pytest.mark.merge
@pytest.mark.slow
def test_the_run_is_paused_names_the_group_and_can_be_resumed(
    client: Client, cluster: LocalCluster, exploding: Callable[..., RunSpec]
) -> None:
    run = client.submit(exploding())
    wait_for(client, cluster, run.run_id, "paused", 1)
    paused = client.get(run.run_id)
    (step,) = [word for word in paused.message.split() if word.isdigit()][:1]
    assert paused.step == int(step)
    assert "was stopped before the optimizer" in paused.message
    assert "Groups of the update: [" in paused.message
    assert f"paceline resume {run.run_id}" in paused.message
    # Whoever resumes gets a new session from the newest checkpoint and the same batch. Here it explodes again.
    client.resume(run.run_id)
    wait_for(client, cluster, run.run_id, "paused", 2)
    assert client.get(run.run_id).message == paused.message
    client.cancel(run.run_id)
    ledger = Ledger(cluster.directory / "ledger.sqlite", read_only=True)
    assert verify(ledger, run.run_id).problems == []
    ledger.close()


@pytest.mark.merge
@pytest.mark.slow
def test_a_run_may_go_on_without_the_update(
    client: Client, cluster: LocalCluster, exploding: Callable[..., RunSpec]
) -> None:
    run = client.wait(client.submit(exploding(skip_non_finite_updates=True)).run_id, timeout_s=DEADLINE_S)
    assert state_name(run) == "succeeded", run.message
    lines = [json.loads(line) for line in (Path(run.directory) / "metrics.jsonl").read_text().splitlines()]
    skipped = [line["step"] for line in lines if line["kind"] == "train" and "skipped_updates" in line]
    assert len(skipped) == 1
    warnings = [e.content["message"] for e in events(cluster, run.run_id) if e.kind == "warning"]
    left_out = [text for text in warnings if "an update was skipped" in text]
    assert len(left_out) == 1
    assert f"step {skipped[0]}: " in left_out[0]
