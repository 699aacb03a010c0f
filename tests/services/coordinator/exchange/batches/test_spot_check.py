"""The exchange marks groups, judges the learner's answers and names the worker."""

from __future__ import annotations

from exchange_drivers import COMMITTED, Learner, MakeWorld, Reward, Rollout, World, fill

from paceline.v1 import exchange_pb2 as pb


def make(make_world: MakeWorld, share: float = 1.0) -> tuple[World, list[Rollout], Reward, Learner]:
    world = make_world(
        async_grpo={"max_trajectory_age_steps": 0},
        grpo={"max_num_steps": 40},
        logger={"verify_share": share},
    )
    return world, [Rollout(world, "sound"), Rollout(world, "broken")], Reward(world), Learner(world)


def train(world: World, rollouts: list[Rollout], reward: Reward, learner: Learner, step: int) -> list[int]:
    """Train a step of one group by each worker; return the groups that were marked. The worker `broken` is off by 0.01."""
    holder = {}
    for rollout in rollouts:
        rollout.hold(step)
        for group_id in fill(rollout, reward, 1):
            holder[group_id] = rollout.member_id
    part = learner.part(step)
    assert part is not None
    marked = [group.group_id for group in part if group.verify]
    tokens = sum(world.group(group.group_id)["tokens"] for group in part)
    receipt = pb.Receipt(step=step, rank=0, world_size=1, tokens=tokens)
    for group in part:
        receipt.groups.add(group_id=group.group_id, digest=group.digest, scores_digest=group.scores_digest)
        wrong = 0.01 if holder[group.group_id] == "broken" else 0.0
        receipt.comparisons.add(group_id=group.group_id, mean=wrong, standard_error=5e-4, tokens=800)
    assert learner._send(0, receipt=receipt).reply.status == COMMITTED
    return marked


def test_the_worker_that_is_off_is_named(make_world: MakeWorld) -> None:
    world, rollouts, reward, learner = make(make_world)
    for step in range(3):
        assert len(train(world, rollouts, reward, learner, step)) == 2
    (warning,) = [w for w in world.kinds("warning") if "spot_check" in w]
    assert warning["spot_check"] == "broken"
    assert "broken are off by +0.0100 nats" in warning["message"]
    assert "drain" in warning["message"]
    metrics = world.kinds("step")[-1]["metrics"]
    assert metrics["spot_check/groups"] == 6
    assert metrics["spot_check/named_workers"] == 1
    assert metrics["spot_check/largest_difference"] == 0.01


def test_nothing_is_compared_with_a_share_of_zero(make_world: MakeWorld) -> None:
    world, rollouts, reward, learner = make(make_world, share=0)
    for step in range(3):  # the learner compares groups that were not marked
        assert train(world, rollouts, reward, learner, step) == []
    assert not [w for w in world.kinds("warning") if "spot_check" in w]
    assert "spot_check/groups" not in world.kinds("step")[-1]["metrics"]
