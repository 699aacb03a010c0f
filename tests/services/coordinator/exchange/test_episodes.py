"""Turns of episodes and ends of their lives, with real messages."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from episode_drivers import (
    ENVIRONMENT,
    EnvironmentWorker,
    make_turn,
    serving_rollout,
)
from exchange_drivers import COMMITTED, DUPLICATE, INVALID, STALE, Learner, MakeWorld, Reward, World

from paceline.groups import Version
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import CompletionArrays, decode_group

VERSION = Version(1, 0)


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return make_world(**ENVIRONMENT)


def books(world: World) -> dict[str, int]:
    """Return the token accounting after checking its balance."""
    found = world.ledger.token_books(world.run_id)
    assert found["generated"] == found["trained"] + found["dropped"] + found["live"]
    return found


def test_a_group_of_episodes_from_its_lease_to_trained(world: World) -> None:
    serving_rollout(world)
    worker, reward, learner = EnvironmentWorker(world), Reward(world), Learner(world)
    held, other = worker.lease(4)
    assert json.loads(held.lease.columns_json) == {"answer": int(json.loads(held.lease.prompt_json)[1:])}
    assert (held.lease.attempt, held.lease.num_generations, held.lease.pinned_member) == (1, 2, "")
    assert not held.lease.journal
    worker.play_all(held, VERSION)
    assert world.group(0)["tokens"] == 2 * 3 * 3
    assert books(world)["live"] == 18
    assert worker.finish(held) == COMMITTED
    row = world.group(0)
    assert (row["state"], row["tokens"], row["oldest_step"]) == ("generated", 18, 0)
    assert row["sequence_tokens"] == 2 * 3 * 5
    assert world.ledger.episodes.of_group(world.run_id, 0) == []
    worker.play_all(other, VERSION, turns=4)  # the fourth begins a row
    assert worker.finish(other) == COMMITTED
    for task in reward.tasks():
        assert reward.send(task, rewards=[0.0, 1.0], functions=["exact_match"]).reply.status == COMMITTED
    outcome = learner.ask(0)
    group = decode_group(1, outcome.payloads[1], list(outcome.reply.batch.groups[1].rewards))
    assert group.rows is not None
    assert group.rows.samples == (0, 0, 1, 1)
    assert group.digest() == outcome.reply.batch.groups[1].digest
    assert set(CompletionArrays.of(outcome.payloads[1]).samplers) == {"rollout-0", "rollout-1"}
    samplers = [[span.sampler for span in row.spans] for row in group.completions]
    assert samplers == [["rollout-0", "rollout-1", "rollout-0"], ["rollout-1"]] * 2
    assert learner.receipt(0, 0, outcome.reply.batch.groups).reply.status == COMMITTED
    assert books(world) == {"generated": 42, "trained": 42, "dropped": 0, "live": 0, "wasted": 0}


def test_the_next_holder_gets_the_journal_of_the_one_before(world: World) -> None:
    serving_rollout(world)
    first, second = EnvironmentWorker(world, "first"), EnvironmentWorker(world, "second")
    (held,) = first.lease(2)
    first.play(held, 0, VERSION, last=False)
    first.play(held, 0, VERSION, last=True)
    first.play(held, 1, VERSION, last=False)
    world.release("first", crashed=True)
    (again,) = second.lease(2)
    assert (again.lease.group_id, again.lease.attempt) == (held.lease.group_id, 2)
    assert [sample.finished for sample in again.samples] == [True, False]
    for before, after in zip(held.samples, again.samples, strict=True):
        assert [turn.encode() for turn in before.turns] == [turn.encode() for turn in after.turns]
    assert first.play(held, 1, VERSION, last=True).reply.status == STALE
    second.play(again, 1, VERSION, last=True)
    assert second.finish(again) == COMMITTED
    assert books(world)["live"] == 12
    assert second.finish(again) == DUPLICATE


def test_a_life_that_ends_drops_its_tokens_and_the_next_begins(world: World) -> None:
    serving_rollout(world)
    worker = EnvironmentWorker(world)
    (held,) = worker.lease(2)
    worker.play(held, 0, VERSION, last=False)
    worker.play(held, 1, VERSION, last=False)
    assert worker.end(held, 0).reply.status == COMMITTED
    assert worker.end(held, 0, "environment_failed").reply.status == COMMITTED
    assert world.group(0)["tokens"] == 3
    assert books(world) | {"dropped:restarted": 3, "dropped:environment_failed": 0, "live": 3} == books(world)
    assert worker.end(held, 0, life=1).reply.status == DUPLICATE
    world.release("environment")
    (again,) = EnvironmentWorker(world, "second").lease(2)
    assert (again.samples[0].life, again.samples[0].failures, again.samples[0].turns) == (3, 1, [])
    assert (again.samples[1].life, len(again.samples[1].turns)) == (1, 1)
    assert world.ledger.failures(world.run_id) == {"environment_failed": 1}


def test_a_removed_evaluation_leaves_no_turn_and_no_ended_life(make_world: MakeWorld) -> None:
    world = make_world(grpo={"val_at_start": True}, **ENVIRONMENT)
    world.begin_evaluation(0)
    serving_rollout(world)
    worker = EnvironmentWorker(world)
    held = worker.lease(1)[0]
    assert held.lease.HasField("pinned_version")
    worker.play(held, 0, VERSION, last=False)
    worker.end(held, 0)
    turn = worker.turn(held, 0, make_turn(VERSION, 1), life=2)
    assert turn.reply.status == COMMITTED
    with world.ledger.transaction():
        world.exchange.remove_groups(world.run_id, "eval:0")
    for table in ("episodes", "restarts"):
        assert world.ledger.rows(f"SELECT * FROM {table} WHERE run_id = ?", (world.run_id,)) == []


def test_a_sample_that_is_given_up_leaves_its_group(world: World) -> None:
    serving_rollout(world)
    worker = EnvironmentWorker(world)
    (held,) = worker.lease(2)
    worker.play(held, 0, VERSION, last=False)
    assert worker.end(held, 0, "environment_failed", give_up=True).reply.status == COMMITTED
    assert worker.play(held, 0, VERSION, last=False).reply.status == STALE
    worker.play_all(held, VERSION)
    assert worker.finish(held) == COMMITTED
    assert world.group(0)["tokens"] == 9
    assert books(world)["dropped:environment_failed"] == 3
    assert "was given up" in world.kinds("warning")[-1]["message"]


def test_a_group_of_which_every_sample_was_given_up_is_dropped(world: World) -> None:
    serving_rollout(world)
    worker = EnvironmentWorker(world)
    (held,) = worker.lease(2)
    worker.play(held, 0, VERSION, last=False)
    worker.end(held, 1, "environment_failed", give_up=True)
    assert world.group(0)["state"] == "leased"
    worker.end(held, 0, "environment_failed", give_up=True)
    row = world.group(0)
    assert (row["state"], row["reason"], row["tokens"]) == ("dropped", "environment_failed", 0)
    assert books(world)["dropped:environment_failed"] == 3
    assert worker.lease(2)[0].lease.group_id != 0


def test_turns_that_are_left_out_are_booked_apart(world: World) -> None:
    serving_rollout(world)
    worker = EnvironmentWorker(world)
    (held,) = worker.lease(2)
    worker.turn(held, 0, make_turn(VERSION, 1, 0, length=2))  # a title
    worker.turn(held, 0, make_turn(VERSION, 2, 1, length=4))
    worker.turn(held, 0, make_turn(VERSION, 3, 1, length=1))
    worker.turn(held, 0, make_turn(VERSION, 4, 1, length=5), last=True, left_out=[0, 2])
    worker.play_all(held, VERSION, turns=1)
    assert books(world)["live"] == 15
    assert worker.finish(held) == COMMITTED
    assert world.group(0)["tokens"] == 4 + 5 + 3
    assert books(world)["dropped:left_out"] == 2 + 1
    (row,) = world.ledger.episodes.ended(world.run_id, 0)
    assert (row["reason"], row["turns"], row["tokens"], row["counts"]) == ("left_out", 2, 3, 0)


def test_a_turn_that_is_sent_again_is_a_duplicate(world: World) -> None:
    serving_rollout(world)
    worker = EnvironmentWorker(world)
    (held,) = worker.lease(2)
    request, frames = worker.turn_message(held, 0, make_turn(VERSION, 1))
    assert world.send(request, frames).reply.status == COMMITTED
    before = world.dump()
    assert world.send(request, frames).reply.status == DUPLICATE
    assert world.dump() == before


def test_a_holder_that_was_silent_goes_on(world: World) -> None:
    serving_rollout(world)
    worker = EnvironmentWorker(world)
    (held,) = worker.lease(2)
    world.release("environment")
    worker = EnvironmentWorker(world)
    assert worker.play(held, 0, VERSION, last=False).reply.status == COMMITTED
    assert worker.lease(2, held=pb.Held(group_ids=[0]))[0].lease.group_id == 1
    assert world.states()[0] == "leased"


BAD_TURNS: dict[str, tuple[dict[str, Any], str]] = {
    "gap": ({"index": 1}, "the next turn must be 0"),
    "later life": ({"life": 2}, "life 2 has not begun"),
    "no sample": ({"sample": 2}, "has samples 0 to 1"),
    "row": ({"arrays": make_turn(VERSION, 1, row=1)}, "row 1 is neither"),
    "no prompt": ({"arrays": make_turn(VERSION, 1, context=0)}, "context_ids is empty"),
    "long": ({"arrays": make_turn(VERSION, 1, length=17)}, "max_new_tokens 16"),
    "long row": ({"arrays": make_turn(VERSION, 1, context=2040, length=16)}, "max_total_sequence_length"),
    "version": ({"arrays": make_turn(Version(1, 9), 1)}, "spans has step 9, but the newest version has"),
    "session": ({"arrays": make_turn(Version(7, 0), 1)}, "spans has session 7, but the newest is"),
    "session 0": ({"arrays": make_turn(Version(0, 0), 1)}, "spans has session 0, which the run never had"),
    "negative id": (
        {"arrays": make_turn(VERSION, 1)._replace(context_ids=np.array([-1], np.int32))},
        "ids begin",
    ),
    "reason": ({"note": pb.TurnNote(finish_reason="abort")}, "finish_reason is 'abort'"),
    "no sample text": (
        {"last": True, "note": pb.TurnNote(finish_reason="stop")},
        "`sample` must be set in the last turn",
    ),
    "NaN": ({"note": pb.TurnNote(finish_reason="stop", reward=float("nan"))}, "reward is nan"),
    "all left out": ({"last": True, "left_out": [0]}, "names all 1 turns"),
    "left out early": ({"left_out": [0]}, "only the last turn"),
    "large": ({"note": pb.TurnNote(finish_reason="stop", state=bytes(17 << 20))}, "`save` returns"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_TURNS.values(), ids=BAD_TURNS.keys())
def test_a_turn_that_cannot_be_is_invalid_and_changes_nothing(
    world: World, changes: dict[str, Any], message: str
) -> None:
    serving_rollout(world)
    worker = EnvironmentWorker(world)
    (held,) = worker.lease(2)
    before = world.dump()
    fields = {"arrays": make_turn(VERSION, 1)} | changes
    sample = fields.pop("sample", 0)
    request, frames = worker.turn_message(held, 0, **fields)
    request.turn.sample = sample
    reply = world.send(request, frames).reply
    assert (reply.status, message in reply.message) == (INVALID, True), reply.message
    assert world.dump() == before


def test_an_end_that_cannot_be_changes_nothing(world: World) -> None:
    serving_rollout(world)
    worker = EnvironmentWorker(world)
    (held,) = worker.lease(2)
    worker.play(held, 0, VERSION, last=True)
    before = world.dump()
    assert worker.end(held, 0).reply.status == INVALID  # it is finished
    assert worker.end(held, 1, life=2).reply.status == INVALID
    assert worker.end(held, 1, "no reason").reply.status == INVALID
    assert worker.end(held, 1, "restarted", give_up=True).reply.status == INVALID
    assert worker.end(held, 1, attempt=2).reply.status == STALE
    assert world.dump() == before


def test_only_the_workers_of_a_run_s_leases_journal(world: World, make_world: MakeWorld) -> None:
    rollout = serving_rollout(world)
    assert rollout.ask().empty
    worker = EnvironmentWorker(world)
    (held,) = worker.lease(2)
    request, frames = worker.turn_message(held, 0, make_turn(VERSION, 1))
    request.member_id = rollout.member_id
    reply = world.send(request, frames).reply
    assert (reply.status, "only a environment worker may send" in reply.message) == (INVALID, True)


def test_a_run_without_an_environment_has_no_episodes(make_world: MakeWorld) -> None:
    world = make_world()
    worker = EnvironmentWorker(world)
    assert worker.ask().reply.status == INVALID
    end = pb.EpisodeEnd(group_id=0, attempt=1, reason="restarted")
    reply = world.send(pb.ExchangeRequest(member_id="environment", episode_end=end)).reply
    assert (reply.status, "has no environment" in reply.message) == (INVALID, True)


@pytest.mark.parametrize(
    ("advantage", "turn_rewards", "state"),
    [
        ("outcome", [0.0, 1.0, 0.0, 0.0], "dropped"),
        ("turn_level", [0.0, 1.0, 0.0, 0.0], "scored"),
        ("turn_level", [0.5, 1.0, 0.5, 1.0], "dropped"),
        ("turn_level", [math.nan] * 4, "dropped"),
        ("discounted", [0.0, 1.0, 0.0, 0.0], "scored"),
        ("discounted", [math.nan] * 4, "dropped"),
    ],
)
def test_rewards_of_turns_decide_whether_equal_outcomes_train(
    make_world: MakeWorld, advantage: str, turn_rewards: list[float], state: str
) -> None:
    environment = {**ENVIRONMENT["environment"], "advantage": advantage}
    world = make_world(grpo={"use_dynamic_sampling": True}, environment=environment)
    serving_rollout(world)
    worker, reward = EnvironmentWorker(world), Reward(world)
    held, _ = worker.lease(4)
    worker.play_all(held, VERSION, turns=2)
    assert worker.finish(held, turn_rewards) == COMMITTED
    (task,) = reward.tasks()
    assert reward.send(task, rewards=[1.0, 1.0], functions=["exact_match"]).reply.status == COMMITTED
    assert world.group(0)["state"] == state
