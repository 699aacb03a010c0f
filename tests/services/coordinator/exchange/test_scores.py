"""Scores: weights, None, failures with a limit, groups without variance."""

from __future__ import annotations

import math

import pytest
from exchange_drivers import (
    COMMITTED,
    DUPLICATE,
    INVALID,
    STALE,
    Learner,
    MakeWorld,
    Reward,
    Rollout,
    World,
)

from paceline.errors import ALIKE


def test_scoring_that_fails_three_times_drops_the_group(world: World) -> None:
    rollout, reward = Rollout(world), Reward(world)
    (lease,) = rollout.lease(2)
    rollout.finish(lease)
    for attempt in (1, 2, 3):
        (task,) = reward.tasks()
        assert task.attempt == attempt
        assert reward.tasks() == []
        assert reward.fail(task) == COMMITTED
    assert world.states()[0] == "dropped"
    assert world.group(0)["reason"] == "reward_failed"
    assert world.counters["tokens:dropped:reward_failed"] == 9
    assert len(world.kinds("warning")) == 2, "the first failure and the drop"
    assert reward.tasks() == []


def test_a_failure_that_every_attempt_would_repeat_drops_the_group_at_once(world: World) -> None:
    rollout, reward = Rollout(world), Reward(world)
    (lease,) = rollout.lease(2)
    rollout.finish(lease)
    (task,) = reward.tasks()
    error = f"reward function 'f' needs solution, which is no column{ALIKE}"
    assert reward.send(task, error=error).reply.status == COMMITTED
    assert world.states()[0] == "dropped"
    assert world.counters["failures:reward_failed"] == 1
    (warning,) = world.kinds("warning")
    assert warning["message"] == f"group 0 was dropped as 'reward_failed': {error}"
    assert reward.tasks() == []


def test_a_failure_counts_once_and_only_from_who_holds_the_task(world: World) -> None:
    rollout, reward, other = Rollout(world), Reward(world), Reward(world, "other")
    (lease,) = rollout.lease(2)
    rollout.finish(lease)
    (task,) = reward.tasks()
    assert other.fail(task) == STALE
    assert reward.fail(task) == COMMITTED
    assert reward.fail(task) == STALE  # sent again: the reply was lost
    assert world.group(0)["score_failures"] == 1
    (again,) = other.tasks()
    assert reward.send(task, handed_back=True).reply.status == STALE
    assert world.group(0)["scorer_id"] == "other"
    assert other.send(again, handed_back=True).reply.status == COMMITTED
    assert world.group(0)["score_failures"] == 1
    assert [t.attempt for t in reward.tasks()] == [3]


@pytest.mark.parametrize("handed_back", [False, True])
def test_a_long_error_is_cut_before_it_is_written_down(world: World, handed_back: bool) -> None:
    rollout, reward = Rollout(world), Reward(world)
    (lease,) = rollout.lease(2)
    rollout.finish(lease)
    (task,) = reward.tasks()
    reply = reward.send(task, error="x" * 1_000_000, handed_back=handed_back).reply
    assert reply.status == COMMITTED
    (warning,) = world.kinds("warning")
    assert len(warning["message"]) < 5000


@pytest.mark.parametrize("attempt", [0, 2, 99, 2**32 - 1])
def test_a_score_of_an_attempt_that_nobody_had_is_stale_and_changes_nothing(world: World, attempt: int) -> None:
    rollout, reward, other = Rollout(world), Reward(world), Reward(world, "other")
    (lease,) = rollout.lease(2)
    rollout.finish(lease)
    (task,) = reward.tasks()
    before = world.dump()
    assert other.score(task, [1e6, 1e6]) == STALE
    task.attempt = attempt
    assert reward.score(task, [1e6, 1e6]) == STALE
    assert other.score(task, [1e6, 1e6]) == STALE
    assert world.dump() == before
    task.attempt = 1
    assert reward.score(task) == COMMITTED


def test_a_score_is_for_exactly_one_text(world: World) -> None:
    rollout, reward = Rollout(world), Reward(world)
    (lease,) = rollout.lease(2)
    rollout.finish(lease)
    (task,) = reward.tasks()
    task.digest = "0" * 64
    assert reward.score(task) == STALE
    task.group_id = 77
    assert reward.score(task) == STALE
    assert world.states()[0] == "generated"


@pytest.mark.parametrize(
    ("rewards", "functions"),
    [
        ([0.0], ["exact_match"]),
        ([0.0, 1.0, 2.0], ["exact_match"]),
        ([], ["exact_match"]),
        ([0.0, 1.0], ["another"]),
        ([0.0, 1.0, 0.0, 1.0], ["exact_match"]),
        ([0.0, math.inf], ["exact_match"]),
    ],
)
def test_scores_that_do_not_fit_are_refused(world: World, rewards: list[float], functions: list[str]) -> None:
    rollout, reward = Rollout(world), Reward(world)
    (lease,) = rollout.lease(2)
    rollout.finish(lease)
    (task,) = reward.tasks()
    before = world.dump()
    assert reward.send(task, rewards=rewards, functions=functions).reply.status == INVALID
    assert world.dump() == before
    assert reward.score(task) == COMMITTED
    assert reward.score(task) == DUPLICATE


def test_rewards_are_weighted_and_none_stays_apart(make_world: MakeWorld) -> None:
    world = make_world(
        rewards=[{"function": "exact_match"}, {"function": "exact_match", "name": "other", "weight": 0.5}]
    )
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    for lease in rollout.lease(4):
        rollout.finish(lease)
    first, second = reward.tasks()
    nan = math.nan
    assert reward.score(first, [1.0, 4.0, nan, 2.0]) == COMMITTED  # 1 + 0.5·4 = 3 and 0.5·2 = 1
    assert world.group(0)["reward"] == 2.0
    assert reward.score(second, [nan, nan, nan, nan]) == COMMITTED
    assert world.group(1)["reward"] is None
    part = learner.part(0)
    assert part is not None
    assert list(part[0].rewards)[:2] == [1.0, 4.0]
    assert math.isnan(part[0].rewards[2])
    learner.train(0)
    (step,) = world.kinds("step")
    assert step["metrics"]["reward"] == 2.0
    assert step["metrics"]["reward/exact_match"] == 1.0
    assert step["metrics"]["reward/other"] == 3.0
    assert step["metrics"]["age/0"] == 2.0
    assert step["metrics"]["completion_length"] == 4.5


def test_groups_without_variance_are_dropped_and_replaced(make_world: MakeWorld) -> None:
    world = make_world(grpo={"use_dynamic_sampling": True})
    rollout, reward = Rollout(world), Reward(world)
    for lease in rollout.lease(8):
        rollout.finish(lease)
    equal, none, one, other = reward.tasks()
    reward.score(equal, [1.0, 1.0])
    reward.score(none, [math.nan, 1.0])
    assert [world.states()[g] for g in (0, 1)] == ["dropped", "dropped"]
    assert world.counters["groups:dropped:no_variance"] == 2
    assert [lease.group_id for lease in rollout.lease(8)] == [4, 5]
    reward.score(one)
    reward.score(other)
    assert world.row["dropped_in_a_row"] == 0


@pytest.mark.parametrize(
    ("advantage", "weights", "rewards", "state"),
    [
        ("trl", [0.1, 0.2], [3.0, 0.0, 1.0, 1.0], "dropped"),  # 0.1 · 3 and 0.1 + 0.2
        ("trl", [1.0, 1.0], [1 / 3, 2 / 3, 1.0, 0.0], "dropped"),
        ("trl", [1e-9, 1.0], [1.0, 0.5, 0.0, 0.5], "scored"),
        ("trl", [1e6, 1e-3], [1.0, 1.0, 1.0, 0.0], "scored"),
        ("gdpo", [1.0, 0.5], [1.0, 0.0, 0.0, 2.0], "scored"),  # equal totals
        ("gdpo", [1.0, 1.0], [1.0, 0.0, 0.0, 1.0], "dropped"),
        ("gdpo", [0.0, 1.0], [1.0, 0.3, 0.0, 0.3], "dropped"),
        ("nemo", [0.7, 0.3], [1.0, 1.0, 1.0, 1.0], "dropped"),
        ("reinforce_pp", [1.0, 1.0], [1.0, 1.0, 1.0, 1.0], "scored"),  # it is compared with the batch
        ("reinforce_pp", [1.0, 1.0], [math.nan] * 4, "dropped"),
    ],
)
def test_a_group_is_dropped_where_its_preset_gives_it_no_advantage(
    make_world: MakeWorld, advantage: str, weights: list[float], rewards: list[float], state: str
) -> None:
    functions = [{"function": "exact_match", "name": f"f{i}", "weight": w} for i, w in enumerate(weights)]
    world = make_world(grpo={"use_dynamic_sampling": True, "advantage": advantage}, rewards=functions)
    rollout, reward = Rollout(world), Reward(world)
    (lease,) = rollout.lease(2)
    rollout.finish(lease)
    (task,) = reward.tasks()
    reward.score(task, rewards)
    assert world.states()[0] == state


def drop_all(world: World, rewards: list[float], number: int) -> None:
    """Score `number` groups one after the other with the same rewards."""
    rollout, reward = Rollout(world), Reward(world)
    for _ in range(number):
        (lease,) = rollout.lease(2)
        rollout.finish(lease)
        (task,) = reward.tasks()
        reward.score(task, rewards)


@pytest.mark.parametrize(
    ("rewards", "explained"),
    [
        ([1.0, 1.0], "every completion of 6 groups scored 1, so no completion is better than another"),
        ([0.0, 0.0], "no completion of 6 groups scored above 0, and no reward function failed"),
        ([math.nan, math.nan], "every reward function returned None for every completion of 6 groups"),
    ],
)
def test_a_run_without_any_variance_pauses_and_explains_it(
    make_world: MakeWorld, rewards: list[float], explained: str
) -> None:
    world = make_world(grpo={"use_dynamic_sampling": True, "max_generation_batches": 3})
    drop_all(world, rewards, 5)  # 3 batches of 2, less one: two batches are no reason yet
    assert world.kinds("paused") == []
    drop_all(world, rewards, 1)
    (paused,) = world.kinds("paused")
    assert paused["message"] == world.row["message"]
    for part in ("grpo.max_generation_batches", "'no_variance'", explained, "`paceline resume test-1`"):
        assert part in paused["message"]
    assert Rollout(world).lease(2) == []


def test_groups_that_fail_for_one_cause_pause_the_run_and_later_ones_wait_for_the_correction(
    world: World,
) -> None:
    rollout, reward = Rollout(world), Reward(world)
    error = "reward function 'f' raised NameError: name 're' is not defined (r.py:3 in f)"
    for lease in rollout.lease(8):
        rollout.finish(lease)
    for _ in range(2):
        for task in reward.tasks():
            reward.send(task, error=error)
    *others, last = reward.tasks()
    for task in others:
        reward.send(task, error=error)
    assert world.counters["groups:dropped:reward_failed"] == 3
    for lease in rollout.lease(8):
        rollout.finish(lease)
    later = reward.tasks()
    assert world.kinds("paused") == []
    reward.send(last, error=error)  # the fourth: two batches of 2
    (paused,) = world.kinds("paused")
    assert "4 groups in a row were dropped as 'reward_failed' for one cause: reward function 'f'" in paused["message"]
    assert "(r.py:3 in f). Correct the function" in paused["message"]
    assert [content["message"].partition(":")[0] for content in world.kinds("warning")] == [
        "scoring group 0 failed (1 of 3)",
        "group 0 was dropped as 'reward_failed'",
    ], "equal failures are one line"
    for task in later:
        assert reward.send(task, error=error).reply.status == COMMITTED
    assert later
    assert reward.tasks() == []
    with world.ledger.transaction():
        world.ledger.update_run("test-1", state="running", message="", dropped_in_a_row=0)
        world.run.state.clear_failures(first_group=0)
    again = reward.tasks()
    assert [task.group_id for task in again] == [task.group_id for task in later]
    assert {world.group(task.group_id)["score_failures"] for task in again} == {0}


def test_a_task_that_fails_while_the_run_is_paused_for_it_uses_up_no_attempt(world: World) -> None:
    rollout, reward = Rollout(world), Reward(world)
    for lease in rollout.lease(2):
        rollout.finish(lease)
    (task,) = reward.tasks()
    with world.ledger.transaction():
        world.exchange.pause(world.run, "the function fails", "reward_failed")
    assert reward.fail(task) == COMMITTED
    assert world.group(task.group_id)["score_failures"] == 0
    assert world.group(task.group_id)["scorer_id"] is None


def test_failures_between_groups_that_can_train_do_not_pause(world: World) -> None:
    rollout, reward = Rollout(world), Reward(world)
    for number in range(6):
        (lease,) = rollout.lease(2)
        rollout.finish(lease)
        for _ in range(1 if number % 3 == 2 else 3):
            (task,) = reward.tasks()
            if number % 3 == 2:
                reward.score(task)
            else:
                reward.fail(task)
    assert world.counters["groups:dropped:reward_failed"] == 4
    assert world.kinds("paused") == []


def test_one_group_that_can_train_starts_the_count_anew(make_world: MakeWorld) -> None:
    world = make_world(grpo={"use_dynamic_sampling": True, "max_generation_batches": 1})
    rollout, reward = Rollout(world), Reward(world)
    for rewards in ([1.0, 1.0], [0.0, 1.0], [1.0, 1.0]):
        (lease,) = rollout.lease(2)
        rollout.finish(lease)
        (task,) = reward.tasks()
        reward.score(task, rewards)
    assert world.kinds("paused") == []
    assert world.row["dropped_in_a_row"] == 1


def test_what_could_not_be_reached_never_drops_a_group_and_uses_up_no_attempt(world: World) -> None:
    rollout, reward = Rollout(world), Reward(world)
    (lease,) = rollout.lease(2)
    rollout.finish(lease)
    for _ in range(9):
        (task,) = reward.tasks()
        assert reward.send(task, error="judge: connection refused", handed_back=True).reply.status == COMMITTED
    assert world.counters["failures:unavailable"] == 9
    assert len(world.kinds("warning")) == 4, "after 1, 2, 4 and 8 of them"
    for _ in range(2):  # failures of its data are counted apart: it has three attempts
        (task,) = reward.tasks()
        assert reward.fail(task) == COMMITTED
    (task,) = reward.tasks()
    assert reward.score(task) == COMMITTED
    assert world.states()[0] == "scored"
