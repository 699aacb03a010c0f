"""`paceline up` with the runs that a ledger has: which go on, which it lists, and with which services."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import Result
from command_line import paceline

from paceline.errors import Conflict
from paceline.services.cli.running.up import MAX_SHOWN, left_runs
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.ledger.schema import SCHEMA_VERSION, UPGRADES
from paceline.spec.reading import parse_spec, spec_to_yaml

SPEC = parse_spec(
    {
        "name": "sums",
        "policy": {"model_name": "m"},
        "data": {"train": "d"},
        "rewards": [{"function": "length"}],
    }
)
UNREADABLE = "{policy: {model_name: m}, data: {train: d}, rewards: [{function: length}], grpo: {max_num_steps: lots}}"


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """A ledger without runs, still open: the commands read it beside its writer."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    yield ledger
    ledger.close()


def add(ledger: Ledger, run_id: str, state: str, message: str = "", text: str = "") -> None:
    with ledger.transaction():
        ledger.add_run(run_id, text or spec_to_yaml(SPEC), str(ledger.path.parent / run_id))
        ledger.update_run(run_id, state=state, message=message)


def test_a_ledger_of_an_older_format_is_upgraded_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, before = tmp_path / "ledger.sqlite", SCHEMA_VERSION - 1
    with contextlib.closing(Ledger(path)) as ledger:
        add(ledger, "sums-1", "queued")
    with contextlib.closing(sqlite3.connect(path)) as db:
        (script,) = db.execute("SELECT sql FROM sqlite_master WHERE name = 'audit_heads'").fetchone()
        db.executescript(f"DROP TABLE audit_heads; PRAGMA user_version = {before}")
    with pytest.raises(Conflict, match="has format"):
        left_runs(path)
    monkeypatch.setitem(UPGRADES, before, f"{script};")
    assert left_runs(path).open == {"sums-1": SPEC}
    assert path.with_name(f"{path.name}.format-{before}").exists()


def test_runs_are_told_apart(ledger: Ledger, tmp_path: Path) -> None:
    assert left_runs(tmp_path / "nowhere" / "ledger.sqlite").open == {}
    add(ledger, "sums-1", "running", text=UNREADABLE)
    add(ledger, "sums-2", "queued")
    add(ledger, "sums-3", "paused")
    add(ledger, "sums-4", "failed", "no function 'f'")
    for number, state in enumerate(("succeeded", "cancelled"), 5):
        add(ledger, f"sums-{number}", state, text=UNREADABLE)
    left = left_runs(ledger.path)
    assert left.open == {"sums-2": SPEC, "sums-3": SPEC}
    assert list(left.unreadable) == ["sums-1"]
    assert left.advice() == [
        left.unreadable["sums-1"],
        "run sums-4 has failed (no function 'f'); --resume sums-4 queues it again",
    ]
    assert "max_num_steps" in left.unreadable["sums-1"]
    assert left.unreadable["sums-1"].endswith("or end the run with `paceline cancel sums-1`")


def test_the_newest_failed_runs_are_named(ledger: Ledger) -> None:
    for number in range(MAX_SHOWN + 2):
        add(ledger, f"sums-{number}", "failed", "why")
    *named, last = left_runs(ledger.path).advice(resumed=["sums-3"])
    assert [line.split()[1] for line in named] == ["sums-6", "sums-5", "sums-4", "sums-2", "sums-1"]
    assert last == "1 older runs have failed too"


class Recorded:
    """Stand-in for the cluster and the client of `paceline up` that records its calls in order."""

    def __init__(self) -> None:
        self.options: dict[str, list[str]] = {}
        self.directory = Path()
        self.address = "nowhere:1"
        self.calls: list[tuple[str, str]] = []
        self.failing: set[str] = set()

    def cluster(self, directory: Path, sizes: Any, **settings: Any) -> Recorded:
        self.directory, self.options = directory, settings["options"]
        return self

    def client(self, address: str, **_: Any) -> Recorded:
        return self

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start_coordinator(self) -> str:
        return self.address

    def start_workers(self) -> None:
        self.calls.append(("workers", ""))

    def start_page(self, cluster: Any, host: str, say: Any) -> None:
        assert cluster is self

    def resume(self, run_id: str) -> None:
        self.calls.append(("resume", run_id))

    def follow(self, client: Any, run_id: str, *, earlier: int, shown: Any) -> None:
        self.calls.append(("follow", run_id))
        if run_id in self.failing:
            raise click.exceptions.Exit(1)

    def stop(self) -> None:
        self.calls.append(("stop", ""))

    def close(self) -> None:
        pass

    def check(self) -> None:
        pass


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded = Recorded()
    monkeypatch.setattr("paceline.services.cli.running.up.LocalCluster", recorded.cluster)
    monkeypatch.setattr("paceline.services.cli.running.up.Client", recorded.client)
    monkeypatch.setattr("paceline.services.cli.running.up.follow", recorded.follow)
    monkeypatch.setattr("paceline.services.cli.running.up.start_page", recorded.start_page)
    monkeypatch.setattr("paceline.services.cli.running.up.visible_gpus", tuple)
    return recorded


def up(ledger: Ledger, *arguments: str) -> Result:
    return paceline("up", "--directory", ledger.path.parent, *arguments)


def test_up_goes_on_with_the_others_where_one_cannot_be_read(ledger: Ledger, recorded: Recorded) -> None:
    add(ledger, "sums-1", "running", text=UNREADABLE)
    add(ledger, "sums-2", "queued")
    add(ledger, "sums-3", "queued")
    recorded.failing = {"sums-2"}
    result = up(ledger)
    assert recorded.calls == [("workers", ""), ("follow", "sums-2"), ("follow", "sums-3"), ("stop", "")]
    assert "this version of Paceline cannot read the spec of run sums-1: " in result.stderr
    assert result.exit_code == 1, "one of them has not succeeded"
    recorded.failing = set()
    assert up(ledger).exit_code == 0


def test_up_with_nothing_that_goes_on_names_what_a_person_can_do(ledger: Ledger, recorded: Recorded) -> None:
    add(ledger, "sums-1", "queued", text=UNREADABLE)
    add(ledger, "sums-2", "failed", "no function 'f'")
    result = up(ledger)
    assert result.exit_code == 2
    assert "cannot read the spec of run sums-1" in result.stderr
    assert "run sums-2 has failed (no function 'f'); --resume sums-2 queues it again" in result.stderr
    assert "has no open run" in result.stderr
    assert recorded.calls == []


def test_up_resumes_what_it_is_told(ledger: Ledger, recorded: Recorded) -> None:
    add(ledger, "sums-1", "failed", "no function 'f'")
    add(ledger, "sums-2", "paused", "by a person")
    result = up(ledger, "--resume", "sums-1", "--resume", "sums-2")
    assert result.exit_code == 0, result.output
    assert recorded.calls == [
        ("resume", "sums-1"),
        ("resume", "sums-2"),
        ("workers", ""),
        ("follow", "sums-2"),
        ("follow", "sums-1"),
        ("stop", ""),
    ]
    assert "has failed" not in result.stderr
    refused = up(ledger, "--resume", "sums-9")
    assert refused.stderr.endswith(
        "Error: no run 'sums-9' has failed or is open; the failed and open runs are: sums-2, sums-1\n"
    )


def test_a_failed_run_that_cannot_be_read_is_not_resumed(ledger: Ledger, recorded: Recorded) -> None:
    add(ledger, "sums-1", "failed", "why", text=UNREADABLE)
    result = up(ledger, "--resume", "sums-1")
    assert result.exit_code == 1
    assert "Error: this version of Paceline cannot read the spec of run sums-1" in result.stderr
    assert recorded.calls == []


@pytest.mark.parametrize(("arguments", "limit"), [((), "512"), (("--min-free-mb", "7"), "7")])
def test_up_tells_the_coordinator_how_much_of_the_disk_stays_free(
    ledger: Ledger, recorded: Recorded, arguments: tuple[str, ...], limit: str
) -> None:
    add(ledger, "sums-1", "running")
    assert up(ledger, *arguments).exit_code == 0
    assert recorded.options["coordinator"] == ["--min-free-mb", limit]
