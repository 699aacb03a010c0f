"""A group that really kills whoever works on it: found, leased alone, dropped; the run ends well without it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from forked_services import ForkedCluster

from paceline.client import ENDED_STATES, Client, state_name
from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection, RunSpec

RUN_TIMEOUT_S = 400.0
REWARD = """
import os, pathlib, time

def deadly(prompts, completions, **columns):
    chosen = pathlib.Path({chosen!r})
    if not chosen.exists():
        chosen.write_text(prompts[0])
    if chosen.read_text() == prompts[0]:
        pathlib.Path(f"{{chosen}}.{{os.getpid()}}").touch()
        time.sleep(600)
    return [sum(c.isdigit() for c in text) / 4 for text in completions]
"""
"""Asks the test to kill the reward service, which it may not do itself, whenever it scores the prompt that it was asked about
first."""


def kill_who_scores(cluster: LocalCluster, chosen: Path) -> None:
    """Kill each reward service one of whose processes scores the chosen prompt."""
    for asked in chosen.parent.glob(f"{chosen.name}.*"):
        scorer = int(asked.suffix[1:])
        for service in cluster.pids("reward").values():
            with contextlib.suppress(psutil.NoSuchProcess):
                if scorer in {child.pid for child in psutil.Process(service).children(recursive=True)}:
                    os.kill(service, signal.SIGKILL)
                    asked.unlink()


@pytest.mark.slow
def test_a_group_that_kills_its_worker_is_dropped_and_the_run_ends_well(
    make_spec: Callable[..., RunSpec], tmp_path: Path
) -> None:
    source, chosen = tmp_path / "deadly.py", tmp_path / "chosen"
    source.write_text(REWARD.format(chosen=str(chosen)))
    spec = make_spec(
        rewards=[{"function": f"{source}:deadly"}],
        grpo={"num_prompts_per_step": 4, "max_num_steps": 4},
        data={"validation": None},
    )
    sizes = ClusterSection(rollout_workers=1, reward_workers=2)
    options = {
        "coordinator": ["--heartbeat-timeout", "6"]
    }  # a crash counts when the worker is not back within half of that
    with (
        ForkedCluster(tmp_path / "runs", sizes, options=options) as cluster,
        Client(cluster.address) as client,
    ):
        run = client.submit(spec)
        deadline_s, pause = time.monotonic() + RUN_TIMEOUT_S, threading.Event()
        while state_name(run := client.get(run.run_id)) not in ENDED_STATES:
            assert time.monotonic() < deadline_s, f"{run.run_id} is at step {run.step}"
            kill_who_scores(cluster, chosen)
            pause.wait(0.05)
        deaths = [death for index in range(2) for death in cluster.deaths("reward", index)]
        warnings = [e.content["message"] for e in client.watch(run.run_id) if e.kind == "warning"]

    assert run.step == 4, run.message
    assert run.groups["dropped:poison"] == 1
    assert deaths == [f"reward-{i} was killed by SIGKILL" for i in sorted(int(d[7]) for d in deaths)]
    # A crash whose worker is back in time counts for nothing, so there may be more.
    assert len(deaths) >= 4, "two crashes among others, two alone"
    assert any("from now on it is leased alone" in message for message in warnings)
    assert any("check its prompt" in message for message in warnings)
    with contextlib.closing(Ledger(tmp_path / "runs" / "ledger.sqlite", read_only=True)) as ledger:
        assert verify(ledger, run.run_id).problems == []
        row = ledger.db.execute(
            "SELECT * FROM groups JOIN prompts USING (run_id, group_id) WHERE reason = 'poison'"
        ).fetchone()
    assert chosen.read_text() in row["prompt_json"]
