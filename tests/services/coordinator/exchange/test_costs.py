"""Ended groups cost nothing: no request reads them, however many the run has had."""

from __future__ import annotations

from ended_groups import NUM_ENDED, add_ended_groups
from exchange_drivers import COMMITTED, Learner, MakeWorld, Reward, Rollout, World


def instructions(world: World) -> dict[str, int]:
    """Count the instructions of SQLite's virtual machine for one step, by kind of request."""
    counts: dict[str, int] = {}
    kind = ""

    def count() -> None:
        counts[kind] = counts.get(kind, 0) + 1

    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    world.ledger.db.set_progress_handler(count, 1)
    kind = "lease"
    leases = rollout.lease(4)
    kind = "group"
    for lease in leases:
        assert rollout.finish(lease) == COMMITTED
    kind = "task"
    tasks = reward.tasks()
    kind = "score"
    for task in tasks:
        assert reward.score(task) == COMMITTED
    kind = "batch"
    part = learner.part(0)
    assert part is not None
    kind = "receipt"
    learner.receipt(0, 0, part)
    kind = "leave"
    world.release(rollout.member_id, crashed=True)
    kind = "gauges"
    world.ledger.group_queries.num_held()
    world.ledger.holders()
    world.ledger.groups_by_state(world.run_id)
    world.ledger.group_queries.open_tokens(world.run_id)
    world.ledger.db.set_progress_handler(None, 1)
    return counts


def test_no_request_reads_what_has_ended(make_world: MakeWorld) -> None:
    short, long = make_world(), make_world(check=False)
    add_ended_groups(long)
    few, many = instructions(short), instructions(long)
    assert few.keys() == many.keys()
    for kind, number in many.items():
        assert number < few[kind] + NUM_ENDED // 10, kind
