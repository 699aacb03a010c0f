"""Groups that crash their workers are leased alone, then dropped. Infrastructure faults drop none."""

from __future__ import annotations

import pytest
from exchange_drivers import COMMITTED, STALE, Learner, MakeWorld, Reward, Rollout, World

from paceline.v1 import exchange_pb2 as pb


def crash(world: World, member_id: str) -> None:
    world.release(member_id, crashed=True)


def ids(leases: list[pb.Lease]) -> list[int]:
    return [lease.group_id for lease in leases]


def warnings(world: World) -> list[str]:
    return [content["message"] for content in world.kinds("warning")]


def quarantine_groups(world: World) -> None:
    """Make groups 0 and 1 present at two crashes; 2 and 3 are at none."""
    for life in range(2):
        worker = Rollout(world, f"early-{life}")
        assert ids(worker.lease(4)) == [0, 1]
        crash(world, worker.member_id)


def test_quarantined_groups_are_leased_alone_and_the_innocent_one_is_trained(world: World) -> None:
    quarantine_groups(world)
    assert [w.split(" was")[0] for w in warnings(world)] == ["group 0", "group 1"]

    first, second = Rollout(world, "first"), Rollout(world, "second")
    (quarantined,) = first.lease(8)
    assert quarantined.group_id == 0
    assert first.lease(8) == []  # no other lease beside it
    (other,) = second.lease(8)
    assert other.group_id == 1
    assert second.finish(other) == COMMITTED  # the worker survives, so the group was not the cause
    assert ids(second.lease(8)) == [2, 3]

    crash(world, "first")
    third = Rollout(world, "third")
    assert ids(third.lease(8)) == [0]
    crash(world, "third")
    assert world.group(0)["state"] == "dropped"
    assert world.group(0)["reason"] == "poison"
    assert world.counters["groups:dropped:poison"] == 1
    assert "4 workers died while they held it" in warnings(world)[-1]
    assert ids(Rollout(world, "fourth").lease(8)) == [4]  # another prompt takes its place


def test_a_worker_empties_its_hands_before_it_gets_a_quarantined_group(world: World) -> None:
    busy = Rollout(world, "busy")
    held = busy.lease(2)
    assert ids(held) == [0]
    for life in range(2):
        worker = Rollout(world, f"early-{life}")
        assert ids(worker.lease(2)) == [1]
        crash(world, worker.member_id)

    assert busy.lease(4) == []  # groups 2 and 3 are free, but the worker has to finish first
    other = Rollout(world, "other")
    assert ids(other.lease(4)) == [2, 3]  # the quarantined group is reserved: no other worker stops for it
    assert busy.finish(held[0]) == COMMITTED
    assert ids(busy.lease(8)) == [1]


def test_a_reserved_worker_that_leaves_makes_room_for_another(world: World) -> None:
    busy, other = Rollout(world, "busy"), Rollout(world, "other")
    assert ids(busy.lease(2)) == [0]
    for life in range(2):
        worker = Rollout(world, f"early-{life}")
        assert ids(worker.lease(2)) == [1]
        crash(world, worker.member_id)
    assert busy.lease(2) == []
    world.release("busy")
    assert ids(other.lease(8)) == [1]


def test_crashes_with_the_group_among_others_never_drop_it(world: World) -> None:
    """Only crashes with the group alone are proof, and one for each of two groups is not enough."""
    quarantine_groups(world)
    third = Rollout(world, "third")
    assert ids(third.lease(8)) == [0]
    crash(world, "third")
    assert world.group(0)["state"] == "admitted"
    fourth = Rollout(world, "fourth")
    (lease,) = fourth.lease(8)
    assert fourth.finish(lease) == COMMITTED


def test_silence_a_good_leave_and_a_return_are_no_crashes(world: World) -> None:
    for life in range(8):
        worker = Rollout(world, f"early-{life}")
        assert 0 in ids(worker.lease(8))
        if life % 2:
            world.release(worker.member_id)  # drained, or silent on an open connection
        else:
            crash(world, worker.member_id)
            with world.ledger.transaction():
                world.ledger.deaths.remove_member(worker.member_id)  # cut off for long, and back
    assert warnings(world) == []
    assert world.counters.get("groups:dropped:poison", 0) == 0


def test_scoring_counts_anew_and_a_text_that_kills_scorers_is_dropped(world: World) -> None:
    quarantine_groups(world)
    rollout = Rollout(world)
    (lease,) = rollout.lease(8)
    assert rollout.finish(lease) == COMMITTED
    for life in range(4):
        scorer = Reward(world, f"reward-{life}")
        assert [task.group_id for task in scorer.tasks()] == [0]
        assert world.group(0)["state"] == "generated"
        crash(world, scorer.member_id)
    assert world.group(0)["reason"] == "poison"
    books = world.ledger.token_books(world.run_id)
    assert books["dropped:poison"] == books["generated"] > 0


def test_the_count_survives_a_restart_of_the_coordinator(world: World) -> None:
    quarantine_groups(world)
    world.restart()
    first = Rollout(world, "first")
    assert ids(first.lease(8)) == [0]
    crash(world, "first")
    world.restart()
    second = Rollout(world, "second")
    assert ids(second.lease(8)) == [0]
    crash(world, "second")
    assert world.group(0)["reason"] == "poison"


def test_an_evaluation_ends_without_its_poisonous_prompt(make_world: MakeWorld) -> None:
    world = make_world(grpo={"val_at_start": True})
    world.begin_evaluation(0)
    for life in range(4):
        worker = Rollout(world, f"early-{life}")
        assert min(ids(worker.lease(1))) > 1 << 39
        crash(world, worker.member_id)
    rollout, reward = Rollout(world), Reward(world)
    for lease in rollout.lease(2):
        assert rollout.finish(lease) == COMMITTED
    for task in reward.tasks():
        assert reward.score(task) == COMMITTED
    (result,) = world.ledger.evaluations.results(world.run_id)
    assert (result["samples"], result["failed"]) == (2, 1)


def test_a_run_with_poison_in_it_trains_to_its_end(world: World) -> None:
    reward, learner = Reward(world), Learner(world)
    lives = 0
    for _ in range(60):
        step = int(world.row["next_step"])
        if step == world.spec.max_num_steps:
            break
        lives += 1
        rollout = Rollout(world, f"rollout-{lives}", step)
        leases = rollout.lease(4)
        if any(lease.group_id in (1, 6) for lease in leases):
            crash(world, rollout.member_id)
            continue
        for lease in leases:
            assert rollout.finish(lease) == COMMITTED
        for task in reward.tasks():
            assert reward.score(task) == COMMITTED
        learner.train(step)
        world.release(rollout.member_id)
    assert world.counters["groups:trained"] == 8
    dropped = world.ledger.db.execute("SELECT group_id FROM groups WHERE reason = 'poison'").fetchall()
    assert [row["group_id"] for row in dropped] == [1, 6]


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_a_quarantined_group_is_alone_although_there_are_groups_to_train_and_to_measure(
    make_world: MakeWorld, kind: str
) -> None:
    world = make_world(grpo={"val_at_start": True})
    if kind == "eval":
        world.begin_evaluation(0)
    for name in ("first", "second"):
        (quarantined,) = Rollout(world, name).lease(2 if kind == "train" else 1)
        world.release(name, crashed=True)
    if kind == "train":
        world.begin_evaluation(0)
    given = [lease.group_id for lease in Rollout(world, "third").lease(8)]
    if kind == "eval":
        assert given == [quarantined.group_id]
    else:  # groups to measure come first, so the quarantined group waits for an idle worker
        assert len(given) > 1
        assert quarantined.group_id not in given


def test_a_group_whose_scoring_crashes_is_scored_alone_then_dropped(world: World) -> None:
    rollout, reward = Rollout(world), Reward(world)
    for lease in rollout.lease(4):
        assert rollout.finish(lease) == COMMITTED
    for _ in range(2):  # one worker, whose process dies each time
        tasks = {task.group_id: task for task in reward.tasks()}
        assert tasks.keys() == {0, 1}
        crashed = reward.send(tasks[0], handed_back=True, crashed=True, error="died with SIGKILL").reply
        assert crashed.status == COMMITTED
        assert reward.send(tasks[1], handed_back=True).reply.status == COMMITTED
    assert "group 0 was present when 2 workers died; from now on it is leased alone" in warnings(world)
    world.release("reward")
    with world.ledger.transaction():
        world.ledger.deaths.remove_member("reward")  # the worker comes back; its processes did die
    for _ in range(2):
        reward = Reward(world)
        (task,) = reward.tasks()
        assert task.group_id == 0
        assert reward.send(task, handed_back=True, crashed=True).reply.status == COMMITTED
    assert world.group(0)["reason"] == "poison"
    assert world.group(1)["state"] == "generated"
    assert reward.score(reward.tasks()[0]) == COMMITTED


def test_a_crash_that_is_sent_again_counts_once(world: World) -> None:
    rollout, reward = Rollout(world), Reward(world)
    (lease,) = rollout.lease(2)
    rollout.finish(lease)
    (task,) = reward.tasks()
    reward.send(task, handed_back=True, crashed=True)
    assert reward.send(task, handed_back=True, crashed=True).reply.status == STALE
    (deaths,) = world.ledger.db.execute("SELECT member_id FROM deaths").fetchall()
    assert deaths["member_id"] == "reward scoring attempt 1"
