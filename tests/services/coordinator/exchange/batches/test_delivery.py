"""Batches and receipts: order, age, waiting for late groups, replay, and receipts that a rank may not send."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import xxhash
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
    prune,
)

from paceline.services.coordinator.ledger.tables.audit_heads import AuditHead
from paceline.services.coordinator.ledger.tables.batches import extend_chain
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import decode_group


def score_all(reward: Reward) -> None:
    for task in reward.tasks():
        assert reward.score(task) == COMMITTED


def test_synchronous_leases_need_the_very_version_of_the_step(make_world: MakeWorld) -> None:
    world = make_world(async_grpo={"max_trajectory_age_steps": 0})
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    assert fill(rollout, reward, 8) == [0, 1]  # B and no more
    assert rollout.lease(8) == []
    assert learner.train(0) == [[0, 1]]
    assert rollout.lease(8) == []  # version 0, but the next groups are for step 1
    rollout.hold(1)
    assert [(lease.group_id, lease.step) for lease in rollout.lease(8)] == [(2, 1), (3, 1)]


def test_a_version_is_enough_for_eta_steps_ahead(make_world: MakeWorld) -> None:
    world = make_world(async_grpo={"max_trajectory_age_steps": 2})
    rollout = Rollout(world, step=0)
    assert [lease.step for lease in rollout.lease(12)] == [0, 0, 1, 1, 2, 2]
    assert rollout.lease(2) == []


def test_ready_first_takes_what_is_complete_oldest_first(world: World) -> None:
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    leases = rollout.lease(8)
    for index in (3, 1):
        rollout.finish(leases[index])
    score_all(reward)
    assert learner.train(0) == [[1, 3]]  # at step 1 group 0 and 2 will have age 1 = η: no reason to wait
    rollout.finish(leases[2])
    rollout.finish(leases[0])
    score_all(reward)
    assert learner.train(1) == [[0, 2]]


def make_late_group(make_world: MakeWorld, **async_grpo: object) -> tuple[World, Rollout, Reward, Learner, pb.Lease]:
    """Make group 0 late: η = 1, step 1 is due, groups 1 and 2 are trained, 3 and 4 scored, and 0 is still generated
    under version 0."""
    world = make_world(async_grpo={"max_trajectory_age_steps": 1, **async_grpo}, grpo={"max_num_steps": 9})
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    leases = rollout.lease(8)
    for lease in leases[1:3]:
        rollout.finish(lease)
    score_all(reward)
    assert learner.train(0) == [[1, 2]]
    rollout.finish(leases[3])
    rollout.hold(1)
    fill(rollout, reward, 1)
    assert world.states() == {
        0: "leased",
        1: "trained",
        2: "trained",
        3: "scored",
        4: "scored",
        5: "admitted",
    }
    return world, rollout, reward, learner, leases[0]


def test_a_late_group_that_comes_in_time_is_in_the_batch(make_world: MakeWorld) -> None:
    world, rollout, reward, learner, late = make_late_group(make_world, late_wait_s=30)
    assert learner.part(1) is None
    world.now_s += 29.9
    assert learner.part(1) is None
    rollout.hold(0)
    rollout.finish(late)
    assert learner.part(1) is None  # it has no scores yet, so the batch still waits for it
    score_all(reward)
    assert learner.train(1) == [[0, 3]]


def test_the_batch_goes_on_without_a_group_that_is_too_late(make_world: MakeWorld) -> None:
    world, rollout, reward, learner, late = make_late_group(make_world, late_wait_s=30, hard_max_age=2)
    assert learner.part(1) is None
    world.now_s += 30.0
    assert learner.train(1) == [[3, 4]]
    assert json.loads(world.ledger.db.execute("SELECT metrics_json FROM batches WHERE step = 1").fetchone()[0])[
        "learner_wait_s"
    ] == pytest.approx(30.0)
    rollout.hold(0)
    rollout.finish(late)
    score_all(reward)
    rollout.hold(2)
    fill(rollout, reward, 2)
    assert learner.train(2) == [[0, 5]]  # age 2: past η, within hard_max_age
    assert world.kinds("step")[2]["metrics"]["age/2"] == 1.0


def test_no_batch_waits_for_a_group_whose_worker_may_be_gone(make_world: MakeWorld) -> None:
    world, rollout, reward, learner, late = make_late_group(make_world, late_wait_s=30, hard_max_age=2)
    assert learner.part(1) is None
    world.exchange.workers.suspected.add(rollout.member_id)
    assert learner.train(1) == [[3, 4]]
    assert world.states()[0] == "leased"
    world.exchange.workers.suspected.clear()  # it was only slow
    rollout.hold(0)
    rollout.finish(late)
    score_all(reward)
    rollout.hold(2)
    fill(rollout, reward, 2)
    assert learner.train(2) == [[0, 5]]


def test_a_group_that_never_comes_holds_up_one_step_only(make_world: MakeWorld) -> None:
    world = make_world(async_grpo={"late_wait_s": 30, "hard_max_age": 2}, grpo={"max_num_steps": 9})
    slow, rollout, reward, learner = Rollout(world, "slow"), Rollout(world), Reward(world), Learner(world)
    (never,) = slow.lease(2)  # its worker sends heartbeats but no result
    waits = {}
    for step in range(6):
        rollout.hold(step)
        fill(rollout, reward, 4)
        asked_s = world.now_s
        while learner.part(step) is None:
            world.now_s += 1.0
            assert world.now_s < asked_s + 31.0
        waits[step] = world.now_s - asked_s
        assert learner.train(step) is not None
    assert waits == {0: 0.0, 1: 30.0, 2: 0.0, 3: 0.0, 4: 0.0, 5: 0.0}
    assert world.group(never.group_id)["state"] == "leased"


def test_beyond_the_hard_limit_a_late_group_is_dropped_as_stale(make_world: MakeWorld) -> None:
    world, rollout, reward, learner, late = make_late_group(make_world, late_wait_s=0, hard_max_age=1)
    assert learner.train(1) == [[3, 4]]
    rollout.hold(0)
    assert rollout.finish(late) == COMMITTED
    score_all(reward)
    rollout.hold(2)
    assert fill(rollout, reward, 1) == [5]
    assert learner.part(2) is None  # group 0 was dropped, so one is missing
    assert world.states()[0] == "dropped"
    assert world.counters["groups:dropped:stale"] == 1
    assert world.counters["tokens:dropped:stale"] == 9
    (replacement,) = fill(rollout, reward, 1)
    assert world.group(replacement)["slot"] == 0, "it inherits the place of group 0, so it comes first"
    assert learner.train(2) == [[replacement, 5]]


def test_in_order_trains_every_group_in_its_step(make_world: MakeWorld) -> None:
    world = make_world(async_grpo={"order": "in_order"})
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    leases = rollout.lease(8)
    assert [lease.step for lease in leases] == [0, 0, 1, 1]
    for lease in leases[1:]:
        rollout.finish(lease)
    score_all(reward)
    world.now_s += 1e6
    assert learner.part(0) is None  # three are scored, but not the one in the first slot
    rollout.return_lease(leases[0], error="bad")
    assert fill(rollout, reward, 1) == [4]
    assert world.group(4)["slot"] == 0
    assert learner.train(0) == [[4, 1]]
    assert learner.train(1) == [[2, 3]]
    assert rollout.lease(8) == []  # slots 4 to 7 are for steps 2 and 3: version 0 is too old
    rollout.hold(1)
    assert [lease.step for lease in rollout.lease(8)] == [2, 2]


@pytest.mark.parametrize("keep_samples", [True, False])
def test_a_batch_never_changes_and_is_served_again(make_world: MakeWorld, keep_samples: bool) -> None:
    world = make_world(logger={"keep_samples": keep_samples})
    rollout, reward = Rollout(world), Reward(world)
    learner = Learner(world, world_size=2)
    fill(rollout, reward, 4)
    first = [learner.ask(0, rank) for rank in (0, 1)]
    fill(rollout, reward, 4)
    again = [learner.ask(0, rank) for rank in (0, 1)]
    assert [o.payloads for o in first] == [o.payloads for o in again]
    assert [o.reply.batch for o in first] == [o.reply.batch for o in again]
    assert learner.train(0) == [[0], [1]]
    rollout.hold(1)
    fill(rollout, reward, 4)
    assert learner.train(1) == [[2], [3]]
    world.restart()
    replay = Learner(world)  # another session, another world size: the same groups in the same order
    outcome = replay.ask(0)
    assert [group.group_id for group in outcome.reply.batch.groups] == [0, 1]
    assert outcome.payloads == [first[0].payloads[0], first[1].payloads[0]]
    assert outcome.reply.batch.chain == first[0].reply.batch.chain
    for group, payload in zip(outcome.reply.batch.groups, outcome.payloads, strict=True):
        assert decode_group(group.group_id, payload, list(group.rewards)).digest() == group.digest


def test_the_chain_covers_everything_before_it() -> None:
    first = extend_chain("", 0, "a")
    assert first == hashlib.sha256(b"/0/a").hexdigest()
    assert extend_chain(first, 1, "b") == hashlib.sha256(f"{first}/1/b".encode()).hexdigest()
    assert len({first, extend_chain("x", 0, "a"), extend_chain("", 1, "a"), extend_chain("", 0, "b")}) == 4


def test_a_replay_changes_nothing_until_it_is_past_the_newest_step(world: World) -> None:
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    for step in range(2):
        rollout.hold(step)
        fill(rollout, reward, 4)
        learner.train(step)
    chain, books = world.row["chain"], world.ledger.token_books(world.run_id)
    second = Learner(world)
    assert learner.ask(2).reply.status == STALE  # a late request of the old session
    assert learner.receipt(1, 0, []).reply.status == STALE
    assert [second.train(0), second.train(1)] == [[[0, 1]], [[2, 3]]]
    assert (world.row["chain"], world.ledger.token_books(world.run_id)) == (chain, books)
    assert world.row["next_step"] == 2
    assert [content["step"] for content in world.kinds("step")] == [0, 1]
    rollout.hold(2)
    fill(rollout, reward, 4)
    assert second.train(2) == [[4, 5]]


def test_a_session_that_dies_between_the_receipts_of_its_ranks(world: World) -> None:
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world, world_size=2)
    fill(rollout, reward, 4)
    part = learner.part(0, 0)
    assert part is not None
    assert learner.receipt(0, 0, part).reply.status == COMMITTED
    assert world.row["next_step"] == 0
    assert learner.part(1, 0) is None  # no rank gets a step before the previous one is trained
    second = Learner(world, world_size=2)
    other = second.part(0, 1)
    assert other is not None
    second.receipt(0, 1, other)
    assert world.row["next_step"] == 0  # receipts of two sessions are not added up
    assert second.train(0) == [[0], [1]]
    assert world.row["next_step"] == 1


def test_a_receipt_sent_again_counts_once(world: World) -> None:
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    fill(rollout, reward, 2)
    part = learner.part(0)
    assert part is not None
    for _ in range(2):
        assert learner.receipt(0, 0, part).reply.status == COMMITTED
    assert world.counters["groups:trained"] == 2
    assert world.row["next_step"] == 1


def test_the_answer_to_a_receipt_names_the_newest_record_of_the_audit_log(world: World) -> None:
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    fill(rollout, reward, 2)
    part = learner.part(0)
    assert part is not None
    assert not learner.receipt(0, 0, part).reply.HasField("receipt")  # there is none
    with world.ledger.transaction():
        world.ledger.audit_heads.put(1, AuditHead(7, "ab"))
    head = learner.receipt(0, 0, part).reply.receipt.audit_head
    assert (head.sequence, head.hash) == (7, "ab")
    world.check = False  # the log itself is not there


@pytest.mark.parametrize("wrong", ["order", "missing", "foreign", "digest", "scores", "tokens"])
def test_a_receipt_for_something_else_is_refused_and_the_run_goes_on(world: World, wrong: str) -> None:
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    fill(rollout, reward, 2)
    part = learner.part(0)
    assert part is not None
    tokens = 18
    if wrong == "order":
        part.reverse()
    elif wrong == "missing":
        del part[0]
    elif wrong == "foreign":
        part[0].group_id = 3
    elif wrong == "digest":
        part[0].digest = "0" * 64
    elif wrong == "scores":
        part[0].scores_digest = part[1].scores_digest[::-1]
    else:
        tokens = 17
    reply = learner.receipt(0, 0, part, tokens).reply
    assert reply.status == INVALID
    assert "the receipt of step 0 does not agree with the batch: rank 0 trained" in reply.message
    assert world.kinds("failed") == []
    assert world.row["next_step"] == 0
    assert Learner(world).train(0) == [[0, 1]]


def test_digests_of_batches_cover_what_was_said_of_the_groups(world: World) -> None:
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    fill(rollout, reward, 2)
    learner.train(0)
    rows = [world.group(0), world.group(1)]
    rewards = np.array([[0.0], [1.0]], np.float32)
    digests = [xxhash.xxh3_128(rewards.tobytes()).hexdigest()] * 2
    assert [row["scores_digest"] for row in rows] == digests
    (batch,) = world.ledger.db.execute("SELECT * FROM batches").fetchall()
    assert batch["with_scores"] == 1
    content = [[row["group_id"], row["digest"], row["scores_digest"]] for row in rows]
    assert batch["digest"] == hashlib.sha256(json.dumps(content).encode()).hexdigest()
    (receipt,) = world.ledger.db.execute("SELECT * FROM receipts").fetchall()
    assert json.loads(receipt["scores_digests"]) == digests
    assert [row["scorers"] for row in rows] == ["reward", "reward"]


def test_ranks_and_steps_that_cannot_be(world: World) -> None:
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    fill(rollout, reward, 2)
    before = world.dump()
    assert learner.ask(0, rank=1).reply.status == INVALID
    assert learner.receipt(0, 0, []).reply.status == INVALID  # no batch was fixed
    assert learner.receipt(5, 0, []).reply.status == INVALID
    learner.world_size = 0
    assert learner.ask(0).reply.status == INVALID
    assert learner.receipt(0, 0, []).reply.status == INVALID
    assert world.dump() == before
    assert world.kinds("failed") == []


def test_receipts_of_two_world_sizes_do_not_make_a_step(world: World) -> None:
    rollout, reward = Rollout(world), Reward(world)
    fill(rollout, reward, 2)
    learner = Learner(world, world_size=3)
    parts = [learner.part(0, rank) for rank in range(3)]
    for rank in (1, 2):
        assert learner.receipt(0, rank, parts[rank] or []).reply.status == COMMITTED
    two = Learner(world, world_size=2, session=learner.session)
    part = two.part(0, 0)
    assert part is not None
    assert two.receipt(0, 0, part).reply.status == COMMITTED
    assert world.row["next_step"] == 0  # 0 of 2, 1 of 3 and 2 of 3 are no full set


def test_ranks_without_groups_train_too(make_world: MakeWorld) -> None:
    world = make_world()
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world, world_size=4)
    fill(rollout, reward, 2)
    assert learner.train(0) == [[0], [1], [], []]


def test_pruning_keeps_what_a_checkpoint_may_ask_for(make_world: MakeWorld) -> None:
    world = make_world(check=False, logger={"keep_samples": False})  # its checkpoint is only a row
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    for step in range(3):
        rollout.hold(step)
        fill(rollout, reward, 4)
        learner.train(step)
        if step == 1:
            with world.ledger.transaction():
                world.ledger.db.execute(
                    "INSERT INTO checkpoints (run_id, session, step, path, sha256, chain) VALUES (?, 1, 2, '/no/such/folder', '', ?)",
                    (world.run_id, world.row["chain"]),
                )
    assert prune(world) == 2
    assert Learner(world).train(2) == [[4, 5]]
    outcome = Learner(world).ask(1)
    assert outcome.reply.status == INVALID
    assert "before the oldest checkpoint" in outcome.reply.message


def test_a_supervised_run_counts_steps_only(make_world: MakeWorld) -> None:
    world = make_world(algorithm="sft", sft={"max_num_steps": 2})
    learner = Learner(world, world_size=2)
    for step in range(2):
        assert learner.part(step + 1) is None
        for rank in range(2):
            assert learner.part(step, rank) == []
            assert learner.receipt(step, rank, [], tokens=100 + rank).reply.status == COMMITTED
    assert world.row["next_step"] == 2
    assert learner.part(2) is None
    # The learner dies after the last step and before its export: it gets every step again.
    assert Learner(world).part(0) == []
    assert Rollout(world).lease(8) == []
