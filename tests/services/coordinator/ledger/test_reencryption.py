"""A plain ledger becomes an encrypted one with the same records, or gets another key, completely or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import paceline
from exchange_drivers import Learner, MakeWorld, Reward, Rollout, World, fill
from ledger_files import KEY_TEXT, OTHER_KEY_TEXT

from paceline.encryption.encrypted_file import WrongKey
from paceline.encryption.storage_key import KEY_VARIABLE, StorageKey
from paceline.errors import Conflict, LedgerFault, NotFound
from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger import backup
from paceline.services.coordinator.ledger.backup import back_up, encrypt_ledger
from paceline.services.coordinator.ledger.ledger import Ledger

KEY = StorageKey(bytes.fromhex(KEY_TEXT))
OTHER = StorageKey(bytes.fromhex(OTHER_KEY_TEXT))
RESULT = b"num_prompts_per_step"
"""A text of the run's spec."""


@pytest.fixture
def plain(make_world: MakeWorld, tmp_path: Path) -> Iterator[World]:
    """A ledger with two trained steps and a scored group; closed."""
    world = make_world(check=False)
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    for step in range(2):
        rollout.hold(step)
        fill(rollout, reward, 2)
        learner.train(step)
    fill(rollout, reward, 1)
    world.ledger.close()
    yield world
    world.ledger = Ledger(tmp_path / "other.sqlite")  # the fixture closes it at the end


def contents(world: World) -> tuple[str, list[tuple[bytes, bytes]], int]:
    """Return chain, payloads and term, after comparing the records."""
    with contextlib.closing(Ledger(world.path, read_only=True)) as ledger:
        assert verify(ledger, world.run_id).problems == []
        groups = ledger.db.execute("SELECT group_id FROM payloads WHERE kind = 'result' ORDER BY group_id")
        payloads = [ledger.payload(world.run_id, row["group_id"]) for row in groups.fetchall()]
        read = [(bytes(header), bytes(arrays)) for each in payloads if each for header, arrays in [each.read()]]
        return ledger.run(world.run_id)["chain"], read, ledger.term


def plain_files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and RESULT in p.read_bytes())


def test_records_are_the_same_before_and_after(plain: World, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(plain)
    segments = plain.path.with_name("ledger.sqlite-segments")
    folder = plain.path.parent
    assert "ledger.sqlite" in plain_files(folder)
    assert len(list(segments.iterdir())) == 1
    monkeypatch.setenv(KEY_VARIABLE, KEY_TEXT)
    result = paceline("ledger", "encrypt", "--directory", folder)
    assert result.exit_code == 0, result.output
    assert f"is encrypted with the key {KEY.name.hex()} now" in result.output
    assert contents(plain) == before
    assert plain_files(folder) == []
    assert list(segments.iterdir()) == []
    with contextlib.closing(Ledger(plain.path)) as ledger:
        assert ledger.term == before[2] + 1
        assert not ledger.was_restored
    result = paceline("ledger", "encrypt", "--directory", folder)
    assert result.exit_code == 0, result.output

    old = folder / "old-key"
    old.write_text(KEY_TEXT + "\n")
    monkeypatch.setenv(KEY_VARIABLE, OTHER_KEY_TEXT)
    result = paceline("ledger", "encrypt", "--directory", folder, "--old-key-file", old)
    assert result.exit_code == 0, result.output
    assert contents(plain)[:2] == before[:2]
    monkeypatch.setenv(KEY_VARIABLE, KEY_TEXT)
    with pytest.raises(WrongKey, match=f"encrypted with the key {OTHER.name.hex()}"):
        Ledger(plain.path)


def test_what_stays_plain_beside_it_is_named(plain: World) -> None:
    with contextlib.closing(Ledger(plain.path, read_only=True)) as ledger:
        back_up(ledger, plain.path.with_name("ledger.sqlite.format-2"))
    plain.path.with_name("ledger.sqlite.set-aside-1").mkdir()
    said: list[str] = []
    encrypt_ledger(plain.path, None, KEY, said.append)
    assert [line.split()[0].rpartition("/")[2] for line in said] == [
        "ledger.sqlite",
        "ledger.sqlite.format-2",
        "ledger.sqlite.set-aside-1",
    ]


def test_refusals_change_nothing(plain: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = plain.path.read_bytes()
    with pytest.raises(WrongKey, match=r"is not encrypted.*leave the option out"):
        encrypt_ledger(plain.path, OTHER, KEY, print)
    with contextlib.closing(Ledger(plain.path)), pytest.raises(Conflict, match="another coordinator"):
        encrypt_ledger(plain.path, None, KEY, print)
    with pytest.raises(NotFound, match="no ledger"):
        encrypt_ledger(tmp_path / "none.sqlite", None, KEY, print)
    result = paceline("ledger", "encrypt", "--directory", plain.path.parent)
    assert "no storage key is given" in result.output
    monkeypatch.setenv(KEY_VARIABLE, KEY_TEXT)
    result = paceline("ledger", "encrypt", "--directory", plain.path.parent, "--old-key-file", "none")
    assert "--old-key-file: 'none' cannot be read" in result.output
    monkeypatch.setenv(KEY_VARIABLE, "")
    backup = plain.path.with_name("backup.sqlite")
    with contextlib.closing(Ledger(plain.path, read_only=True)) as ledger:
        back_up(ledger, backup)
    with pytest.raises(Conflict, match="is a backup that no coordinator has opened yet"):
        encrypt_ledger(backup, None, KEY, print)
    assert len(before) <= plain.path.stat().st_size
    assert contents(plain)


def test_a_reader_keeps_it_away_and_loses_nothing(plain: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup, "READERS_S", 0.1)
    with contextlib.closing(Ledger(plain.path)) as writer:
        reader = Ledger(plain.path, read_only=True)
        reader.db.execute("BEGIN")
        assert len(reader.runs()) == 1
        with writer.transaction():
            writer.update_run(plain.run_id, message="written beside the reader")
    with contextlib.closing(reader), pytest.raises(Conflict, match="another process reads the ledger"):
        encrypt_ledger(plain.path, None, KEY, print)
    with contextlib.closing(Ledger(plain.path, read_only=True)) as ledger:
        assert ledger.run(plain.run_id)["message"] == "written beside the reader"


def test_a_damaged_ledger_stays_as_it_is(plain: World) -> None:
    (segment,) = plain.path.with_name("ledger.sqlite-segments").iterdir()
    segment.write_bytes(bytes(segment.stat().st_size))
    before = plain.path.read_bytes()
    with pytest.raises(LedgerFault, match="is damaged"):
        encrypt_ledger(plain.path, None, KEY, print)
    assert plain.path.read_bytes() == before
    assert segment.exists()
    assert list(plain.path.parent.glob("*.partial")) == []


def test_an_interruption_after_the_exchange_of_the_files_is_made_good(
    plain: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(path: Path, key: StorageKey) -> None:
        raise KeyboardInterrupt

    before = contents(plain)
    with monkeypatch.context() as patch:
        patch.setattr(backup, "_remove_segments", dies)
        with pytest.raises(KeyboardInterrupt):
            encrypt_ledger(plain.path, None, KEY, print)
    (segment,) = plain.path.with_name("ledger.sqlite-segments").iterdir()
    assert os.path.getsize(segment) > 0
    monkeypatch.setenv(KEY_VARIABLE, KEY_TEXT)
    assert contents(plain) == before
    encrypt_ledger(plain.path, None, KEY, print)
    assert not segment.exists()
    assert contents(plain) == before
