"""The cost of each request, in SQLite's work and in the exchange's, with many ranks, groups, segments and evaluations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ended_groups import NUM_ENDED, add_ended_groups
from exchange_drivers import COMMITTED, Learner, MakeWorld, Reward, Rollout, World, fill, prune

from paceline.services.coordinator.exchange.batches import selection
from paceline.services.coordinator.exchange.batches.selection import fix_if_due
from paceline.services.coordinator.exchange.state import BATCH_DUE
from paceline.services.coordinator.ledger import segments
from paceline.services.coordinator.ledger.tables import batches

RANKS = 512


def cost(world: World, work: Callable[[], object]) -> int:
    """Return the instructions of SQLite's machine during `work`."""
    number = 0

    def count() -> None:
        nonlocal number
        number += 1

    world.ledger.db.set_progress_handler(count, 1)
    work()
    world.ledger.db.set_progress_handler(None, 1)
    return number


def statements(world: World, work: Callable[[], object]) -> list[str]:
    """Return the SQL statements that `work` runs."""
    texts: list[str] = []
    world.ledger.db.set_trace_callback(texts.append)
    work()
    world.ledger.db.set_trace_callback(None)
    return texts


@pytest.fixture
def large(make_world: MakeWorld) -> World:
    """A world with a batch of 64 scored groups."""
    world = make_world(grpo={"num_prompts_per_step": 64})
    rollout, reward = Rollout(world), Reward(world)
    for lease in rollout.lease(128):
        assert rollout.finish(lease) == COMMITTED
    for task in reward.tasks(64):
        assert reward.score(task) == COMMITTED
    return world


def test_a_batch_that_waits_is_looked_at_once_in_a_transaction(large: World, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(selection, "fix", lambda *_: looks.append(1) and False)
    large.exchange.active.state.first_requested_s[0] = large.now_s
    with large.ledger.transaction():
        for _ in range(RANKS):
            assert not fix_if_due(large.exchange, large.run, large.now_s)
        assert len(looks) == 1
        large.ledger.invalidate(BATCH_DUE)  # a group was scored
        fix_if_due(large.exchange, large.run, large.now_s)
        assert len(looks) == 2


def test_a_batch_is_split_once_for_all_parts_and_receipts(large: World, monkeypatch: pytest.MonkeyPatch) -> None:
    splits, balance = [], batches.balance

    def counted(tokens: list[int], world_size: int) -> list[list[int]]:
        splits.append(world_size)
        return balance(tokens, world_size)

    monkeypatch.setattr(batches, "balance", counted)
    learner = Learner(large, world_size=32)
    first = cost(large, lambda: learner.part(0, 0))
    later = cost(large, lambda: learner.part(0, 31))
    assert later < first / 4
    assert learner.train(0) is not None
    assert splits == [32]


@pytest.mark.parametrize("shares", [False, True])
def test_a_shared_prompt_counts_once_in_the_split(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, shares: bool
) -> None:
    found, balance = [], batches.balance
    monkeypatch.setattr(batches, "balance", lambda tokens, ranks: (found.append(tokens), balance(tokens, ranks))[1])
    world = make_world(policy={"model_name": "m", "shared_prompts": shares})
    fill(Rollout(world), Reward(world), 2)
    assert Learner(world).part(0, 0) is not None
    rows = [world.group(group_id) for group_id in range(2)]
    assert all(row["sequence_tokens"] == row["tokens"] + 2 * 3 for row in rows)
    assert found == [[row["tokens"] + (3 if shares else 2 * 3) for row in rows]]


def test_splits_that_are_kept_are_bounded(large: World) -> None:
    session = large.new_session()
    for world_size in range(1, 4 * batches.MAX_SPLITS):
        assert Learner(large, world_size=world_size, session=session).part(0) is not None
    assert large.exchange.splits._split.cache_info().currsize == batches.MAX_SPLITS


def test_a_step_is_pruned_some_groups_at_a_time(make_world: MakeWorld) -> None:
    world = make_world(check=False, logger={"keep_samples": False}, grpo={"num_prompts_per_step": 4})
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    for step in range(3):
        rollout.hold(step)
        fill(rollout, reward, 4)
        before = statements(world, lambda step=step: learner.train(step))  # type: ignore[misc]
        assert not any("DELETE FROM payloads" in text for text in before)
    with world.ledger.transaction():
        world.ledger.db.execute(
            "INSERT INTO checkpoints (run_id, session, step, path, sha256, chain) VALUES (?, 1, 2, '/none', '', ?)",
            (world.run_id, world.ledger.db.execute("SELECT chain FROM batches WHERE step = 1").fetchone()[0]),
        )
    assert prune(world, at_once=3) == 4  # 3 and 1 groups of either step
    kept = [row[0] for row in world.ledger.db.execute("SELECT DISTINCT group_id FROM payloads ORDER BY group_id")]
    assert kept == [8, 9, 10, 11]


def test_segments_are_looked_at_a_bounded_number_at_a_time(
    tmp_path: Path, make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    world.ledger.payloads.max_segment_bytes = 1
    fill(Rollout(world), Reward(world), 4)
    folder = world.ledger.payloads.folder
    for number in range(100, 700):
        (folder / f"{number:08d}.seg").touch()
    world.restart()
    glob = Path.glob

    def only_others(path: Path, *patterns: Any) -> Any:
        if path == folder:
            pytest.fail("the folder is read")
        return glob(path, *patterns)

    monkeypatch.setattr(Path, "glob", only_others)
    for _ in range(40):
        texts = statements(world, lambda: _removed(world))
        assert len(texts) <= segments.MAX_CANDIDATES + segments.IN_TURN
    monkeypatch.undo()
    left = sorted(int(path.stem) for path in folder.glob("*.seg"))
    assert left == [1, 2, 3, 4, 698, 699]


def _removed(world: World) -> None:
    removed = world.ledger.remove_unused_segments()
    if removed is not None:
        removed.result()


def test_an_evaluation_s_end_is_looked_for_in_the_same_time_however_large_it_is(
    make_world: MakeWorld,
) -> None:
    costs = []
    for samples in (3, 3):
        world = make_world(grpo={"val_at_start": True, "val_at_end": False, "max_val_samples": samples})
        world.begin_evaluation(0)
        if costs:
            _enlarge(world, 2000)
        rollout, reward = Rollout(world), Reward(world)
        (lease,) = rollout.lease(1)
        assert rollout.finish(lease) == COMMITTED
        (task,) = reward.tasks(1)
        costs.append(cost(world, lambda reward=reward, task=task: reward.score(task)))  # type: ignore[misc]
    assert costs[1] < costs[0] + 100


@pytest.mark.parametrize("by", ["its last score", "the run's end"])
def test_an_evaluation_ends_in_as_many_statements_however_large_it_is(make_world: MakeWorld, by: str) -> None:
    numbers = []
    for samples in (3, 80):
        grpo = {"val_at_start": True, "val_at_end": False, "max_val_samples": samples}
        world = make_world(grpo=grpo, logger={"keep_evaluations": 0})
        validation = Path(str(world.spec.data.validation))
        validation.write_text("".join(f'{{"prompt": "p{i}", "answer": 1}}\n' for i in range(samples)))
        world.restart()
        world.begin_evaluation(0)
        rollout, reward = Rollout(world), Reward(world)
        for lease in rollout.lease(samples):
            assert rollout.finish(lease) == COMMITTED
        *tasks, last = reward.tasks(samples)
        for task in tasks:
            assert reward.score(task) == COMMITTED
        work = world.end if by == "the run's end" else lambda reward=reward, last=last: reward.score(last)
        numbers.append(len(statements(world, work)))  # type: ignore[arg-type]
        assert world.ledger.db.execute("SELECT COUNT(*) FROM payloads").fetchone()[0] == 0
    assert numbers[0] == numbers[1]


def _enlarge(world: World, number: int) -> None:
    """Add groups to the evaluation of step 0."""
    with world.ledger.transaction():
        world.ledger.db.executemany(
            "INSERT INTO groups (run_id, group_id, class, state, slot) VALUES (?, ?, 'eval:0', 'admitted', ?)",
            [(world.run_id, (1 << 41) + index, 100 + index) for index in range(number)],
        )


def test_a_run_s_end_does_not_read_what_has_ended(make_world: MakeWorld) -> None:
    short, long = make_world(check=False), make_world(check=False)
    add_ended_groups(long)
    costs = []
    for world in (short, long):
        fill(Rollout(world), Reward(world), 2)
        Learner(world).train(0)
        number = cost(world, lambda world=world: world.ledger.trained_samples(world.run_id))  # type: ignore[misc]
        costs.append(number + cost(world, world.end))
    assert costs[1] < costs[0] + NUM_ENDED // 10
