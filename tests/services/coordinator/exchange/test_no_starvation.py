"""Slow, long and hard prompts are trained as often as the others: no group is discarded for being late."""

from __future__ import annotations

from collections import Counter

import pytest
from exchange_drivers import COMMITTED, Learner, MakeWorld, Reward, Rollout

from paceline.v1 import exchange_pb2 as pb

LONG, SHORT = 50, 1
"""Ticks that a group takes; one group in four is long."""

STEPS = 40


@pytest.mark.parametrize("order", ["ready_first", "in_order"])
def test_lengths_that_differ_fifty_fold_are_trained_alike(make_world: MakeWorld, order: str) -> None:
    world = make_world(
        grpo={"num_prompts_per_step": 4, "max_num_steps": STEPS},
        async_grpo={"order": order, "max_trajectory_age_steps": 2, "late_wait_s": 600.0},
        policy={"model_name": "none", "generation": {"max_new_tokens": 64}},
    )
    rollouts = [Rollout(world, f"rollout-{i}") for i in range(3)]
    reward, learner = Reward(world), Learner(world)
    under_way: list[tuple[int, Rollout, pb.Lease]] = []
    step = 0
    for tick in range(STEPS * LONG * 4):
        if step == STEPS:
            break
        world.now_s += 1.0
        for rollout in rollouts:
            for lease in rollout.lease(8):
                under_way.append((tick + (LONG if is_long(lease.group_id) else SHORT), rollout, lease))
        for entry in [entry for entry in under_way if entry[0] <= tick]:
            under_way.remove(entry)
            _, rollout, lease = entry
            assert rollout.finish(lease, 50 if is_long(lease.group_id) else 1) == COMMITTED
        for task in reward.tasks():
            assert reward.score(task) == COMMITTED
        if learner.train(step) is not None:
            step += 1
            for rollout in rollouts:
                rollout.hold(step)

    assert step == STEPS
    rows = world.ledger.db.execute("SELECT group_id, step FROM groups WHERE state = 'trained'").fetchall()
    trained = Counter(is_long(row["group_id"]) for row in rows)
    assert world.counters.get("groups:dropped:stale", 0) == 0
    assert abs(trained[True] / len(rows) - 0.25) < 0.02, trained  # as many as there are
    late = [row["step"] - row["group_id"] // 4 for row in rows if is_long(row["group_id"])]
    assert max(late) <= 2 + 2, "a long group was trained long after its turn"


def is_long(group_id: int) -> bool:
    return group_id % 4 == 3
