"""The files: one after the other, what a power cut leaves, and ends that were cut off while nobody looked."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from paceline.errors import LedgerFault
from paceline.services.coordinator.audit_log.records import (
    AuditFiles,
    AuditRecord,
    Entry,
    audit_files,
    has_record,
    read_line,
)
from paceline.services.coordinator.ledger.tables.audit_heads import NONE, AuditHead


def opened(folder: Path, head: AuditHead = NONE, **limits: int) -> AuditFiles:
    return AuditFiles(folder, head, lambda: 1.0, **limits)


def write(folder: Path, number: int, head: AuditHead = NONE, **limits: int) -> AuditHead:
    """Open the log, append so many records and close it."""
    log = opened(folder, head, **limits)
    for _ in range(number):
        log.append(Entry("x/Y"))
    log.close()
    return log.head


def read(folder: Path) -> list[AuditRecord]:
    return [read_line(line) for path in audit_files(folder).values() for line in path.read_bytes().splitlines()]


def test_the_chain_goes_on_over_files_and_openings(tmp_path: Path) -> None:
    head = write(tmp_path, 4, max_file_bytes=500)
    head = write(tmp_path, 4, head, max_file_bytes=500)
    records = read(tmp_path)
    assert [record.sequence for record in records] == list(range(1, 9))
    assert [record.previous for record in records] == ["", *(record.hash for record in records[:-1])]
    assert head == (8, records[-1].hash)
    assert list(audit_files(tmp_path)) == [1, 2, 3]
    assert {path.stat().st_mode & 0o777 for path in audit_files(tmp_path).values()} == {0o600}


def test_the_oldest_files_are_deleted_beyond_the_most(tmp_path: Path) -> None:
    write(tmp_path, 6, max_file_bytes=1, max_files=3)
    assert list(audit_files(tmp_path)) == [4, 5, 6]
    assert [record.sequence for record in read(tmp_path)] == [4, 5, 6]
    first, last = read(tmp_path)[0], read(tmp_path)[-1]
    assert has_record(tmp_path, AuditHead(5, read(tmp_path)[1].hash))
    assert not has_record(tmp_path, AuditHead(6, first.hash))
    assert not has_record(tmp_path, AuditHead(7, last.hash))
    assert has_record(tmp_path, AuditHead(2, "deleted with its file"))


def test_names_that_are_taken_are_passed_over(tmp_path: Path) -> None:
    head = write(tmp_path, 1)
    (tmp_path / "000002.jsonl").mkdir()
    (tmp_path / "000002.jsonl" / "x").touch()
    os.mkfifo(tmp_path / "000003.jsonl")
    (tmp_path / "000004.jsonl").symlink_to("/dev/null")
    (tmp_path / "000005.jsonl").symlink_to("missing")
    head = write(tmp_path, 2, head, max_file_bytes=1)
    assert [path.name for path in sorted(tmp_path.iterdir()) if path.is_file()] == [
        f"{number:06}.jsonl" for number in (1, 6, 7)
    ]
    assert head.sequence == 3
    write(tmp_path, 4, head, max_file_bytes=1, max_files=2)  # a folder that cannot be deleted ends nothing


def test_a_name_that_was_taken_since_is_passed_over(tmp_path: Path) -> None:
    log = opened(tmp_path, max_file_bytes=1)
    log.append(Entry("x/Y"))
    (tmp_path / "000002.jsonl").mkdir()
    os.mkfifo(tmp_path / "000003.jsonl")
    (tmp_path / "000004.jsonl").symlink_to("/dev/null")
    log.append(Entry("x/Y"))
    log.close()
    assert read_line((tmp_path / "000005.jsonl").read_bytes().rstrip()).sequence == 2


def test_a_next_file_that_cannot_be_opened_leaves_the_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened(tmp_path, max_file_bytes=1)
    log.append(Entry("x/Y"))
    with monkeypatch.context() as full:

        def refuse(*_: object) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        full.setattr(os, "open", refuse)
        for _ in range(2):
            with pytest.raises(OSError, match="Too many"):
                log.append(Entry("x/Y"))
    assert log.append(Entry("x/Y")).sequence == 2
    log.close()


def test_a_number_without_a_next_one_does_not_count(tmp_path: Path) -> None:
    head = write(tmp_path, 1)
    (tmp_path / "999999999999.jsonl").touch()
    head = write(tmp_path, 2, head, max_file_bytes=1)
    assert list(audit_files(tmp_path)) == [1, 2, 3, 999_999_999_999]
    assert [record.sequence for record in read(tmp_path)] == [1, 2, 3]
    (tmp_path / "999999999998.jsonl").mkdir()
    with pytest.raises(LedgerFault, match="remove the file"):
        opened(tmp_path, head)


def test_a_line_that_a_power_cut_left_unfinished_is_cut_off(tmp_path: Path) -> None:
    head = write(tmp_path, 3)
    path = audit_files(tmp_path)[1]
    path.write_bytes(path.read_bytes() + b'{"sequence":4,"ti')
    log = opened(tmp_path, head)
    assert log.repaired == ["an incomplete record of 17 bytes was cut off 000001.jsonl"]
    assert log.append(Entry("x/Y")).sequence == 4
    log.close()
    assert [record.sequence for record in read(tmp_path)] == [1, 2, 3, 4]


def test_an_empty_newest_file_continues_the_one_before(tmp_path: Path) -> None:
    head = write(tmp_path, 3)
    (tmp_path / "000002.jsonl").touch()
    log = opened(tmp_path, head)
    assert (log.repaired, log.head) == ([], head)
    log.close()


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_log_whose_end_was_cut_off_goes_on_behind_the_record_that_the_ledger_knows(tmp_path: Path, kept: int) -> None:
    head = write(tmp_path, 3)
    path = audit_files(tmp_path)[1]
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:kept]))
    log = opened(tmp_path, head)
    assert log.repaired == [f"the ledger has record 3, but the files end with record {kept}"]
    log.append(Entry("x/Y"))
    log.close()
    assert [record.sequence for record in read(tmp_path)] == [*range(1, kept + 1), 4]
    assert read(tmp_path)[-1].previous == head.hash


def test_a_log_that_was_written_anew_goes_on_behind_the_record_that_the_ledger_knows(tmp_path: Path) -> None:
    """Also where it has more records than the ledger knows."""
    head = write(tmp_path / "a", 3)
    forged = AuditFiles(tmp_path / "b", NONE, lambda: 2.0)
    for _ in range(5):
        forged.append(Entry("x/Y"))
    forged.close()
    log = opened(tmp_path / "b", head)
    assert (log.head, len(log.repaired)) == (head, 1)
    log.close()


def test_an_older_ledger_takes_the_newer_log(tmp_path: Path) -> None:
    """As after a backup was restored."""
    older = write(tmp_path, 2)
    head = write(tmp_path, 2, older)
    log = opened(tmp_path, older)
    assert (log.repaired, log.head) == ([], head)
    log.close()
