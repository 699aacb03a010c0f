"""SIGTERM to every role, in any order: what was made is kept, the last step has its checkpoint, `paceline up` goes on.

The services are started one by one, without a supervisor: who ends stays ended.
"""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from service_processes import PACELINE, Services, environment, opened, wait_for

from paceline.client import Client
from paceline.services.coordinator.audit.verify import verify
from paceline.spec import RunSpec
from paceline.spec.reading import spec_to_yaml

pytestmark = pytest.mark.slow
DEADLINE_S = 180.0
MakeSpec = Callable[..., RunSpec]
ORDERS = [
    pytest.param(("coordinator", "learner", "reward", "rollout"), marks=pytest.mark.merge),
    ("rollout", "reward", "learner", "coordinator"),
    ("learner", "coordinator", "rollout", "reward"),
    ("reward", "rollout", "coordinator", "learner"),
]


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    started = Services(tmp_path / "runs")
    yield started
    for process in started.processes.values():
        process.kill()
        process.wait()


def check_drained(directory: Path, run_id: str) -> int:
    """The steps trained: the newest checkpoint is of the last one; nothing was generated or scored in vain."""
    with opened(directory) as ledger:
        row = ledger.run(run_id)
        checkpoint = ledger.checkpoints.newest(run_id)
        assert checkpoint is not None
        assert checkpoint.step == row["next_step"]
        assert (Path(checkpoint.path) / "manifest.json").is_file()
        assert ledger.token_books(run_id)["wasted"] == 0
        assert verify(ledger, run_id).problems == []
        return int(row["next_step"])


def finished(directory: Path) -> dict[str, sqlite3.Row]:
    """Groups that were generated, by id."""
    with opened(directory) as ledger:
        rows = ledger.db.execute("SELECT * FROM groups WHERE class = 'train' AND digest IS NOT NULL")
        return {row["group_id"]: row for row in rows}


def go_on(directory: Path, run_id: str, steps: int) -> None:
    """`paceline up` without a spec: the run ends well, from the checkpoint, and no group was made again."""
    before = finished(directory)
    arguments = ["up", "--directory", str(directory), "--port", "0"]
    ended = subprocess.run(
        [*PACELINE, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment(),
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"continues from step {steps}" in (directory / "logs" / "learner-0.log").read_text()
    with opened(directory) as ledger:
        row = ledger.run(run_id)
        assert (row["state"], row["next_step"]) == ("succeeded", 30)
        assert verify(ledger, run_id).problems == []
        trained = [
            group_id
            for receipt in ledger.db.execute("SELECT group_ids FROM receipts WHERE run_id = ?", (run_id,))
            for group_id in json.loads(receipt["group_ids"])
        ]
    assert len(trained) == len(set(trained)), "a group was trained twice"
    after = finished(directory)
    assert {group_id: row["digest"] for group_id, row in before.items()}.items() <= {
        group_id: row["digest"] for group_id, row in after.items()
    }.items()


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "-".join(order))
def test_sigterm_to_every_role_in_any_order(services: Services, make_spec: MakeSpec, order: tuple[str, ...]) -> None:
    ready = services.directory / "address"
    services.start("coordinator", "--directory", str(services.directory), "--port", "0", "--ready-file", str(ready))
    wait_for(ready, services.processes["coordinator"])
    address = ready.read_text().strip()
    with Client(address) as client:
        # Checkpoints of its own would come after 30 steps only: the one that is found is SIGTERM's.
        spec = make_spec(grpo={"max_num_steps": 30}, checkpointing={"save_period": 30}, cluster={"rollout_workers": 1})
        run = client.submit(spec)
        for role in ("rollout", "reward", "learner"):
            services.start(role, "--coordinator", address)
        for event in client.watch(run.run_id):
            if event.kind == "step" and event.content["step"] >= 2:
                break
    for role in order:
        services.processes[role].send_signal(signal.SIGTERM)
    for role, process in services.processes.items():
        process.wait(DEADLINE_S)
        assert "Traceback" not in services.log(role), services.log(role)

    steps = check_drained(services.directory, run.run_id)
    assert steps >= 3
    go_on(services.directory, run.run_id, steps)


def test_up_drains_all_and_goes_on(make_spec: MakeSpec, tmp_path: Path) -> None:
    directory, file = tmp_path / "runs", tmp_path / "spec.yaml"
    file.write_text(spec_to_yaml(make_spec(grpo={"max_num_steps": 30}, checkpointing={"save_period": 30})))
    command = [*PACELINE, "up", str(file), "--directory", str(directory), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()) as up:
        assert up.stdout is not None
        for line in up.stdout:
            event = json.loads(line)
            if event["kind"] == "step" and event["content"]["step"] >= 2:
                break
        names = {process.name() for process in psutil.Process(up.pid).children()}
        assert {"rollout-0", "reward-0", "learner-0"} <= names, "the workers were not forked"
        up.send_signal(signal.SIGTERM)
        _, said = up.communicate(timeout=DEADLINE_S)
    assert up.returncode == 130, said
    assert "is killed" not in said
    assert "continues the open runs" in said

    steps = check_drained(directory, "test-1")
    assert 3 <= steps < 30
    go_on(directory, "test-1", steps)
