"""`paceline audit verify|show` on a directory, with and without damage."""

from __future__ import annotations

import hashlib
import json
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.services.cli.main import main
from paceline.services.coordinator.audit_log.log import AuditLog
from paceline.services.coordinator.audit_log.records import Entry
from paceline.services.coordinator.audit_log.verification import records
from paceline.services.coordinator.ledger.ledger import Ledger


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory whose log has five records."""
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger:
        log = AuditLog(ledger)
        log.record(Entry("paceline.v1.RunService/Cancel", who="ann", certificate="laptop", subject="sums-1"))
        log.record(
            Entry(
                "exchange/task",
                "PERMISSION_DENIED",
                address="10.0.0.3:41",
                why="\x1b[31manother key; send your own",
            )
        )
        log.close()
    return tmp_path


def run(directory: Path, *arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(main, ["audit", *arguments, "--directory", str(directory)])
    assert done.exit_code == status, done.output
    return done.output


def test_the_newest_records_are_shown(directory: Path) -> None:
    text = run(directory, "show")
    assert "ann (laptop)" in text
    assert "RunService/Cancel" in text
    assert "10.0.0.3:41" in text
    assert "\x1b" not in text
    assert "another key" in text
    assert "send your own" not in text  # the remedy was for the caller
    assert len(run(directory, "show", "--last", "2").splitlines()) == 3  # with the names of the columns


@pytest.mark.parametrize("options", [("--json",), ("--json", "--all")])
def test_all_fields_are_exported_as_json_lines(directory: Path, options: tuple[str, ...]) -> None:
    found = [json.loads(line) for line in run(directory, "show", *options).splitlines()]
    assert [record["sequence"] for record in found] == [1, 2, 3, 4]
    assert (found[1]["who"], found[1]["subject"]) == ("ann", "sums-1")
    assert found[2]["previous"] == found[1]["hash"]


def test_records_without_usual_fields_are_shown(directory: Path) -> None:
    with closing(Ledger(directory / "ledger.sqlite")) as ledger:
        log = AuditLog(ledger)
        log.record(Entry("", "PERMISSION_DENIED", why="nameless"))
        log.close()
    path, newest = directory / "audit" / "000001.jsonl", list(records(directory / "audit", pytest.fail))[-1]
    body = {"sequence": newest.sequence + 1, "time": "", "count": "many", "why": 3, "previous": newest.hash}
    text = json.dumps(body, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(path.read_text() + text[:-1] + f',"hash":"{digest}"}}\n')
    assert "nameless" in run(directory, "show")
    assert "×many" in run(directory, "show")


def test_a_log_that_is_no_file_is_an_error_of_both(directory: Path) -> None:
    path = directory / "audit" / "000001.jsonl"
    path.unlink()
    path.symlink_to("/dev/zero")
    assert "a device" in run(directory, "show", status=1)
    assert "a device" in run(directory, "verify", status=1)


def test_damage_is_an_error_of_both(directory: Path) -> None:
    assert "all records agree" in run(directory, "verify")
    path = directory / "audit" / "000001.jsonl"
    path.write_text(path.read_text().replace('"who":"ann"', '"who":"eve"'))
    found = json.loads(run(directory, "verify", "--json", status=1))["problems"]
    assert found[0].startswith("record 2: line 2 of 000001.jsonl was changed: the hash")
    told = run(directory, "show", status=1)
    assert "audit/start" in told  # what comes before
    assert "`paceline audit verify` names the record" in told


def test_a_directory_without_a_log_is_named(tmp_path: Path) -> None:
    assert "no audit log at" in run(tmp_path, "show", status=1)
    assert "no ledger at" in run(tmp_path, "verify", status=1)
