"""Repair gives up what cannot be read, and says it; verify finds nothing afterwards but what only a backup has."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from exchange_drivers import COMMITTED, Learner, MakeWorld, Reward, Rollout, World, fill
from ledger_files import both_forms

from paceline.errors import Conflict, LedgerFault, NotFound
from paceline.services.coordinator.audit.repair import repair
from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger.ledger import Ledger


@pytest.fixture
def closed(make_world: MakeWorld, tmp_path: Path) -> Iterator[World]:
    """Two trained steps, a batch that is fixed, a group that is scored, one that is generated, and a checkpoint; closed."""
    world = make_world(check=False, grpo={"max_num_steps": 6}, async_grpo={"max_trajectory_age_steps": 2})
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    for step in range(2):
        rollout.hold(step)
        fill(rollout, reward, 4)
        learner.train(step)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "weights").write_bytes(b"weights")
    file = {"path": "weights", "size_bytes": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}
    manifest = json.dumps({"files": [file]}).encode()
    (folder / "manifest.json").write_bytes(manifest)
    with world.ledger.transaction():
        world.ledger.db.execute(
            "INSERT INTO checkpoints (run_id, session, step, path, sha256, chain) VALUES (?, 1, 2, ?, ?, ?)",
            (world.run_id, str(folder), hashlib.sha256(manifest).hexdigest(), world.row["chain"]),
        )
    rollout.hold(2)
    fill(rollout, reward, 4)
    assert learner.part(2) is not None
    for lease in rollout.lease(1):
        assert rollout.finish(lease) == COMMITTED
    world.ledger.close()
    assert problems(world) == []
    yield world
    world.ledger = Ledger(tmp_path / "other.sqlite")  # for the end of the fixture, which closes it


def problems(world: World) -> list[str]:
    with contextlib.closing(Ledger(world.path, read_only=True)) as ledger:
        return verify(ledger, world.run_id).problems


def repaired(world: World) -> str:
    said: list[str] = []
    repair(world.path, said.append)
    return "\n".join(said)


@both_forms
def test_groups_that_nobody_trained_are_generated_again(closed: World) -> None:
    (segment,) = closed.path.with_name("ledger.sqlite-segments").glob("*.seg")
    with contextlib.closing(Ledger(closed.path, read_only=True)) as ledger:
        rows = ledger.db.execute(
            "SELECT state, start, header_size FROM payloads JOIN groups USING (run_id, group_id) ORDER BY start"
        ).fetchall()
    with segment.open("r+b") as file:
        for row in rows:
            file.seek(row["start"] + row["header_size"] + 70)
            file.write(b"\xff\xfe\xfd")
    said = repaired(closed)
    open_groups = sum(row["state"] != "trained" for row in rows)
    assert open_groups >= 3
    assert said.count("the group is admitted now") == open_groups
    left = problems(closed)
    assert len(left) == 4
    assert all("its arrays cannot be read" in problem for problem in left)  # of trained groups: a backup has them


@pytest.mark.parametrize("lose", [shutil.rmtree, lambda folder: (folder / "weights").write_bytes(b"weightt")])
def test_checkpoints_that_are_lost_are_marked(closed: World, tmp_path: Path, lose: Callable[[Path], object]) -> None:
    lose(tmp_path / "checkpoint")
    assert len(problems(closed)) == 1
    assert "no session begins from it any more" in repaired(closed)
    assert problems(closed) == []


@both_forms
def test_a_ledger_without_damage_is_as_it_was(closed: World) -> None:
    assert repaired(closed) == ""
    assert problems(closed) == []


def test_a_coordinator_keeps_repair_away(closed: World, tmp_path: Path) -> None:
    with contextlib.closing(Ledger(closed.path)), pytest.raises(Conflict, match="another coordinator"):
        repair(closed.path, lambda line: None)
    with pytest.raises(NotFound, match="no ledger"):
        repair(tmp_path / "other.sqlite", lambda line: None)


def test_a_row_that_was_changed_is_left_to_a_backup(closed: World) -> None:
    """Written to, it would be sealed anew, and a checkpoint that is whole would be given up."""
    with contextlib.closing(sqlite3.connect(closed.path)) as db:
        (digest,) = db.execute("SELECT sha256 FROM checkpoints").fetchone()
    other = digest[:-1] + ("0" if digest[-1] != "0" else "1")
    damaged = closed.path.read_bytes().replace(digest.encode(), other.encode())
    closed.path.write_bytes(damaged)
    with pytest.raises(LedgerFault, match="table checkpoints"):
        repair(closed.path, lambda line: None)
    assert closed.path.read_bytes() == damaged
    assert any("table checkpoints" in problem for problem in problems(closed))
