"""A restored backup uses none of the files beside it, and deletes none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from ledger_files import both_forms

from paceline.encryption.storage_key import storage_key
from paceline.services.coordinator.ledger import database
from paceline.services.coordinator.ledger.backup import back_up
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.ledger.segment_cipher import MAGIC
from paceline.services.coordinator.ledger.segments import Record


def run_ids(ledger: Ledger) -> list[str]:
    return [row["run_id"] for row in ledger.runs()]


def killed(path: Path) -> None:
    """Leave the ledger as a kill does: its log was never emptied, and a segment exists."""
    ledger = Ledger(path)
    with ledger.transaction():
        ledger.add_run("later-2", "{}", str(path.parent / "later-2"))
    ledger.payloads.append([Record.of(b"header", b"arrays")])
    for name in (f"{path.name}-wal", f"{path.name}-shm", path.name):
        shutil.copyfile(path.with_name(name), path.with_name(f"{name}.copy"))
    ledger.close()
    for name in (f"{path.name}-wal", f"{path.name}-shm", path.name):
        path.with_name(f"{name}.copy").rename(path.with_name(name))


@pytest.fixture
def path(tmp_path: Path, at_rest: str) -> Path:
    """A backup in the place of its ledger, which continued after the backup and was killed."""
    path, backup = tmp_path / "ledger.sqlite", tmp_path / "backup.sqlite"
    ledger = Ledger(path)
    with ledger.transaction():
        ledger.add_run("first-1", "{}", str(tmp_path / "first-1"))
    back_up(ledger, backup)
    ledger.close()
    killed(path)
    shutil.copyfile(backup, path)
    return path


@both_forms
@pytest.mark.usefixtures("at_rest")
def test_the_log_and_the_segments_of_another_ledger_are_set_aside(path: Path) -> None:
    assert database.is_backup(path, storage_key())
    ledger = Ledger(path)
    assert run_ids(ledger) == ["first-1"]
    place = path.with_name("ledger.sqlite.set-aside-1")
    assert ledger.set_aside == place
    assert {each.name for each in place.iterdir()} >= {"ledger.sqlite-wal", "ledger.sqlite-segments"}
    segment = place / "ledger.sqlite-segments" / "00000001.seg"
    assert segment.read_bytes().startswith(b"headerarrays" if storage_key() is None else MAGIC)
    ledger.payloads.append([Record.of(b"new", b"")])
    assert [each.name for each in ledger.payloads.folder.iterdir()] == ["00000001.seg"]
    ledger.close()


@both_forms
@pytest.mark.usefixtures("at_rest")
def test_a_backup_is_taken_for_one_only_once(path: Path) -> None:
    ledger = Ledger(path)
    with ledger.transaction():
        ledger.add_run("second-2", "{}", "second-2")
    # As a kill at this moment would leave it: committed data is only in the log.
    assert not database.is_backup(path, storage_key())
    ledger.close()
    again = Ledger(path)
    assert again.set_aside is None
    assert run_ids(again) == ["first-1", "second-2"]
    again.close()


def test_a_copy_by_another_program_has_no_mark_and_its_neighbours_log_is_not_read(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[database.APPLICATION_ID : database.APPLICATION_ID + 4] = bytes(4)
    path.write_bytes(content)
    ledger = Ledger(path)
    assert run_ids(ledger) == ["first-1"]
    assert ledger.set_aside is not None
    ledger.close()


@both_forms
@pytest.mark.usefixtures("at_rest")
def test_a_reader_does_not_read_the_log_beside_a_backup(path: Path) -> None:
    log = path.with_name("ledger.sqlite-wal")
    before = log.read_bytes()
    ledger = Ledger(path, read_only=True)
    assert run_ids(ledger) == ["first-1"]
    ledger.close()
    assert log.read_bytes() == before
    assert database.is_backup(path, storage_key())


@both_forms
@pytest.mark.usefixtures("at_rest")
def test_it_is_known_of_a_ledger_that_it_was_restored(path: Path) -> None:
    for _ in range(2):
        ledger = Ledger(path)
        assert ledger.was_restored
        ledger.close()
    other = Ledger(path.with_name("other.sqlite"))
    assert not other.was_restored
    other.close()


@both_forms
@pytest.mark.usefixtures("at_rest")
def test_a_second_backup_put_back_gets_a_place_of_its_own(path: Path) -> None:
    backup = path.with_name("backup.sqlite")
    Ledger(path).close()
    killed(path)
    shutil.copyfile(backup, path)
    ledger = Ledger(path)
    assert ledger.set_aside == path.with_name("ledger.sqlite.set-aside-2")
    ledger.close()


@both_forms
@pytest.mark.usefixtures("at_rest")
def test_a_backup_alone_and_a_ledger_of_our_own_need_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    back_up(ledger, tmp_path / "backup.sqlite")
    assert not database.is_backup(tmp_path / "ledger.sqlite", storage_key())
    ledger.close()
    alone = Ledger(tmp_path / "backup.sqlite")
    assert alone.set_aside is None
    alone.close()
    assert not database.is_backup(tmp_path / "nothing", storage_key())
