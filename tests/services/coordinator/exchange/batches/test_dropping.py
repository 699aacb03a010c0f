"""`paceline drop`: groups leave the batch that is due, which gets a further link of the chain."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from exchange_drivers import INVALID, Learner, MakeWorld, Reward, Rollout, World, fill

from paceline.errors import Conflict, InvalidInput
from paceline.services.coordinator.exchange.batches import selection
from paceline.services.coordinator.exchange.run_state import RunState, Training
from paceline.services.coordinator.ledger.tables.batches import batch_digest, extend_chain

HELD = Training(3, 7, 1)


def drop(world: World, *group_ids: int) -> None:
    with world.ledger.transaction():
        selection.drop_from_batch(world.exchange, world.run, group_ids, world.now_s)
    world.notices += world.exchange.notices.take()


def test_the_next_scored_group_takes_the_place_at_once(world: World) -> None:
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    fill(rollout, reward, 4)
    old = learner.part(0)
    assert old is not None
    world.set_state("paused")
    drop(world, 1)
    assert world.group(1)["reason"] == "by_request"
    assert world.counters["groups:dropped:by_request"] == 1
    assert world.row["dropped_in_a_row"] == 0
    (replaced,) = world.ledger.db.execute("SELECT * FROM replaced_batches").fetchall()
    (batch,) = world.ledger.db.execute("SELECT * FROM batches").fetchall()
    assert (replaced["reason"], json.loads(replaced["dropped_ids"])) == ("by_request", [1])
    assert replaced["chain"] == extend_chain("", 0, replaced["digest"])
    digest = batch_digest([world.group(0), world.group(2)])
    assert batch["chain"] == extend_chain(replaced["chain"], 0, digest)
    assert "groups [1] of step 0 were dropped by request; the batch is fixed again" in str(world.kinds("warning"))
    world.set_state("running")
    assert learner.receipt(0, 0, old).reply.status == INVALID  # it had the earlier part already
    assert world.row["next_step"] == 0
    assert Learner(world).train(0) == [[0, 2]]
    assert fill(rollout, reward, 1) == [4]


def test_a_run_whose_workers_another_run_has_loses_its_groups_too(world: World) -> None:
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    fill(rollout, reward, 4)
    assert learner.part(0) is not None
    world.set_state("paused")
    exchange, mine = world.exchange, world.exchange.active
    other = replace(world.run, run_id="other-1", state=RunState())
    other.state.reserve(1, "r-2")
    other.state.note_training(HELD)
    exchange.activate(other)
    drop(world, 1)
    assert (other.state.reserved, other.state.training) == ({1: "r-2"}, HELD), "they are the other run's"
    assert exchange.notices.take() == []
    (event,) = world.ledger.rows("SELECT json FROM events WHERE run_id = ? AND kind = 'warning'", (world.run.run_id,))
    assert "groups [1] of step 0 were dropped by request; the batch is fixed again when the run has w" in event["json"]
    exchange.active = mine
    world.set_state("running")
    assert Learner(world).train(0) == [[0, 2]]


@pytest.mark.parametrize("order", ["ready_first", "in_order"])
def test_the_batch_is_fixed_anew_once_enough_groups_are_scored(make_world: MakeWorld, order: str) -> None:
    world = make_world(async_grpo={"order": order})
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    fill(rollout, reward, 2)
    assert learner.part(0) is not None
    world.set_state("paused")
    drop(world, 0)
    assert "when enough groups are scored" in str(world.kinds("warning"))
    with pytest.raises(Conflict, match="has no batch that is fixed and not trained; its next step is 0"):
        drop(world, 1)
    world.set_state("running")
    assert learner.part(0) is None
    while learner.part(0) is None:
        assert fill(rollout, reward, 1)
    trained = learner.train(0)
    assert trained is not None
    assert 1 in trained[0]
    assert 0 not in trained[0]
    (batch,) = world.ledger.db.execute("SELECT revision FROM batches").fetchall()
    assert batch["revision"] == 1


def test_two_revisions_of_one_step(world: World) -> None:
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    fill(rollout, reward, 4)
    learner.part(0)
    world.set_state("paused")
    drop(world, 0)
    drop(world, 1, 2)  # only group 3 is left
    world.set_state("running")
    while learner.part(0) is None:
        assert fill(rollout, reward, 1)
    assert learner.train(0) is not None
    rows = world.ledger.db.execute("SELECT * FROM replaced_batches ORDER BY revision").fetchall()
    assert [row["revision"] for row in rows] == [0, 1]
    assert rows[1]["chain"] == extend_chain(rows[0]["chain"], 0, rows[1]["digest"])


def test_receipts_of_ranks_whose_session_ended_go_with_the_replaced_batch(world: World) -> None:
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world, world_size=2)
    fill(rollout, reward, 4)
    part = learner.part(0, 0)
    assert part is not None
    learner.receipt(0, 0, part)
    world.set_state("paused")
    drop(world, 0)
    assert world.ledger.db.execute("SELECT COUNT(*) FROM receipts").fetchone()[0] == 0


def test_what_cannot_be_dropped(world: World) -> None:
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    fill(rollout, reward, 4)
    before = world.dump()
    with pytest.raises(Conflict, match="has no batch that is fixed"):
        drop(world, 0)
    assert world.dump() == before
    learner.train(0)
    learner.part(1)
    before = world.dump()
    with pytest.raises(InvalidInput, match=r"groups \[0, 77\] are not in the batch of step 1, which has \[2, 3\]"):
        drop(world, 0, 77)
    with pytest.raises(InvalidInput, match="100000 groups are named, but a batch has only 2"):
        drop(world, *range(100_000))
    with pytest.raises(InvalidInput, match="at least one group"):
        drop(world)
    assert world.dump() == before
