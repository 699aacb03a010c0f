"""Checkpoints that are damaged or gone, and backups that are put back: the run goes on with right books."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from service_processes import PACELINE, Services, environment, opened, wait_for
from watched_runs import RUN_TIMEOUT_S, wait_for_step

from paceline.client import Client
from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger.backup import back_up
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.local.cluster import LocalCluster
from paceline.spec import RunSpec

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


def wait_until_registered(directory: Path, step: int) -> None:
    """Training does not wait for a checkpoint that is written."""
    deadline_s = time.monotonic() + RUN_TIMEOUT_S
    pause = threading.Event()
    with opened(directory.parent) as ledger:
        while (newest := ledger.checkpoints.newest(directory.name)) is None or newest.step < step:
            assert time.monotonic() < deadline_s, f"no checkpoint of step {step}"
            pause.wait(0.05)


@pytest.mark.slow
def test_a_damaged_and_a_missing_checkpoint_are_passed_over(
    client: Client,
    cluster: LocalCluster,
    make_spec: MakeSpec,
    gated: Callable[[int], tuple[dict[str, Any], Path]],
) -> None:
    reward, gate = gated(11 * 8)
    run = client.submit(make_spec(grpo={"max_num_steps": 20}, rewards=[reward]))
    wait_for_step(client, cluster, run.run_id, 10)
    wait_until_registered(Path(run.directory), 8)
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


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    started = Services(tmp_path / "runs")
    yield started
    for process in started.processes.values():
        process.kill()
        process.wait()


def wait_until_trained(client: Client, run_id: str, steps: int) -> None:
    deadline_s = time.monotonic() + RUN_TIMEOUT_S
    pause = threading.Event()
    while client.get(run_id).step < steps:
        assert time.monotonic() < deadline_s, f"{run_id} did not reach step {steps}"
        pause.wait(0.05)


def end(services: Services, *roles: str) -> None:
    for role in roles:
        process = services.processes.pop(role)
        process.kill()
        process.wait()


STEPS = 16
OPTIONS = {"learner": ("--ranks", "1")}


def paceline(*arguments: str) -> str:
    """Return the output of a command of the CLI, which has to end well."""
    done = subprocess.run(
        [*PACELINE, *arguments],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def trained_groups(ledger: Ledger, run_id: str) -> list[int]:
    """Along the lineage: of each step what its newest session says."""
    rows = ledger.db.execute(
        "SELECT group_ids FROM receipts r WHERE run_id = ? AND session = (SELECT MAX(session) FROM receipts n"
        " WHERE n.run_id = r.run_id AND n.step = r.step)",
        (run_id,),
    )
    return [group_id for row in rows for group_id in json.loads(row["group_ids"])]


@pytest.mark.slow
@pytest.mark.parametrize(("keep_top_k", "living"), [(1, True), (50, False), (50, True), (1, False)])
def test_a_backup_put_back_goes_on_among_newer_files_and_workers(
    services: Services,
    make_spec: MakeSpec,
    gated: Callable[[int], tuple[dict[str, Any], Path]],
    keep_top_k: int,
    living: bool,
) -> None:
    """Backup after some steps, on past further checkpoints and another session, the backup put back. With `living` workers stay
    as they are; else everything is started anew, and in another place: the folder was moved."""
    reward, gate = gated(11 * 8)
    ready = services.directory / "address"
    services.start("coordinator", "--directory", str(services.directory), "--port", "0", "--ready-file", str(ready))
    wait_for(ready, services.processes["coordinator"])
    address = ready.read_text().strip()
    for role in ("rollout", "reward", "learner"):
        services.start(role, *OPTIONS.get(role, ()), "--coordinator", address, "--port", "0")
    backup = services.directory.parent / "backup.sqlite"
    spec = make_spec(
        grpo={"max_num_steps": STEPS},
        checkpointing={"save_period": 2, "keep_top_k": keep_top_k},
        rewards=[reward],
    )
    with Client(address) as client:
        run_id = client.submit(spec).run_id
        wait_until_trained(client, run_id, 3)
        with opened(services.directory) as ledger:
            back_up(ledger, backup)
            behind = ledger.run(run_id)["next_step"]
        wait_until_trained(client, run_id, 7)
        end(services, "learner")
        services.start("learner", *OPTIONS["learner"], "--coordinator", address, "--port", "0")
        wait_until_trained(client, run_id, 10)

    directory = services.directory
    if living:
        end(services, "coordinator")
    else:
        end(services, *services.processes)
        directory = directory.rename(directory.with_name("moved"))
    shutil.copyfile(backup, directory / "ledger.sqlite")
    gate.touch()
    if living:
        port = address.rpartition(":")[2]
        services.start("coordinator", "--directory", str(directory), "--port", port)
        with Client(address, timeout_s=30) as client:
            ended = client.wait(run_id, timeout_s=RUN_TIMEOUT_S)
            assert (ended.step, ended.message) == (STEPS, "")
    else:
        paceline("up", "--directory", str(directory), "--port", "0")

    with opened(directory) as ledger:
        row = ledger.run(run_id)
        assert (row["state"], row["next_step"]) == ("succeeded", STEPS)
        assert row["session"] >= 3
        assert verify(ledger, run_id).problems == []
        sessions = ledger.db.execute(
            "SELECT DISTINCT session FROM receipts WHERE run_id = ? AND step >= ?", (run_id, behind)
        )
        assert min(session for (session,) in sessions) >= 3, "a number was given twice"
        events = ledger.db.execute("SELECT json FROM events WHERE run_id = ? AND kind = 'warning'", (run_id,))
        messages = [json.loads(event["json"])["message"] for event in events]
        assert any("restored from a backup" in message for message in messages), messages
        assert any("are ahead of the ledger" in message for message in messages), messages
        trained = trained_groups(ledger, run_id)
    assert len(trained) == len(set(trained)) == STEPS * 8
    (beside,) = directory.glob("ledger.sqlite.set-aside-*")
    assert (beside / "ledger.sqlite-segments").is_dir()
    kept = {path.name for path in (directory / run_id / "checkpoints").glob("set-aside-*/*")}
    assert kept, "checkpoints ahead of the backup are kept"
    lines = [json.loads(line) for line in (directory / run_id / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(STEPS))
    assert "train" in (directory / run_id / "metrics.jsonl.set-aside").read_text()
    facts = json.loads(paceline("replay", str(directory / run_id), "--from", "0", "--device", "cpu", "--json"))
    assert facts["identical"] is True, facts
