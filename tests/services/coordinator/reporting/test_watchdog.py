"""Stalls are explained, and admission closes before the disk is full."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from control_plane import DEADLINE_S, Plane, rollout
from exchange_drivers import Learner, Reward, Rollout, World, fill

from paceline.services.coordinator.members.registry import Introduction, Member, Members
from paceline.services.coordinator.reporting.watchdog import Facts, Watchdog, WorkerCounts, explain
from paceline.v1 import common_pb2, run_pb2

WORKERS = set(WorkerCounts.__dataclass_fields__)


def facts(**changes: Any) -> Facts:
    """A healthy pool of two and one, whose learner waits for step 5; B = 8, η = 1."""
    healthy: dict[str, Any] = {
        "waited_s": 60.0,
        "step": 5,
        "versions": (5, 4),
        "leases": 6,
        "holders": 2,
        "tasks": 1,
        "groups": {"admitted": 8, "leased": 6, "generated": 1, "scored": 1},
        "batch": 8,
        "max_age": 1,
    }
    counts = {"learners": 1, "rollouts": 2, "ready_rollouts": 2, "rewards": 1}
    workers = WorkerCounts(**counts | {name: value for name, value in changes.items() if name in WORKERS})
    others = {name: value for name, value in changes.items() if name not in WORKERS}
    return Facts(**healthy | others, workers=workers)


@pytest.mark.parametrize(("changes", "words"), [
    ({"rollouts": 0, "leases": 0, "holders": 0, "versions": ()}, "0 rollout workers hold leases, but no rollout worker is connected"),
    ({"ready_rollouts": 0, "leases": 0, "holders": 0}, "no worker has set the run up"),
    ({"leases": 0, "holders": 0, "versions": (3, 2)}, "version 3, and step 5 needs version 4"),
    ({"leases": 0, "holders": 0, "versions": ()}, "no worker has weights"),
    ({"leases": 0, "holders": 0}, "0 rollout workers hold leases, although groups could be leased (8)"),
    ({"rewards": 0, "groups": {"admitted": 8, "generated": 9}}, "no reward worker is connected for 9 generated groups"),
    ({"groups": {"generated": 9, "scored": 2}}, "the step waits for scores of 9 groups, and reward workers hold 1"),
    ({"groups": {"leased": 1, "scored": 9}}, "enough groups are scored (9), but the batch waits for 1 older group"),
    ({"admission_closed": "3 MB are free"}, "admission is closed, because 3 MB are free"),
    ({"unreadable_data": "row 3 has changed"}, "no prompt is admitted, because row 3 has changed"),
    ({"environments": 0, "leases": 0, "holders": 0}, "0 environment workers hold leases, but no environment worker is connected"),
    ({"environments": 2, "leases": 0, "holders": 0}, "no worker has set the run up (2 environment workers)"),
    ({"environments": 2, "ready_environments": 2, "rollouts": 0}, "no rollout worker is connected"),
    ({"environments": 2, "ready_environments": 2}, "2 environment workers hold leases (6 leases)"),
    ({}, "2 rollout workers hold leases (6 leases); scored: 1 of 8 groups; not scored yet: 1"),
    ({"holders": 1, "leases": 1}, "1 rollout worker holds leases (1 lease); scored: 1 of 8 groups"),
])  # fmt: skip
def test_the_reason_is_the_first_thing_that_is_missing(changes: dict[str, Any], words: str) -> None:
    text = explain(facts(**changes))
    assert text.startswith("the learner has waited 60 s for the data of step 5: ")
    assert words in text


def test_what_open_groups_will_take_counts_before_it_is_there(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    watchdog, _ = make_watchdog(world, 100 << 20, lambda path: 130 << 20)
    first, second = Rollout(world), Rollout(world, "rollout-2")
    (lease,) = first.lease()
    assert len(second.lease()) == 1
    first.finish(lease)
    assert world.ledger.mean_result_bytes(world.run_id) > 0
    assert watchdog.check(0.0) == []
    monkeypatch.setattr(type(world.ledger), "mean_result_bytes", lambda ledger, run_id: 12.0 * (1 << 20))
    (message,) = watchdog.check(1.0)
    groups = world.ledger.groups_by_state(world.run_id)
    to_come = 12 * (groups["admitted"] + groups["leased"])
    assert to_come >= 36
    assert f"130 MB are free in {world.path.parent}, {to_come} MB of which open groups will take" in message


def test_a_missing_learner_is_named() -> None:
    assert explain(facts(learners=0)).startswith("no learner has worked on step 5 for 60 s")


def make_watchdog(
    world: World, min_free_bytes: int = 0, *free_bytes: Callable[[Path], int]
) -> tuple[Watchdog, Members]:
    members = Members(10.0)
    return Watchdog(world.ledger, world.exchange, members, world.path.parent, min_free_bytes, *free_bytes), members


def test_a_stall_is_told_after_a_minute_then_after_two_and_four(world: World) -> None:
    watchdog, members = make_watchdog(world)
    assert watchdog.check(world.now_s) == []
    ranks = Learner(world)
    members.add(Member("learner", Introduction(common_pb2.ROLE_LEARNER), 0.0, session=ranks.session))
    ranks.ask(0)
    told = [s for s in range(0, 500) if watchdog.check(world.now_s + s)]
    assert told == [60, 120, 240, 480]
    rollout_worker, reward = Rollout(world), Reward(world)
    fill(rollout_worker, reward, 2)
    assert ranks.train(0) is not None
    assert watchdog.check(world.now_s + 10_000) == []  # it has the batch that it requested


def test_a_session_that_never_asks_is_told_of(world: World) -> None:
    watchdog, members = make_watchdog(world)
    watchdog.check(world.now_s)
    ranks = Learner(world)
    member = Member("learner", Introduction(common_pb2.ROLE_LEARNER), 0.0, session=ranks.session)
    members.add(member)
    told = [watchdog.check(world.now_s + s) for s in range(1, 130)]
    (first, second) = [messages[0] for messages in told if messages]
    assert first.startswith("the learner has not requested the data of step 0 for 60 s")
    assert "120 s" in second
    member.ready_run = world.run_id
    fill(Rollout(world), Reward(world), 2)
    ranks.ask(0)
    assert world.row["next_batch"] == 1
    assert watchdog.check(world.now_s + 10_000) == [], "it trains"


def test_a_paused_run_and_one_without_learner(world: World) -> None:
    watchdog, _ = make_watchdog(world)
    watchdog.check(0.0)
    world.set_state("paused")
    assert watchdog.check(1000.0) == []
    world.set_state("running")
    assert watchdog.check(1059.0) == []
    (message,) = watchdog.check(1060.0)
    assert message.startswith("no learner has worked on step 0 for 60 s")


def test_a_learner_does_not_wait_while_its_run_is_paused(world: World) -> None:
    watchdog, members = make_watchdog(world)
    watchdog.check(world.now_s)
    ranks = Learner(world)
    members.add(Member("learner", Introduction(common_pb2.ROLE_LEARNER), 0.0, session=ranks.session))
    ranks.ask(0)
    world.set_state("paused")
    assert watchdog.check(world.now_s + 1000.0) == []
    world.set_state("running")
    assert watchdog.check(world.now_s + 1059.0) == []
    (message,) = watchdog.check(world.now_s + 1060.0)
    assert message.startswith("the learner has waited 60 s for the data of step 0")


def test_a_disk_that_fills_up_closes_admission_and_opens_it_again(world: World) -> None:
    free_mb = 50

    def free_bytes(path: Path) -> int:
        assert path == world.path.parent
        return free_mb << 20

    watchdog, _ = make_watchdog(world, 100 << 20, free_bytes)
    (message,) = watchdog.check(0.0)
    assert "50 MB are free" in message
    assert "--min-free-mb is 100" in message
    worker = Rollout(world)
    assert worker.lease(8) == []
    assert watchdog.check(1.0) == []
    free_mb = 200
    assert watchdog.check(2.0) == [f"admission is open again: 200 MB are free in {world.path.parent}"]
    assert len(worker.lease(8)) == 4


def test_prompts_that_cannot_be_read_are_waited_for(world: World) -> None:
    watchdog, _ = make_watchdog(world)
    worker, other, train = Rollout(world), Rollout(world, "rollout-2"), Path(world.spec.data.train)
    rows = train.read_bytes()
    train.write_bytes(b"")
    assert worker.lease(8) == []
    (message,) = watchdog.check(0.0)
    assert message.startswith(f"no prompt is admitted: row {world.run.prompts.index(0)} of {train} has changed since")
    assert other.lease(8) == []
    assert watchdog.check(1.0) == []
    train.write_bytes(rows)
    assert [lease.group_id for lease in worker.lease(8)] == [0, 1, 2, 3]
    assert watchdog.check(2.0) == ["prompts are read again"]
    prompts = [json.loads(row["prompt_json"]) for row in world.ledger.db.execute("SELECT * FROM prompts")]
    assert prompts == [world.run.prompts.draw(cursor)[0] for cursor in range(4)], "none was left out"


async def test_watchers_hear_of_a_stall(plane: Plane) -> None:
    run = await plane.submit(logger={"tensorboard": False, "stall_warning_s": 0.01})
    plane.run_loops()
    await plane.watch_until(run.run_id, "warning")
    (event,) = plane.ledger.db.execute("SELECT json FROM events WHERE kind = 'warning' LIMIT 1").fetchall()
    assert "no learner has worked on step 0" in event["json"]


async def test_only_a_broken_stream_is_a_crash(tmp_path: Path) -> None:
    """Silence on an open connection is a stopped worker; a broken connection that stays broken is a dead worker."""
    plane = await Plane.started(tmp_path)
    run = await plane.submit()
    plane.run_loops()
    try:
        await plane.watch_until(run.run_id, "state", state="running")
        insert = "INSERT INTO groups (run_id, group_id, class, state, slot, member_id)"
        workers = [rollout(plane, name) for name in ("stopped", "dead")]
        for group_id, (worker, name) in enumerate(zip(workers, ("stopped", "dead"), strict=True)):
            await worker.hear("welcome")
            with plane.ledger.transaction():
                values = (run.run_id, group_id, group_id, name)
                plane.ledger.db.execute(f"{insert} VALUES (?, ?, 'train', 'leased', ?, ?)", values)
        workers[1].hang_up()
        await plane.watch_until(run.run_id, "member", member_id="dead", what="suspected: its stream broke")
        for name in ("stopped", "dead"):
            plane.be_silent(name)
        for worker in workers:
            await worker.hear_the_end()
        left: set[str] = set()
        async with asyncio.timeout(DEADLINE_S):
            async for event in plane.runs.Watch(run_pb2.WatchRequest(run_id=run.run_id)):
                if '"left: silent' in event.json:
                    left.add(json.loads(event.json)["member_id"])
                if len(left) == 2:
                    break
        deaths = plane.ledger.db.execute("SELECT group_id, member_id FROM deaths").fetchall()
        assert [tuple(death) for death in deaths] == [(1, "dead")]
        last = event.sequence
        back = rollout(plane, "dead")  # it was only cut off
        await back.hear("run")
        async with asyncio.timeout(DEADLINE_S):
            async for event in plane.runs.Watch(run_pb2.WatchRequest(run_id=run.run_id, after=last)):
                if '"joined"' in event.json:
                    break
        assert plane.ledger.db.execute("SELECT COUNT(*) FROM deaths").fetchone()[0] == 0
    finally:
        await plane.stop()
