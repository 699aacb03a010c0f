"""Evaluations are pinned to one version, outside batches and token accounting, and finish whichever worker dies."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from exchange_drivers import (
    COMMITTED,
    INVALID,
    STALE,
    Learner,
    MakeWorld,
    Reward,
    Rollout,
    World,
    fill,
    make_completion,
)

from paceline.errors import NotFound
from paceline.groups import Version
from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.exchange import evaluation
from paceline.services.coordinator.exchange.batches import selection
from paceline.services.coordinator.exchange.evaluation import FIRST_EVALUATION_GROUP
from paceline.services.coordinator.ledger.segments import DamagedRecord
from paceline.services.coordinator.records.reader import records_in
from paceline.v1 import exchange_pb2 as pb

EVAL = {"val_at_start": True}


def make_evaluation(make_world: MakeWorld, step: int = 0) -> World:
    """Three prompts to evaluate."""
    world = make_world(grpo=EVAL)
    world.begin_evaluation(step)
    return world


def test_an_evaluation_from_lease_to_result(make_world: MakeWorld) -> None:
    world = make_evaluation(make_world)
    rollout, reward = Rollout(world, step=3, session=2), Reward(world)
    leases = rollout.lease(4)
    pinned = [lease for lease in leases if lease.HasField("pinned_version")]
    assert [lease.group_id - FIRST_EVALUATION_GROUP for lease in pinned] == [0, 1, 2]
    assert {(v.pinned_version.session, v.pinned_version.step) for v in pinned} == {(2, 3)}
    assert {lease.num_generations for lease in pinned} == {1}
    assert len(leases) == 3  # room for four samples, and a training group needs two
    assert world.kinds("pinned") == [{"member_id": "rollout"}]
    assert evaluation.pinned_member(world.exchange, world.run) == "rollout"
    for length, lease in enumerate(pinned, start=2):
        assert rollout.finish(lease, length) == COMMITTED
    for task, value in zip(reward.tasks(), (1.0, 0.5, math.nan), strict=True):
        assert reward.score(task, [value]) == COMMITTED
    (result,) = world.kinds("evaluated")
    assert result == {
        "requested_step": 0,
        "step": 3,
        "reward": 0.75,
        "reward_stderr": 0.25,  # of 1 and 0.5: their std is sqrt(1/8), divided by sqrt(2)
        "reward/exact_match": 0.75,
        "reward_stderr/exact_match": 0.25,
        "prompts": 3,
        "samples": 3,
        "failed": 0,
        "completion_length": 3.0,
    }
    assert world.ledger.evaluations.results(world.run_id)[0]["reward"] == 0.75
    assert evaluation.pinned_member(world.exchange, world.run) is None
    assert "tokens:generated" not in world.counters
    kept = {g: state for g, state in world.states().items() if g >= FIRST_EVALUATION_GROUP}
    assert set(kept.values()) == {"scored"}
    assert world.ledger.db.execute("SELECT COUNT(*) FROM payloads").fetchone()[0] == 3


def evaluate(world: World, rollout: Rollout, reward: Reward, step: int) -> None:
    """Make one evaluation from its beginning to its result."""
    world.begin_evaluation(step)
    rollout.hold(step)
    for lease in rollout.lease(8):
        if lease.HasField("pinned_version"):
            rollout.finish(lease)
    for task in reward.tasks():
        reward.score(task, [1.0] * world.spec.grpo.val_samples_per_prompt)


def test_several_completions_of_a_prompt(make_world: MakeWorld) -> None:
    world = make_world(grpo=EVAL | {"val_samples_per_prompt": 3})
    world.begin_evaluation(0)
    rollout, reward = Rollout(world), Reward(world)
    leases = rollout.lease(7)
    measured = [lease for lease in leases if lease.HasField("pinned_version")]
    assert [lease.num_generations for lease in measured] == [3, 3]  # room for seven samples
    for lease in [*measured, *rollout.lease(1)]:
        assert rollout.finish(lease) == COMMITTED
    for task, values in zip(reward.tasks(), ([1, 0, 0], [0, 0, 0], [1, 1, 1]), strict=True):
        assert reward.score(task, [float(value) for value in values]) == COMMITTED
    (result,) = world.kinds("evaluated")
    assert (result["prompts"], result["samples"]) == (3, 9)
    assert result["reward"] == pytest.approx(4 / 9)
    assert result["pass@3/exact_match"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("logger", "kept"),
    [({}, [0, 1, 2, 3]), ({"keep_evaluations": 1}, [0, 3]), ({"keep_evaluations": 0}, []), ({"keep_samples": False}, [])],
)  # fmt: skip
def test_the_newest_evaluations_and_the_first_are_kept(
    make_world: MakeWorld, logger: dict[str, object], kept: list[int]
) -> None:
    world = make_world(grpo=EVAL, logger=logger)
    world.check = False  # nothing was trained up to those steps
    rollout, reward = Rollout(world), Reward(world)
    for step in range(4):
        evaluate(world, rollout, reward, step)
    assert len(world.kinds("evaluated")) == 4
    classes = world.ledger.db.execute("SELECT DISTINCT class FROM groups WHERE class != 'train' ORDER BY class")
    assert [row["class"] for row in classes] == [f"eval:{step}" for step in kept]
    payloads = world.ledger.db.execute("SELECT COUNT(*) FROM payloads").fetchone()[0]
    assert payloads == 3 * len(kept)


def test_completions_of_an_evaluation_are_read_back(make_world: MakeWorld) -> None:
    world = make_world(grpo=EVAL, logger={"keep_evaluations": 1})
    world.check = False  # nothing was trained up to those steps
    rollout, reward = Rollout(world), Reward(world)
    for step in range(3):
        evaluate(world, rollout, reward, step)
    records = records_in(world.ledger)
    newest = list(records.groups(world.run_id, newest_evaluation=True))
    assert [(group["step"], len(group["completions"])) for group in newest] == [(2, 1)] * 3
    assert newest[0]["completions"][0]["rewards"] == {"exact_match": 1.0}
    assert next(records.groups(world.run_id, evaluated_version=0))["step"] == 0
    with pytest.raises(NotFound, match=r"samples of version 1 were not kept .* kept versions: 0, 2"):
        list(records.groups(world.run_id, evaluated_version=1))
    with pytest.raises(NotFound, match="no evaluation of version 7; evaluated versions: 0, 1, 2"):
        list(records.groups(world.run_id, evaluated_version=7))


def test_kept_completions_are_verified(make_world: MakeWorld) -> None:
    world = make_world(grpo=EVAL)
    world.check = False  # damaged on purpose
    evaluate(world, Rollout(world), Reward(world), 0)
    report = verify(world.ledger, world.run_id)
    assert (report.problems, report.facts["payloads"]) == ([], 3)
    world.restart()  # what was just written would not be read from the disk
    world.ledger.db.execute(
        "UPDATE payloads SET arrays_crc = arrays_crc + 1 WHERE group_id = ?", (FIRST_EVALUATION_GROUP,)
    )
    world.ledger.db.execute("DELETE FROM payloads WHERE group_id = ?", (FIRST_EVALUATION_GROUP + 1,))
    damaged, missing = verify(world.ledger, world.run_id).problems
    assert damaged.startswith(f"group {FIRST_EVALUATION_GROUP}: its arrays")
    assert missing == f"group {FIRST_EVALUATION_GROUP + 1}: the group is scored, but its arrays are not stored"


def test_a_damaged_completion_of_an_ended_evaluation_is_dropped(make_world: MakeWorld) -> None:
    world = make_world(grpo=EVAL)
    evaluate(world, Rollout(world), Reward(world), 0)
    row = world.ledger.db.execute("SELECT segment, start FROM payloads").fetchone()
    damaged = DamagedRecord("its checksum differs", row["segment"], row["start"])
    with world.ledger.transaction():
        selection.handle_damaged(world.exchange, world.run, damaged)
    states = [state for group_id, state in world.states().items() if group_id >= FIRST_EVALUATION_GROUP]
    assert sorted(states) == ["dropped", "scored", "scored"]
    assert Rollout(world).lease(1)[0].group_id < FIRST_EVALUATION_GROUP


def test_only_the_pinned_worker_and_only_a_version_that_is_new_enough(make_world: MakeWorld) -> None:
    world = make_evaluation(make_world, step=2)
    world.check = False  # nothing was trained up to that step
    old, first, second = Rollout(world, "old", 1), Rollout(world, "first", 2), Rollout(world, "second", 4)
    assert not [lease for lease in old.lease(2) if lease.HasField("pinned_version")]
    assert [lease.HasField("pinned_version") for lease in first.lease(1)] == [True]
    assert not [lease for lease in second.lease(2) if lease.HasField("pinned_version")]


def test_tokens_of_another_version_are_generated_again(make_world: MakeWorld) -> None:
    world = make_evaluation(make_world)
    rollout = Rollout(world)
    (lease,) = rollout.lease(1)
    rollout.completions = lambda lease, length=4: [make_completion(Version(1, 1), 4, 0)]  # type: ignore[method-assign]
    assert rollout.finish(lease) == STALE
    assert world.states()[lease.group_id] == "admitted"
    (again,) = rollout.lease(1)
    assert (again.group_id, again.attempt) == (lease.group_id, 2)


def test_an_evaluation_has_one_completion_per_prompt(make_world: MakeWorld) -> None:
    world = make_evaluation(make_world)
    rollout = Rollout(world)
    (lease,) = rollout.lease(1)
    two = [make_completion(Version(1, 0), 4, seed) for seed in (0, 1)]
    rollout.completions = lambda lease, length=4: two  # type: ignore[method-assign]
    assert rollout.finish(lease) == INVALID
    assert world.states()[lease.group_id] == "leased"


def test_when_the_pinned_worker_leaves_another_starts_anew(make_world: MakeWorld) -> None:
    world = make_evaluation(make_world)
    first, reward = Rollout(world, "first", step=0), Reward(world)
    leases = first.lease(3)
    first.finish(leases[0])
    (task,) = reward.tasks()
    reward.score(task, [1.0])
    first.finish(leases[1])
    (held,) = reward.tasks()
    world.release("first")
    assert evaluation.pinned_member(world.exchange, world.run) is None
    second = Rollout(world, "second", step=1)
    again = second.lease(3)
    assert [lease.pinned_version.step for lease in again] == [1, 1, 1]
    assert first.finish(leases[2]) == STALE  # version 0 is not under evaluation now
    assert reward.score(held, [1.0]) != COMMITTED  # nor is its text
    for lease in again:
        second.finish(lease)
    for task in reward.tasks():
        assert reward.score(task, [0.25]) == COMMITTED
    (result,) = world.kinds("evaluated")
    assert (result["step"], result["reward"], result["samples"]) == (1, 0.25, 3)


def test_a_worker_is_pinned_until_the_last_group_is_generated_and_scoring_outlives_it(
    make_world: MakeWorld,
) -> None:
    world = make_evaluation(make_world)
    rollout, reward = Rollout(world), Reward(world)
    leases = rollout.lease(3)
    for lease in leases[:-1]:
        assert rollout.finish(lease) == COMMITTED
        assert evaluation.pinned_member(world.exchange, world.run) == "rollout"
    assert rollout.finish(leases[-1]) == COMMITTED
    assert evaluation.pinned_member(world.exchange, world.run) is None
    assert world.kinds("unpinned") == [{"member_id": "rollout"}]
    rollout.hold(1)
    assert not [lease for lease in rollout.lease(2) if lease.HasField("pinned_version")]
    world.release("rollout")
    for task in reward.tasks():
        assert reward.score(task, [1.0]) == COMMITTED
    (result,) = world.kinds("evaluated")
    assert (result["step"], result["samples"]) == (0, 3)


def test_groups_to_train_are_scored_between_those_of_an_evaluation(make_world: MakeWorld) -> None:
    world = make_evaluation(make_world)
    rollout, reward = Rollout(world), Reward(world)
    for lease in rollout.lease(64):
        assert rollout.finish(lease) == COMMITTED
    kinds = ["eval" if task.group_id >= FIRST_EVALUATION_GROUP else "train" for task in reward.tasks(64)]
    before = [kinds[:place].count("train") for place, kind in enumerate(kinds) if kind == "eval"]
    trained = kinds.count("train")
    assert trained >= 4
    # Slots 0, 3 and 6; of two groups in one slot the one to train is first.
    assert before == [min(1 + 3 * index, trained) for index in range(3)]


def test_a_last_group_that_is_dropped_unpins_the_worker_too(make_world: MakeWorld) -> None:
    world = make_evaluation(make_world)
    rollout = Rollout(world)
    first, *others = rollout.lease(3)
    for lease in others:
        rollout.finish(lease)
    assert rollout.return_lease(first, error="too long").reply.status == COMMITTED
    assert evaluation.pinned_member(world.exchange, world.run) is None
    assert world.kinds("unpinned") == [{"member_id": "rollout"}]


def test_a_group_whose_arrays_are_lost_while_it_is_scored_starts_the_evaluation_anew(
    make_world: MakeWorld,
) -> None:
    world = make_evaluation(make_world)
    rollout, reward = Rollout(world), Reward(world)
    for lease in rollout.lease(3):
        rollout.finish(lease)
    rollout.hold(1)
    row = world.ledger.db.execute("SELECT segment, start FROM payloads").fetchone()
    with world.ledger.transaction():
        damaged = DamagedRecord("its checksum differs", row["segment"], row["start"])
        selection.handle_damaged(world.exchange, world.run, damaged)
    again = rollout.lease(3)
    assert [lease.pinned_version.step for lease in again] == [1, 1, 1]
    for lease in again:
        rollout.finish(lease)
    for task in reward.tasks():
        reward.score(task, [0.5])
    (result,) = world.kinds("evaluated")
    assert (result["step"], result["reward"], result["samples"]) == (1, 0.5, 3)


def test_a_pinned_worker_with_a_newer_version_starts_anew(make_world: MakeWorld) -> None:
    world = make_evaluation(make_world)
    rollout = Rollout(world, step=0)
    leases = rollout.lease(2)
    rollout.finish(leases[0])
    rollout.hold(1)
    again = rollout.lease(3)
    assert len(again) == 2  # the other one stays leased until the tokens of the old version are refused
    rollout.hold(0)
    assert rollout.finish(leases[1]) == STALE
    rollout.hold(1)
    again += rollout.lease(1)
    assert [lease.attempt for lease in again] == [2, 1, 2]
    assert {lease.group_id for lease in again} == {FIRST_EVALUATION_GROUP + index for index in range(3)}
    assert {lease.pinned_version.step for lease in again} == {1}


def test_failed_samples_are_counted_and_end_the_evaluation(make_world: MakeWorld) -> None:
    world = make_evaluation(make_world)
    rollout, reward = Rollout(world), Reward(world)
    leases = rollout.lease(3)
    assert rollout.return_lease(leases[0], error="too long").reply.status == COMMITTED
    for lease in leases[1:]:
        rollout.finish(lease)
    good, bad = reward.tasks()
    reward.score(good, [1.0])
    for _ in range(3):
        reward.fail(bad)
        bad = next(iter(reward.tasks()), bad)
    (result,) = world.kinds("evaluated")
    assert (result["samples"], result["failed"], result["reward"]) == (1, 2, 1.0)
    assert [name for name in world.counters if "dropped" in name] == []


def test_evaluation_goes_on_while_paused_and_after_the_last_step(make_world: MakeWorld) -> None:
    world = make_world(grpo=EVAL | {"max_num_steps": 1})
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    fill(rollout, reward, 2)
    learner.train(0)
    world.begin_evaluation(1)
    world.begin_evaluation(1)  # requested twice, done once
    world.set_state("paused")
    rollout.hold(1)
    for lease in rollout.lease(8):
        rollout.finish(lease)
    for task in reward.tasks():
        reward.score(task, [1.0])
    assert len(world.kinds("evaluated")) == 1


def test_the_learner_waits_for_no_part_of_an_evaluation(make_world: MakeWorld) -> None:
    world = make_evaluation(make_world)
    pinned, other = Rollout(world, "pinned"), Rollout(world, "other")
    reward, learner = Reward(world), Learner(world)
    leases = pinned.lease(3)
    assert all(lease.HasField("pinned_version") for lease in leases)
    for step in range(3):
        other.hold(step)
        trained = fill(other, reward, world.run.batch_size)
        assert learner.train(step) == [trained]
        assert max(trained) < FIRST_EVALUATION_GROUP
    assert not world.kinds("evaluated")  # its worker has submitted nothing until now
    for lease in leases:
        assert pinned.finish(lease) == COMMITTED
    for task in reward.tasks():
        reward.score(task, [1.0])
    (result,) = world.kinds("evaluated")
    assert (result["step"], result["samples"]) == (0, 3)


def test_the_end_of_a_run_forgets_an_evaluation(make_world: MakeWorld) -> None:
    world = make_evaluation(make_world)
    rollout = Rollout(world)
    rollout.finish(rollout.lease(3)[0])
    world.end()
    assert [g for g in world.states() if g >= FIRST_EVALUATION_GROUP] == []
    assert world.ledger.db.execute("SELECT COUNT(*) FROM payloads").fetchone()[0] == 0


def test_a_pinned_worker_that_is_gone_at_a_restart_is_expected_back(make_world: MakeWorld) -> None:
    world = make_evaluation(make_world)
    rollout, reward = Rollout(world), Reward(world)
    rollout.finish(rollout.lease(1)[0])
    (task,) = reward.tasks()
    reward.score(task, [1.0])
    world.restart()
    assert [member_id for member_id, _ in world.ledger.holders()] == ["rollout"]


def test_a_pinned_worker_that_comes_back_gets_nothing_twice_and_may_send_again_what_was_committed(
    make_world: MakeWorld,
) -> None:
    world = make_world(grpo=EVAL)
    world.begin_evaluation(0)
    worker = Rollout(world)
    held = worker.lease(3)
    assert worker.finish(held[2]) == COMMITTED
    world.release(worker.member_id)
    worker = Rollout(world)
    ids = [lease.group_id for lease in held]
    asked = pb.LeaseRequest(room=1, held=pb.Held(group_ids=ids))
    given = world.send(pb.ExchangeRequest(member_id=worker.member_id, lease=asked)).reply.lease.leases
    assert not {lease.group_id for lease in given} & set(ids[:2])
    assert [worker.finish(lease) for lease in held] == [COMMITTED] * 3


def test_an_evaluation_whose_prompts_cannot_be_read_is_left_out(make_world: MakeWorld) -> None:
    world = make_world(grpo={"val_at_start": True})
    validation = Path(world.spec.data.validation)
    rows = validation.read_bytes()
    validation.write_bytes(b"")
    world.begin_evaluation(0)
    (notice,) = world.exchange.notices.take()
    assert notice.content["message"].startswith(
        "the evaluation of version 0 is skipped, because its prompts cannot be read: row 0 of "
    )
    assert Rollout(world).lease(2) != []
    validation.write_bytes(rows)
    world.begin_evaluation(0)
    assert sum(row["class"] == "eval:0" for row in world.ledger.db.execute("SELECT class FROM groups")) == 3
