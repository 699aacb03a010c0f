"""A copy of the ledger at any instant opens, verifies and resumes.

The copy is the file and its write-ahead log, the log cut at any byte: the state of a disk when the power goes while
SQLite writes. Acknowledged data was synced before the cut (`test_sync_order.py`). Segments end with the last byte that
the surviving log refers to, because those were synced before it.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from exchange_drivers import Learner, Reward, Rollout, World, fill, make_spec
from exchange_life import Life
from ledger_files import both_forms

from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.ledger.segment_cipher import SegmentCipher

CUTS = 12


def live(world: World) -> None:
    """Make two steps, a crash, a lease, a task, and half the receipts of the next step."""
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world, world_size=2)
    for step in range(2):
        rollout.hold(step)
        fill(rollout, reward, 4)
        assert learner.train(step) is not None
    gone = Rollout(world, "gone", step=2)
    gone.lease(2)
    world.release("gone", crashed=True)
    rollout.hold(2)
    fill(rollout, reward, 2)
    part = learner.part(2, 0)
    if part is not None:
        learner.receipt(2, 0, part)
    for lease in rollout.lease(4)[:1]:
        rollout.finish(lease)
    reward.tasks()


@both_forms
@pytest.mark.usefixtures("at_rest")
@pytest.mark.parametrize("seed", range(CUTS))
def test_whatever_the_power_leaves_verifies_and_goes_on(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    spec = make_spec(before, async_grpo={"order": rng.choice(["ready_first", "in_order"])})
    world = World(before, spec)
    try:
        shutil.copy(world.path, after / "ledger.sqlite")
        start_bytes = wal(world.path).stat().st_size  # the run is submitted by then
        live(world)
        log = wal(world.path).read_bytes()
        cut = rng.randrange(start_bytes, len(log) + 1)
        wal(after / "ledger.sqlite").write_bytes(log[:cut])
        leave_what_was_synced(world.ledger.payloads.folder, after / "ledger.sqlite")
        trained = int(world.row["next_step"])
    finally:
        world.close()

    resumed = World.found(after, spec)
    try:
        assert int(resumed.row["next_step"]) <= trained
        problems(resumed)
        life = Life(resumed)
        step = int(resumed.row["next_step"])
        for worker in life.rollouts:
            worker.hold(step, life.learner.session)
        life.finish()
        resumed.end()
        problems(resumed)
        assert resumed.counters["groups:trained"] == 8
        assert sum(resumed.ledger.group_queries.num_open(resumed.run_id).values()) == 0
    finally:
        resumed.close()


def leave_what_was_synced(segments: Path, ledger: Path) -> None:
    """Copy the segments that `ledger` refers to, each up to the end of the last record."""
    reader = Ledger(ledger, read_only=True)
    try:
        ends = reader.db.execute(
            "SELECT segment, MAX(start + header_size + arrays_size + ?) AS end FROM payloads WHERE segment NOT NULL"
            " GROUP BY segment",
            (2 * SegmentCipher.overhead_bytes if reader.key else 0,),
        ).fetchall()
        reader.payloads.folder.mkdir()
        for row in ends:
            name = f"{row['segment']:08d}.seg"
            (reader.payloads.folder / name).write_bytes((segments / name).read_bytes()[: row["end"]])
    finally:
        reader.close()


def problems(world: World) -> None:
    """Check by a reader beside the writer that there are no problems."""
    reader = Ledger(world.path, read_only=True)
    try:
        assert verify(reader, world.run_id).problems == []
    finally:
        reader.close()


def wal(path: Path) -> Path:
    """Return the path of SQLite's write-ahead log."""
    return path.with_name(path.name + "-wal")
