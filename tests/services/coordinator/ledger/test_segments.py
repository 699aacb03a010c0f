"""Appended records are read back or refused, never changed; unused segments are removed."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
from exchange_drivers import Learner, MakeWorld, Reward, Rollout, World, fill, prune
from ledger_files import both_forms

from paceline.array_frames import Buffer
from paceline.encryption.storage_key import storage_key
from paceline.errors import LedgerFault
from paceline.services.coordinator.ledger import segments as payloads
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.ledger.segments import (
    BLOCK_BYTES,
    DamagedRecord,
    Location,
    Payload,
    PayloadStore,
    Record,
    read_frame,
)

pytestmark = [both_forms, pytest.mark.usefixtures("at_rest")]


def look_up(store: PayloadStore, place: Location, *, last: bool = False) -> tuple[bytes, Buffer]:
    """Read a record by a row like the ledger's."""
    db = sqlite3.connect(":memory:")
    db.row_factory = sqlite3.Row
    names = ", ".join(f"? AS {name}" for name in Location._fields)
    payload = store.payload(db.execute(f"SELECT {names}", place).fetchone(), last=last)
    db.close()
    return payload.read()


def test_records_come_back_from_whichever_segment_they_are_in(tmp_path: Path) -> None:
    start = 0 if storage_key() is None else BLOCK_BYTES
    store = PayloadStore(tmp_path / "ledger", storage_key())
    store.max_segment_bytes = start + BLOCK_BYTES + 1  # two small appends
    store.recent.max_bytes, store.max_open = 0, 2
    records = [(b"h%d" % i, bytes([i]) * (10 * i)) for i in range(12)]
    places = [
        place for i in range(0, 12, 2) for place in store.append([Record.of(*each) for each in records[i : i + 2]])
    ]
    assert len({place.segment for place in places}) == 3
    assert [look_up(store, place) for place in places] == records
    again = PayloadStore(tmp_path / "ledger", storage_key())
    again.max_open = 2
    assert [look_up(again, place) for place in reversed(places)] == records[::-1]
    (after,) = again.append([Record.of(b"", b"new term")])
    assert after.segment == 4  # never behind bytes that another process may have torn
    assert look_up(store, after) == (b"", b"new term")
    store.close()
    again.close()


def test_the_newest_records_are_read_from_memory_until_the_last_time(tmp_path: Path) -> None:
    store = PayloadStore(tmp_path / "ledger", storage_key())
    store.recent.max_bytes = 20
    places = store.append([Record.of(b"h%d" % i, b"arrays%d" % i) for i in range(3)])  # 9 bytes each
    (path,) = store.folder.iterdir()
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(LedgerFault, match="is damaged"):
        look_up(store, places[0])  # evicted by the third
    assert look_up(store, places[1]) == (b"h1", b"arrays1")
    assert look_up(store, places[1], last=True) == (b"h1", b"arrays1")
    with pytest.raises(LedgerFault, match="is damaged"):
        look_up(store, places[1])
    store.recent.evict(places[2].segment, places[2].start)
    with pytest.raises(LedgerFault, match="is damaged"):
        look_up(store, places[2])
    (whole,) = store.append([Record.of(b"h" * 10, b"a" * 10)])  # all that fits, so nothing else counts any more
    path.write_bytes(bytes(path.stat().st_size))
    assert look_up(store, whole) == (b"h" * 10, b"a" * 10)
    store.close()


@pytest.mark.parametrize("damage", ["a bit", "the end", "the file"])
def test_what_is_damaged_is_refused_with_its_name(tmp_path: Path, damage: str) -> None:
    store = PayloadStore(tmp_path / "ledger", storage_key())
    (place,) = store.append([Record.of(b"header", b"arrays")])
    store.recent.evict(place.segment, place.start)
    (path,) = store.folder.iterdir()
    whole = path.read_bytes()
    match damage:
        case "a bit":
            path.write_bytes(whole[:11] + bytes([whole[11] ^ 1]) + whole[12:])
        case "the end":
            path.write_bytes(whole[:11])
        case "the file":
            path.unlink()
    with pytest.raises(LedgerFault, match=rf"{path} is (damaged|missing).*restore a backup"):
        look_up(store, place)
    store.close()


def test_a_disk_that_refuses_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    store = PayloadStore(tmp_path / "ledger", storage_key())
    monkeypatch.setattr(payloads.os, "fdatasync", full)
    with pytest.raises(LedgerFault, match=r"groups cannot be written to .*: No space left on device; make room"):
        store.append([Record.of(b"h", b"a")])
    store.close()


def test_segments_go_when_nothing_refers_to_them(make_world: MakeWorld) -> None:
    world = make_world(check=False, logger={"keep_samples": False})  # its checkpoint is only a row
    world.ledger.payloads.max_segment_bytes = 1  # a group each
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    for step in range(3):
        rollout.hold(step)
        fill(rollout, reward, 2)
        learner.train(step)
        remove_unused(world)
    held = frames_of(world, 0)
    with world.ledger.transaction():
        world.ledger.db.execute(
            "INSERT INTO checkpoints (run_id, session, step, path, sha256, chain) VALUES (?, 1, 3, 'elsewhere', '', ?)",
            (world.run_id, world.row["chain"]),
        )
    remove_unused(world)
    assert segments(world) == [1, 2, 3, 4, 5, 6]
    rollout.hold(3)
    fill(rollout, reward, 2)
    learner.train(3)
    prune(world)
    remove_unused(world)
    assert segments(world) == [7, 8]
    assert len(read_frame(held.arrays)) > 0  # its holder can still read it
    world.restart()
    assert segments(world) == [7, 8]


def segments(world: World) -> list[int]:
    return sorted(int(path.stem) for path in world.ledger.payloads.folder.iterdir())


def frames_of(world: World, group_id: int) -> Payload:
    payload = world.ledger.payload(world.run_id, group_id)
    assert payload is not None
    return payload


def test_a_reader_leaves_the_folder_alone(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    reader = Ledger(tmp_path / "ledger.sqlite", read_only=True)
    assert not reader.payloads.folder.exists()
    reader.close()
    ledger.close()


def remove_unused(world: World) -> None:
    """Remove unused segments, and wait for the thread."""
    removed = world.ledger.remove_unused_segments()
    if removed is not None:
        removed.result()


@pytest.mark.parametrize("kind", ["folder", "pipe", "zeros", "loop"])
def test_a_segment_that_is_no_file_is_damage(tmp_path: Path, kind: str) -> None:
    store = PayloadStore(tmp_path / "ledger", storage_key())
    (location,) = store.append([Record.of(b"header", b"arrays")])
    store.close()
    path = next(store.folder.glob("*.seg"))
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "zeros" else path.name)
    with pytest.raises(DamagedRecord, match="is missing or is not a file"):
        look_up(PayloadStore(tmp_path / "ledger", storage_key()), location)
