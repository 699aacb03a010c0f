"""The exchange marks groups, judges the learner's answers and names the worker."""

from __future__ import annotations

import pytest
from exchange_drivers import COMMITTED, Learner, MakeWorld, Reward, Rollout, World, fill

from paceline.v1 import exchange_pb2 as pb


def make(make_world: MakeWorld, **logger: object) -> tuple[World, list[Rollout], Reward, Learner]:
    world = make_world(
        async_grpo={"max_trajectory_age_steps": 1},
        grpo={"max_num_steps": 40},
        logger=logger,
    )
    return world, [Rollout(world, "sound"), Rollout(world, "broken")], Reward(world), Learner(world)


def train(
    world: World, rollouts: list[Rollout], reward: Reward, learner: Learner, step: int, fault: dict[str, float]
) -> list[int]:
    """Train a step of one group by each worker; return the groups that were marked. The worker `broken` has `fault`."""
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
        member_id = holder[group.group_id]
        numbers = {"mean": 0.0, "mean_square": 1e-9, "standard_error": 5e-4} | (fault if member_id == "broken" else {})
        facts = {"sampler": member_id, "version_step": step, "tokens": 800, "number_format": "float32"}
        receipt.comparisons.add(group_id=group.group_id, **numbers, **facts)
    assert learner._send(0, receipt=receipt).reply.status == COMMITTED
    return marked


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ({"mean": 0.01}, "broken are off by +0.0100 nats"),
        ({"mean": 0.01, "mean_square": 0.02, "standard_error": 5e-3}, "broken scatter by 0.141 nats"),
    ],
    ids=["kernel", "weights"],
)
def test_the_worker_that_is_off_is_named(make_world: MakeWorld, fault: dict[str, float], text: str) -> None:
    world, rollouts, reward, learner = make(make_world)
    for step in range(3):
        assert len(train(world, rollouts, reward, learner, step, fault)) == 2
    (warning,) = [w for w in world.kinds("warning") if "spot_check" in w]
    assert (warning["spot_check"], warning["version"]) == ("broken", 0)
    assert text in warning["message"]
    assert "drain" in warning["message"]
    metrics = world.kinds("step")[-1]["metrics"]
    assert metrics["spot_check/groups"] == 6
    assert metrics["spot_check/named_workers"] == 1
    assert metrics["spot_check/largest_difference"] == 0.01
    assert metrics["spot_check/largest_spread"] == pytest.approx(fault.get("mean_square", 1e-9) ** 0.5)


@pytest.mark.parametrize("drops", [True, False])
def test_untrained_groups_of_the_named_worker_are_dropped_if_the_spec_wants_it(
    make_world: MakeWorld, drops: bool
) -> None:
    world, rollouts, reward, learner = make(make_world, verify_drops=drops)
    for step in range(2):
        train(world, rollouts, reward, learner, step, {"mean_square": 0.02})
    (wrong,) = fill(rollouts[1], reward, 1)  # of version 1, which was seen to be wrong
    for rollout in rollouts:
        rollout.hold(2)
    fill(rollouts[0], reward, 1)
    part = learner.part(2)
    if not drops:
        assert part is not None
        assert world.group(wrong)["state"] == "batched"
        return
    assert part is None
    assert world.group(wrong)["reason"] == "wrong_weights"
    (again,) = fill(rollouts[1], reward, 1)  # a newer version is compared, because the worker may be right again
    part = learner.part(2)
    assert part is not None
    assert [group.verify for group in part if group.group_id == again] == [True]


def test_nothing_is_compared_with_a_share_of_zero(make_world: MakeWorld) -> None:
    world, rollouts, reward, learner = make(make_world, verify_share=0)
    for step in range(3):  # the learner compares groups that were not marked
        assert train(world, rollouts, reward, learner, step, {"mean": 0.01}) == []
    assert not [w for w in world.kinds("warning") if "spot_check" in w]
    assert "spot_check/groups" not in world.kinds("step")[-1]["metrics"]
