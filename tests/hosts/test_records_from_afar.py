"""What a coordinator has on record, asked for from another host that has its address and its token alone."""

from __future__ import annotations

import base64
import io
import json
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from isolated_host import SHOWN, Host, Switch, missing
from trained_ledger import RUN_ID, Writer

PORT = 7070
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    """A host whose coordinator has a run on record, and one that has nothing but its address and token."""
    if why := missing():
        pytest.skip(f"hosts with namespaces of their own: {why}")
    folder = tmp_path_factory.mktemp("records")
    writer = Writer(folder, str(folder / "model"))
    writer.train_a_step()
    with writer.ledger.transaction():
        for step in range(3):
            content = {"step": step, "time": 1.7e9, "reward": step / 4, "loss": 1.0}
            writer.ledger.add_event(RUN_ID, "step", content)
    writer.ledger.close()
    with Switch() as switch:
        coordinator = switch.host("coordinator", folder)
        put(coordinator, folder / "runs")
        coordinator.start(
            *(
                "paceline",
                "serve",
                "coordinator",
                "--directory",
                str(folder / "runs"),
                "--host",
                coordinator.address,
            ),
            *("--port", str(PORT), "--insecure"),
        )
        reader = switch.host("reader", folder)
        reader.write("/tmp/token", token_of(coordinator, folder / "runs" / "token"))
        yield coordinator, reader


def put(host: Host, folder: Path) -> None:
    """Copy a folder to the same place on a host's disk."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(folder, str(folder))
    host.write("/tmp/packed", base64.b64encode(packed.getvalue()).decode())
    host.run("sh", "-c", "base64 -d /tmp/packed | tar -xz -C /")


def token_of(host: Host, path: Path) -> str:
    deadline_s = time.monotonic() + DEADLINE_S
    while not (text := host.run("cat", str(path), check=False).stdout):
        assert time.monotonic() < deadline_s, "the coordinator has not written its token"
        time.sleep(0.2)
    return text


def ask(records: tuple[Host, Host], *command: str) -> str:
    """Run a command on the host that has the address alone; return what it prints."""
    coordinator, reader = records
    address = f"{coordinator.address}:{PORT}"
    access = ("--coordinator", address, "--token-file", "/tmp/token", "--insecure")
    done = reader.run("paceline", *command, *access, timeout_s=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_reader_has_none_of_the_records(records: tuple[Host, Host]) -> None:
    above = {Path(shown).parts[2] for shown in SHOWN if shown.startswith("/tmp/")}  # where the code itself is
    found = records[1].run("ls", "-A", "/tmp", "/tmp/home").stdout.split()
    assert [name for name in found if name not in above] == [
        "/tmp:",
        "home",
        "ready",
        "token",
        "/tmp/home:",
    ]


def test_samples_and_metrics(records: tuple[Host, Host]) -> None:
    (group,) = (json.loads(line) for line in ask(records, "samples", RUN_ID, "--json").splitlines())
    assert [each["text"] for each in group["completions"]] == ["2", "three"]
    assert "three" in ask(records, "samples", RUN_ID, "--worst", "1")
    rows = [json.loads(line) for line in ask(records, "metrics", RUN_ID, "--json").splitlines()]
    assert [row["reward"] for row in rows] == [0.0, 0.25, 0.5]


@pytest.mark.merge
@pytest.mark.slow
def test_report_and_export(records: tuple[Host, Host]) -> None:
    ask(records, "report", RUN_ID, "-o", "/tmp/report.html", "--verify")
    page = records[1].run("cat", "/tmp/report.html").stdout
    assert "All records agree" in page
    assert "three" in page
    ask(records, "samples", "export", RUN_ID, "/tmp/samples.jsonl")
    rows = [json.loads(line) for line in records[1].run("cat", "/tmp/samples.jsonl").stdout.splitlines()]
    assert [row["completion"] for row in rows] == ["2", "three"]
    ask(records, "plot", RUN_ID, "reward", "-o", "/tmp/reward.html")
    assert "reward" in records[1].run("cat", "/tmp/reward.html").stdout


@pytest.mark.merge
@pytest.mark.slow
def test_verify_runs_at_the_coordinator(records: tuple[Host, Host]) -> None:
    assert ask(records, "ledger", "verify", RUN_ID).startswith(f"{RUN_ID}: all records agree")


def test_without_the_token_nothing_is_told(records: tuple[Host, Host]) -> None:
    coordinator, reader = records
    reader.write("/tmp/wrong", "0" * 64)
    address = f"{coordinator.address}:{PORT}"
    command = (
        "paceline",
        "samples",
        RUN_ID,
        "--coordinator",
        address,
        "--token-file",
        "/tmp/wrong",
        "--insecure",
    )
    done = reader.run(*command, check=False)
    assert done.returncode != 0
    assert "three" not in done.stdout + done.stderr
