"""Tampering is found: with the log alone, with the log and the ledger, and with older copies of both."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from paceline.services.coordinator.audit_log.log import AuditLog
from paceline.services.coordinator.audit_log.records import MAX_FILES, AuditFiles, Entry, chained
from paceline.services.coordinator.audit_log.verification import check_end, records, verify
from paceline.services.coordinator.ledger.backup import back_up
from paceline.services.coordinator.ledger.file_check import VerifyReport
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.ledger.tables.audit_heads import NONE, AuditHead

Tamper = Callable[[Path], None]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with six records, of which a checkpoint names the fifth."""
    add_records(tmp_path, 4)
    return tmp_path


def add_records(directory: Path, number: int) -> None:
    """Append a start, so many records and a stop; a checkpoint names the one before the stop."""
    with closing(Ledger(directory / "ledger.sqlite")) as ledger:
        log = AuditLog(ledger)
        for index in range(number):
            log.record(Entry("x/Y", subject=f"run-{index}"))
        newest = list(records(log.folder, lambda fault: None))[-1]
        log.close()
    head = AuditHead(newest.sequence, newest.hash)
    checkpoint = directory / "sums-1" / "checkpoints" / f"1-{head.sequence}"
    checkpoint.mkdir(parents=True)
    manifest = {"extra": {"audit": head._asdict()}}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def problems(directory: Path, max_files: int = MAX_FILES) -> list[str]:
    with closing(Ledger(directory / "ledger.sqlite", read_only=True)) as ledger:
        return verify(ledger, max_files).problems


def lines(directory: Path) -> list[bytes]:
    return (directory / "audit" / "000001.jsonl").read_bytes().splitlines(keepends=True)


def put(directory: Path, kept: list[bytes]) -> None:
    (directory / "audit" / "000001.jsonl").write_bytes(b"".join(kept))


def forge(directory: Path, first: int) -> list[bytes]:
    """Return the log with another record `first` and hashes that fit."""
    forged, previous = lines(directory)[: first - 1], ""
    if forged:
        previous = json.loads(forged[-1])["hash"]
    for sequence in range(first, len(lines(directory)) + 1):
        line, previous = chained(sequence, 1.0, Entry("x/Y", who="mallory"), previous)
        forged.append(line)
    return forged


def test_an_honest_log_has_no_problems(directory: Path) -> None:
    add_records(directory, 2)
    with closing(Ledger(directory / "ledger.sqlite", read_only=True)) as ledger:
        report = verify(ledger)
        assert report.problems == []
        assert report.facts == {
            "records": 10,
            "hash": json.loads(lines(directory)[-1])["hash"],
            "files": 1,
            "manifests": 2,
        }


def test_a_ledger_without_a_log_has_no_problems(tmp_path: Path) -> None:
    Ledger(tmp_path / "ledger.sqlite").close()
    assert problems(tmp_path) == []


@pytest.mark.parametrize("index", range(6))
def test_a_changed_record_is_named(directory: Path, index: int) -> None:
    kept = lines(directory)
    kept[index] = kept[index].replace(b'"time":"2', b'"time":"1')
    put(directory, kept)
    assert problems(directory)[0].startswith(f"record {index + 1}: line {index + 1} of 000001.jsonl was changed")


@pytest.mark.parametrize("index", range(5))
def test_a_removed_record_is_named(directory: Path, index: int) -> None:
    kept = lines(directory)
    del kept[index]
    put(directory, kept)
    number = index + 1
    assert problems(directory)[0] == f"record {number}: records {number} to {number} are missing in 000001.jsonl"


def test_moved_and_inserted_records_are_named(directory: Path) -> None:
    kept = lines(directory)
    put(directory, [kept[0], kept[2], kept[1], *kept[3:]])
    assert problems(directory)[0] == "record 2: records 2 to 2 are missing in 000001.jsonl"
    assert "record 2: the record is in 000001.jsonl after record 3" in problems(directory)
    put(directory, [*kept[:3], kept[2], *kept[3:]])
    assert problems(directory)[0] == "record 3: the record is in 000001.jsonl after record 3"


@pytest.mark.parametrize("kept", range(6))
def test_an_end_that_was_cut_off_is_named(directory: Path, kept: int) -> None:
    put(directory, lines(directory)[:kept])
    found = [each for each in problems(directory) if each.startswith(f"record {kept + 1}: ")]
    assert f"the log ends with record {kept}, but the ledger, of file 1, has record 6" in found[0]
    with closing(Ledger(directory / "ledger.sqlite", read_only=True)) as ledger:
        report = VerifyReport()
        check_end(ledger, report)
    assert report.problems == [f"audit log: the log ends with record {kept}, but the ledger has record 6"]


def test_a_log_that_is_gone_is_named(directory: Path) -> None:
    shutil.rmtree(directory / "audit")
    assert problems(directory)[0] == "file 1: the file is missing; its last record was 6"


def replace_by_folder(path: Path) -> None:
    path.mkdir()


def replace_by_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def replace_by_full_disk(path: Path) -> None:
    path.symlink_to("/dev/full")


def replace_by_pipe(path: Path) -> None:
    os.mkfifo(path)


def replace_by_long_line(path: Path) -> None:
    path.write_bytes(bytes(1 << 20))


def replace_by_a_terabyte(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def replace_by_nothing(path: Path) -> None:
    pass


def replace_by_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize(
    "replace",
    [
        replace_by_folder,
        replace_by_zeros,
        replace_by_full_disk,
        replace_by_pipe,
        replace_by_long_line,
        replace_by_a_terabyte,
        replace_by_nothing,
        replace_by_dangling_link,
    ],
)
def test_a_log_that_is_no_file_is_named_and_the_next_start_goes_on_in_the_next_file(
    directory: Path, replace: Tamper
) -> None:
    path = directory / "audit" / "000001.jsonl"
    path.unlink()
    replace(path)
    with closing(Ledger(directory / "ledger.sqlite", read_only=True)) as ledger:
        at_end = VerifyReport()
        check_end(ledger, at_end)
        assert at_end.problems
    assert problems(directory)
    add_records(directory, 1)
    with closing(Ledger(directory / "ledger.sqlite", read_only=True)) as ledger:
        at_end = VerifyReport()
        check_end(ledger, at_end)
        assert at_end.problems == []
    assert any("1" in each for each in problems(directory))


def test_a_file_with_a_huge_number_is_named(directory: Path) -> None:
    (directory / "audit" / "999999999999.jsonl").write_bytes(b"")
    assert "file 2: the files 2 to 999999999998 are missing" in problems(directory)


def test_a_copy_of_a_ledger_needs_no_log(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("copy") / "ledger.sqlite"
    with closing(Ledger(directory / "ledger.sqlite", read_only=True)) as ledger:
        back_up(ledger, copy)
    with closing(Ledger(copy, read_only=True)) as ledger:
        report = VerifyReport()
        check_end(ledger, report)
    assert report.problems == []
    assert "missing beside this copy" in report.facts["audit_log"]


def test_a_last_line_cut_in_its_middle_is_a_cut_end(directory: Path) -> None:
    kept = lines(directory)
    put(directory, [*kept[:-1], kept[-1][:-5]])
    assert any("ends with record 5, but the ledger, of file 1, has record 6" in each for each in problems(directory))


def test_a_log_written_anew_from_a_record_on_does_not_have_the_hashes_that_others_know(
    directory: Path,
) -> None:
    put(directory, forge(directory, 3))
    found = problems(directory)
    assert [each.split(",")[0] for each in found] == [
        "record 5: the hash in 000001.jsonl is " + json.loads(lines(directory)[4])["hash"],
        "record 6: the hash in 000001.jsonl is " + json.loads(lines(directory)[5])["hash"],
    ]


def test_older_copies_of_log_and_ledger_lack_what_a_checkpoint_knows(directory: Path, tmp_path: Path) -> None:
    """The ledger then knows neither the records nor the checkpoint."""
    older = tmp_path / "older"
    shutil.copytree(directory, older, ignore=shutil.ignore_patterns("older"))
    add_records(directory, 3)
    for name in ("ledger.sqlite", "audit/000001.jsonl"):
        shutil.copy(older / name, directory / name)
    for beside in directory.glob("ledger.sqlite-*"):
        beside.unlink()
    (found,) = problems(directory)
    assert found.startswith("record 7: the log ends with record 6, but the manifest ")
    assert "checkpoints/1-10 has record 10: the log was cut off" in found


def test_a_cut_with_a_ledger_that_was_made_to_fit_is_found_by_the_checkpoint(directory: Path) -> None:
    kept = lines(directory)[:3]
    put(directory, kept)
    with closing(sqlite3.connect(directory / "ledger.sqlite")) as db:
        db.execute("UPDATE audit_heads SET sequence = 3, hash = ?", (json.loads(kept[-1])["hash"],))
        db.commit()
    (found,) = problems(directory)
    assert found.startswith("record 4: the log ends with record 3, but the manifest ")


def test_files_that_follow_and_those_that_were_deleted(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger, ledger.transaction():
        files = AuditFiles(tmp_path / "audit", NONE, time.time, max_file_bytes=1)
        for _ in range(6):
            head = files.append(Entry("x/Y"))
            ledger.audit_heads.put(files.number, head)
        files.close()
    assert problems(tmp_path) == []
    (tmp_path / "audit" / "000003.jsonl").rename(tmp_path / "kept")
    assert problems(tmp_path) == [
        "file 3: the file is missing; its last record was 3",
        "record 3: records 3 to 3 are missing in 000004.jsonl",
    ]
    (tmp_path / "kept").rename(tmp_path / "audit" / "000003.jsonl")
    (tmp_path / "audit" / "000001.jsonl").unlink()
    assert problems(tmp_path) == ["file 1: the file is missing; its last record was 1"]
    assert problems(tmp_path, max_files=5) == []  # it was the oldest of as many as are kept
    with closing(Ledger(tmp_path / "ledger.sqlite")) as ledger, ledger.transaction():
        ledger.audit_heads.put(1, AuditHead(1, "another"))
    assert problems(tmp_path, max_files=5) == [
        "record 2: the previous hash in 000002.jsonl is not the hash of record 1"
    ]


def test_an_unfinished_line_is_a_fact(directory: Path) -> None:
    put(directory, [*lines(directory), b'{"seq'])
    with closing(Ledger(directory / "ledger.sqlite", read_only=True)) as ledger:
        report = verify(ledger)
    assert report.problems == []
    assert report.facts["unfinished_bytes"] == 5
