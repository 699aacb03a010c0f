"""Journals of open groups are compared, repaired and kept in backups; what is lost of them begins again."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from episode_drivers import ENVIRONMENT, EnvironmentWorker, Episodes, make_turn, serving_rollout
from exchange_drivers import COMMITTED, Learner, MakeWorld, Reward, World
from ledger_files import both_forms, opened

from paceline.groups import Version
from paceline.services.coordinator.audit.repair import repair
from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger.backup import back_up
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.records.reader import records_in

pytestmark = [both_forms, pytest.mark.usefixtures("at_rest")]
VERSION = Version(1, 0)


def journaled(make_world: MakeWorld) -> tuple[World, Episodes]:
    """A trained step of which samples were restarted, failed and left turns out, and a group with a journal."""
    world = make_world(check=False, **ENVIRONMENT)
    rollout, worker = serving_rollout(world), EnvironmentWorker(world)
    reward, learner = Reward(world), Learner(world)
    first, second, third = worker.lease(6)
    worker.play(first, 0, VERSION, last=False)
    worker.end(first, 0)
    worker.end(first, 1, "environment_failed")
    worker.play_all(first, VERSION)
    worker.turn(second, 0, make_turn(VERSION, 1))
    worker.turn(second, 0, make_turn(VERSION, 2, 1), last=True, left_out=[0])
    worker.play_all(second, VERSION)
    for held in (first, second):
        assert worker.finish(held) == COMMITTED
    for task in reward.tasks():
        reward.score(task)
    assert learner.train(0)
    rollout.hold(1)
    worker.play(third, 0, VERSION, last=False)
    worker.end(third, 0)
    for _ in range(3):
        worker.play(third, 0, VERSION, last=False)
    worker.play(third, 1, VERSION, last=True)
    return world, third


def problems(path: Path, run_id: str) -> list[str]:
    with contextlib.closing(Ledger(path, read_only=True)) as ledger:
        return verify(ledger, run_id).problems


def test_an_honest_journal_has_no_problems(make_world: MakeWorld) -> None:
    world, _ = journaled(make_world)
    with contextlib.closing(Ledger(world.path, read_only=True)) as ledger:
        report = verify(ledger, world.run_id)
    assert report.problems == []
    assert (report.facts["journaled_turns"], report.facts["ended_lives"]) == (4, 4)
    assert report.facts["tokens"] == {
        "generated": 3 + 18 + 3 + 3 + 9 + 3 + 9 + 3,
        "trained": 18 + 3 + 9,
        "dropped": 3 + 3 + 3,
        "live": 12,
        "wasted": 0,
    }
    (group, other) = records_in(world.ledger).groups(world.run_id, 0)
    assert [(life["sample"], life["reason"], life["tokens"]) for life in group["restarts"]] == [
        (0, "restarted", 3),
        (1, "environment_failed", 0),
    ]
    assert [life["reason"] for life in other["restarts"]] == ["left_out"]


CHANGES = {
    "UPDATE restarts SET tokens = tokens + 1 WHERE reason = 'restarted' AND group_id = 0": "dropped tokens by reason",
    "DELETE FROM restarts WHERE reason = 'left_out'": "dropped tokens by reason are",
    "UPDATE restarts SET life = 5 WHERE group_id = 0 AND sample = 0": "the sample's ended life is 5, expected 1",
    "UPDATE episodes SET tokens = 4 WHERE sample = 1": "the arrays have 3 tokens, but the ledger has 4",
    "UPDATE episodes SET digest = 'x' WHERE sample = 1": "the turn's arrays have the digest",
    "UPDATE episodes SET context_digest = 'x' WHERE sample = 1": "the tokens before the turn have the digest",
    "UPDATE episodes SET oldest_step = 7 WHERE sample = 1": "the oldest version is 0, but the ledger has 7",
    "UPDATE episodes SET turn = 9 WHERE sample = 0 AND turn = 1": "the sample's turns are [0, 2, 9], expected [0, 1, 2]",
    "UPDATE episodes SET life = 1 WHERE sample = 0": "the sample's turns are of life 1, expected 2",
    "UPDATE episodes SET num_rows = 2 WHERE sample = 1": "the turns have 1 rows, but the ledger has 2",
    "UPDATE episodes SET left_out = '[7]' WHERE sample = 1": "the turn leaves out turns [7], which is not allowed",
    "UPDATE episodes SET last = 1 WHERE sample = 0 AND turn = 0": "turns follow the turn that is marked as the last",
    "DELETE FROM episodes WHERE sample = 1": "the group has 12 tokens, but its turns have 9",
    "UPDATE groups SET oldest_step = 3 WHERE group_id = 2": "the group's oldest version is 3, but the oldest version of its turns is 0",
    "UPDATE episodes SET group_id = 0 WHERE sample = 1": "the group is trained, but still has turns in the table episodes",
    "UPDATE episodes SET group_id = 99 WHERE sample = 1": "these groups have rows in the table episodes",
}


@pytest.mark.parametrize(("change", "problem"), CHANGES.items(), ids=range(len(CHANGES)))
def test_what_does_not_agree_is_named(make_world: MakeWorld, change: str, problem: str) -> None:
    world, _ = journaled(make_world)
    world.ledger.db.execute(change)
    found = problems(world.path, world.run_id)
    assert any(problem in text for text in found), found


def closed(make_world: MakeWorld, tmp_path: Path) -> World:
    world, _ = journaled(make_world)
    world.ledger.close()
    assert problems(world.path, world.run_id) == []
    return world


def test_lost_arrays_of_a_turn_end_its_life(make_world: MakeWorld, tmp_path: Path) -> None:
    world = closed(make_world, tmp_path)
    with contextlib.closing(opened(world.path)) as db:
        ((segment, start),) = db.execute(
            "SELECT segment, start + header_size FROM episodes WHERE sample = 0 AND turn = 1"
        )
    path = world.ledger.payloads.folder / f"{segment:08d}.seg"
    content = bytearray(path.read_bytes())
    content[start + 100] ^= 1
    path.write_bytes(content)
    lines: list[str] = []
    repair(world.path, lines.append)
    assert any("sample 0 begins again" in line for line in lines), lines
    assert problems(world.path, world.run_id) == []
    world.ledger = Ledger(world.path)
    assert world.ledger.episodes.lives(world.run_id, 2, 0).current == 3


def test_a_backup_has_the_journal_and_a_worker_goes_on_from_it(make_world: MakeWorld, tmp_path: Path) -> None:
    world, held = journaled(make_world)
    copy = tmp_path / "copy" / "ledger.sqlite"
    copy.parent.mkdir()
    with contextlib.closing(Ledger(world.path, read_only=True)) as reader:
        back_up(reader, copy)
    assert problems(copy, world.run_id) == []
    world.ledger.close()
    restored = World.found(copy.parent, world.spec)
    serving_rollout(restored, step=1)
    worker = EnvironmentWorker(restored, "other")
    again = next(lease for lease in worker.lease(8) if lease.lease.group_id == held.lease.group_id)
    for before, after in zip(held.samples, again.samples, strict=True):
        assert [turn.encode() for turn in before.turns] == [turn.encode() for turn in after.turns]
    worker.play_all(again, VERSION, turns=4)
    assert worker.finish(again) == COMMITTED
    restored.close()
    world.ledger = Ledger(tmp_path / "other.sqlite")  # for the end of the fixture, which closes it
    assert problems(copy, world.run_id) == []
