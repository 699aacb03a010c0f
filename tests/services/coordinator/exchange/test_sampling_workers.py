"""Leases of environment workers depend on the versions of the serving rollout workers, for an evaluation on the pinned
one."""

from __future__ import annotations

from typing import Any

import pytest
from episode_drivers import ENVIRONMENT, EnvironmentWorker, make_turn, serving_rollout
from exchange_drivers import COMMITTED, STALE, MakeWorld, Reward, World

from paceline.groups import Version
from paceline.services.coordinator.exchange import admission, evaluation, leases
from paceline.services.coordinator.exchange.admission import SamplableVersions
from paceline.services.coordinator.exchange.evaluation import FIRST_EVALUATION_GROUP
from paceline.services.coordinator.members.registry import HeldWeights

EVAL = {"val_period": 1, "val_samples_per_prompt": 1}


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return make_world(**ENVIRONMENT)


def test_a_worker_reaches_the_versions_that_are_new_enough() -> None:
    versions = SamplableVersions((3, 5, 6))
    assert [versions.may_lease(step, 1) for step in (4, 7, 8)] == [True, True, False]
    assert [versions.oldest(step, 1) for step in (2, 4, 5, 7)] == [3, 3, 5, 6]


@pytest.mark.parametrize(
    "changes",
    [
        {"ready_run": ""},
        {"connected": False},
        {"draining": True},
        {"weights": HeldWeights(expelled=True)},
        {"suspected": True},
    ],
)
def test_only_ready_members_sample_for_others(world: World, changes: dict[str, Any]) -> None:
    serving_rollout(world, "rollout-1")
    serving_rollout(world, "rollout-2", step=1)
    assert [sampler.member_id for sampler in admission.serving_samplers(world.exchange, world.run)] == [
        "rollout-1",
        "rollout-2",
    ]
    world.enter("rollout-1", **changes)
    (sampler,) = admission.serving_samplers(world.exchange, world.run)
    assert sampler == ("rollout-2", "rollout-2:1", Version(1, 1))


def test_leases_wait_for_a_sampling_worker_that_is_new_enough(world: World) -> None:
    worker = EnvironmentWorker(world)
    assert worker.lease(8) == []
    rollout = serving_rollout(world)
    assert len(worker.lease(16)) == 4  # (η + 1)·B
    rollout.hold(-2)
    world.release("environment")
    worker = EnvironmentWorker(world)
    assert worker.lease(16) == []  # more than η behind every step
    rollout.hold(0)
    assert len(worker.lease(16)) == 4


def test_the_oldest_version_of_a_group_is_that_of_its_turns_or_of_a_sampling_worker(world: World) -> None:
    serving_rollout(world, "rollout-1")
    serving_rollout(world, "rollout-2", step=1)
    worker = EnvironmentWorker(world)
    first = worker.lease(2)[0]
    assert world.group(0)["lease_step"] == 0
    world.release("rollout-1")
    second = worker.lease(2)[0]
    assert world.group(1)["lease_step"] == 1
    worker.turn(first, 0, make_turn(Version(1, 0), 1))
    worker.turn(second, 0, make_turn(Version(1, 1), 2))
    assert [world.group(group_id)["oldest_step"] for group_id in (0, 1)] == [0, 1]
    world.release("environment")
    assert len(EnvironmentWorker(world, "other").lease(4)) == 2
    assert [world.group(group_id)["lease_step"] for group_id in (0, 1)] == [0, 1]


def make_evaluation(make_world: MakeWorld) -> World:
    world = make_world(grpo=EVAL, **ENVIRONMENT)
    world.begin_evaluation(0)
    return world


def test_an_evaluation_s_leases_name_the_pinned_worker(make_world: MakeWorld) -> None:
    world = make_evaluation(make_world)
    serving_rollout(world, "rollout-1")
    serving_rollout(world, "rollout-2", step=1)
    first, second, reward = (
        EnvironmentWorker(world, "first"),
        EnvironmentWorker(world, "second"),
        Reward(world),
    )
    leases = [*first.lease(2), *second.lease(1)]
    assert {held.lease.pinned_member for held in leases} == {"rollout-2"}
    assert {held.lease.pinned_version.step for held in leases} == {1}
    assert evaluation.pinned_member(world.exchange, world.run) == "rollout-2"
    reply = first.turn(leases[0], 0, make_turn(Version(1, 0), 1)).reply
    assert (reply.status, "another version" in reply.message) == (STALE, True)
    for worker, held in zip((first, first, second), leases, strict=True):
        worker.play_all(held, Version(1, 1), turns=2)
        assert worker.finish(held) == COMMITTED
    for task in reward.tasks():
        assert reward.score(task, [1.0]) == COMMITTED
    (result,) = world.kinds("evaluated")
    assert (result["step"], result["samples"], result["completion_length"]) == (1, 3, 6.0)
    assert "tokens:generated" not in world.counters


def test_an_evaluation_waits_for_its_sampling_worker_and_begins_anew_when_that_is_gone(make_world: MakeWorld) -> None:
    world = make_evaluation(make_world)
    serving_rollout(world, "rollout-1", step=1)
    serving_rollout(world, "rollout-2")
    worker = EnvironmentWorker(world)
    held, other = worker.lease(2)
    worker.turn(held, 0, make_turn(Version(1, 1), 1))
    worker.end(other, 0, "environment_failed")
    world.enter("rollout-1", suspected=True)
    assert [lease.lease.group_id for lease in worker.lease(1)] == [0]  # one to train
    world.release("rollout-1")
    (again,) = worker.lease(1)
    assert (again.lease.group_id, again.lease.pinned_member) == (FIRST_EVALUATION_GROUP, "rollout-2")
    assert (again.samples[0].life, again.samples[0].turns) == (1, [])
    assert worker.turn(held, 0, make_turn(Version(1, 1), 2)).reply.status == STALE
    assert world.group(FIRST_EVALUATION_GROUP)["tokens"] == 0
    worker.turn(again, 0, make_turn(Version(1, 0), 1), last=True)
    assert worker.finish(again) == COMMITTED
    assert world.ledger.episodes.ended(world.run_id, FIRST_EVALUATION_GROUP + 1) == []


def test_a_worker_that_submits_turns_is_not_overdue(world: World) -> None:
    serving_rollout(world)
    busy, stuck = EnvironmentWorker(world, "busy"), EnvironmentWorker(world, "stuck")
    (held,) = busy.lease(2)
    assert len(stuck.lease(2)) == 1
    EnvironmentWorker(world, "idle")
    for second in range(0, 700, 5):
        if second == 590:
            busy.turn(held, 0, make_turn(Version(1, 0), 1))
        found = leases.find_overdue(world.exchange, world.run, float(second))
        if found:
            break
    assert [member_id for member_id, _ in found] == ["stuck"]
