"""Seals distinguish a row that the disk has changed from one that was written."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from exchange_drivers import Learner, MakeWorld, Reward, Rollout, fill
from ledger_files import opened

from paceline.services.coordinator.ledger import row_checksums
from paceline.services.coordinator.ledger.ledger import Ledger

ROW = ("text", "größer", b"\x00\xff", 0, 1, -7, 1 << 40, 2.5, None, "")


@pytest.mark.parametrize(
    ("index", "changed"),
    [
        (0, "texu"),
        (0, b"text"),
        (1, b"gr\xc3\xb7\xc3\x9fer".decode()),
        (2, b"\x01\xff"),
        (3, 1),
        (3, 8),
        (4, 0),
        (5, -8),
        (6, (1 << 40) + (1 << 20)),
        (7, 2.0),
        (8, 0),
    ],
)
def test_a_changed_bit_changes_the_checksum(index: int, changed: object) -> None:
    damaged = (*ROW[:index], changed, *ROW[index + 1 :])
    assert row_checksums.checksum(*damaged) != row_checksums.checksum(*ROW)


def stored(db: sqlite3.Connection, name: str) -> list[tuple[Any, int]]:
    """Return the current checksum of each row, and its seal."""
    columns = ", ".join(row_checksums.tables()[name].columns)
    return [(row_checksums.checksum(*row[:-1]), row[-1]) for row in db.execute(f"SELECT {columns}, seal FROM {name}")]


def test_the_writer_seals_what_it_writes_and_nobody_else_does(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with contextlib.closing(Ledger(path)) as ledger:
        with ledger.transaction():
            ledger.add_run("a-1", "name: ä", "dir", 3, ["careful"])
            ledger.update_run("a-1", state="running", cursor=7)
            ledger.count("a-1", "tokens:wasted", 5)
            ledger.add_event("a-1", "state", {"state": "running", "value": 1.5})
            ledger.evaluations.add_result("a-1", 0, {"reward": 0.5})
        with ledger.transaction():
            ledger.count("a-1", "tokens:wasted", 5)
    with contextlib.closing(opened(path)) as db:
        for name in ("meta", "runs", "counters", "events", "evaluations"):
            rows = stored(db, name)
            assert rows, name
            assert all(given == seal for given, seal in rows), name
        db.execute("UPDATE counters SET value = 11")
        ((given, seal),) = stored(db, "counters")
        assert given != seal


def test_a_group_is_sealed_when_it_has_ended(make_world: MakeWorld) -> None:
    world = make_world()
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    first = fill(rollout, reward, 2)
    assert all(seal is None for _, seal in stored(world.ledger.db, "groups"))
    assert learner.train(0)
    rollout.hold(1)
    (dropped,) = (lease.group_id for lease in rollout.lease(1))
    run = world.exchange.active
    assert run is not None
    with world.ledger.transaction():
        world.exchange.drop(run, world.group(dropped), "bad_prompt")
    sealed = [(given, seal) for given, seal in stored(world.ledger.db, "groups") if seal is not None]
    assert len(sealed) == len(first) + 1
    assert all(given == seal for given, seal in sealed)


def test_every_table_is_sealed_but_those_that_others_cover() -> None:
    assert row_checksums.tables().keys() - row_checksums.SEALED.keys() == {"payloads", "free_slots", "deaths"}
