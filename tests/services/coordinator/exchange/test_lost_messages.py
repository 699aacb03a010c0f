"""Lost or invalid messages: a lost reply costs nothing, a bad message changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from exchange_drivers import COMMITTED, INVALID, PROMPT_IDS, STALE, Learner, Reward, Rollout, World, fill

from paceline.services.coordinator.exchange import leases
from paceline.services.coordinator.exchange.requests.lease import lease_groups
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import PROTOCOL


def ask_holding(rollout: Rollout, *group_ids: int) -> list[pb.Lease]:
    asked = pb.LeaseRequest(room=8, held=pb.Held(group_ids=group_ids))
    reply = rollout.world.send(pb.ExchangeRequest(member_id=rollout.member_id, lease=asked)).reply
    return list(reply.lease.leases)


def test_leases_whose_reply_was_lost_are_given_out_anew(world: World) -> None:
    rollout, other = Rollout(world), Rollout(world, "other")
    first, second = rollout.lease(4)
    (others,) = other.lease(2)
    again = ask_holding(rollout, first.group_id)
    assert [(lease.group_id, lease.attempt) for lease in again] == [(second.group_id, 2), (3, 1)]
    assert world.group(first.group_id)["attempt"] == 1
    assert world.group(others.group_id)["attempt"] == 1
    assert ask_holding(rollout, *(lease.group_id for lease in (first, *again))) == []
    assert len(ask_holding(rollout)) == 3  # a worker that reports no leases gets all its own again


def test_a_worker_that_is_back_goes_on_with_what_it_holds(world: World) -> None:
    """It was silent for too long. If it were leased the same group again, one worker would generate it twice."""
    rollout = Rollout(world)
    first, second, third = rollout.lease(6)
    world.release("rollout")
    rollout = Rollout(world)
    (taken,) = Rollout(world, "other").lease(2)
    again = ask_holding(rollout, first.group_id, second.group_id)
    assert taken.group_id == first.group_id
    assert [(lease.group_id, lease.attempt) for lease in again] == [(third.group_id, 2), (3, 1)]
    assert [world.group(group_id)["member_id"] for group_id in range(3)] == ["other", "rollout", "rollout"]
    assert world.group(second.group_id)["attempt"] == 1
    assert rollout.finish(second) == COMMITTED
    assert rollout.finish(first) == COMMITTED


def test_a_worker_that_does_not_say_what_it_holds_keeps_it(world: World) -> None:
    rollout = Rollout(world)
    assert len(rollout.lease(8)) == 4
    assert rollout.lease(8) == []


def test_tasks_whose_reply_was_lost_are_given_out_anew(world: World) -> None:
    rollout, reward = Rollout(world), Reward(world)
    for lease in rollout.lease(4):
        rollout.finish(lease)
    first, second = reward.tasks()
    asked = pb.TaskRequest(room=8, held=pb.Held(group_ids=[first.group_id]))
    reply = world.send(pb.ExchangeRequest(member_id=reward.member_id, task=asked)).reply
    assert [(task.group_id, task.attempt) for task in reply.task.tasks] == [(second.group_id, 2)]
    assert world.group(second.group_id)["score_failures"] == 0


def test_who_is_no_member_is_given_nothing(world: World) -> None:
    """A dead worker's request may still be parked: leases for it would never be revoked."""
    rollout, reward = Rollout(world), Reward(world)
    (lease,) = rollout.lease(2)
    rollout.finish(lease)
    world.release("reward")
    world.release("rollout")
    outcome = reward.ask()
    assert (outcome.reply.status, outcome.empty, outcome.payloads) == (STALE, False, [])
    assert rollout.ask().reply.status == STALE
    rollout.hold(0)  # a late acknowledgement of a version does not make a member
    assert rollout.ask().reply.status == STALE
    assert world.group(lease.group_id)["scorer_id"] is None


def arrays(**changes: Any) -> dict[str, np.ndarray]:
    """A payload of two completions of 2 and 3 tokens."""
    whole = {
        "prompt_ids": PROMPT_IDS,
        "token_ids": np.arange(5, dtype=np.int32),
        "logprobs": np.full(5, -0.5, np.float32),
        "lengths": np.array([2, 3], np.int32),
        "spans": np.array([[0, 1, 0, 0, 2], [1, 1, 0, 0, 3]], np.int64),
    }
    return {name: value for name, value in (whole | changes).items() if value is not None}


BAD_ARRAYS = {
    "no spans": {"spans": None},
    "double logprobs": {"logprobs": np.full(5, -0.5, np.float64)},
    "NaN": {"logprobs": np.array([-0.5, np.nan, -0.5, -0.5, -0.5], np.float32)},
    "infinite": {"logprobs": np.array([-0.5, -np.inf, -0.5, -0.5, -0.5], np.float32)},
    "fewer logprobs": {"logprobs": np.full(4, -0.5, np.float32)},
    "lengths that do not add up": {"lengths": np.array([2, 4], np.int32)},
    "negative length": {"lengths": np.array([-1, 6], np.int32)},
    "one completion": {"lengths": np.array([5], np.int32)},
    "span gap": {"spans": np.array([[0, 1, 0, 0, 1], [1, 1, 0, 0, 3]], np.int64)},
    "span overlap": {"spans": np.array([[0, 1, 0, 0, 2], [1, 1, 0, 0, 2], [1, 1, 0, 1, 3]], np.int64)},
    "span beyond": {"spans": np.array([[0, 1, 0, 0, 2], [1, 1, 0, 0, 9]], np.int64)},
    "span of a third": {"spans": np.array([[0, 1, 0, 0, 2], [1, 1, 0, 0, 3], [2, 1, 0, 0, 1]], np.int64)},
    "span of four": {"spans": np.array([[0, 1, 0, 2], [1, 1, 0, 3]], np.int64)},
    "negative step": {"spans": np.array([[0, 1, -1, 0, 2], [1, 1, 0, 0, 3]], np.int64)},
    "flat spans": {"spans": np.array([0, 1, 0, 0, 2], np.int64)},
    "other prompt, so another digest": {"prompt_ids": np.array([5, 6], np.int32)},
}


@pytest.mark.parametrize("changes", BAD_ARRAYS.values(), ids=BAD_ARRAYS.keys())
def test_a_payload_that_does_not_fit_is_invalid_and_changes_nothing(world: World, changes: dict[str, Any]) -> None:
    rollout = Rollout(world)
    (lease,) = rollout.lease(2)
    good, (_, texts) = rollout.result(lease)
    before = world.dump()
    outcome = world.send(good, [safetensors.numpy.save(arrays(**changes)), texts])
    assert outcome.reply.status == INVALID
    assert outcome.reply.message
    returned = pb.LeaseReturn(group_id=0, attempt=1, finish_reasons=["stop", "abort"], texts=["", ""])
    if "prompt_ids" not in changes:
        frames = [safetensors.numpy.save(arrays(**changes))]
        request = pb.ExchangeRequest(member_id="rollout", lease_return=returned)
        assert world.send(request, frames).reply.status == INVALID
    assert world.dump() == before
    assert world.notices == []
    assert rollout.finish(lease) == COMMITTED


@pytest.mark.parametrize("frame", [b"", b"x", b"\xff" * 64, b"\x08" + b"\0" * 7 + b"{}      ", b"{}" * 99])
def test_a_foreign_frame_is_invalid(world: World, frame: bytes) -> None:
    rollout = Rollout(world)
    (lease,) = rollout.lease(2)
    request, (whole, texts) = rollout.result(lease)
    before = world.dump()
    for first in (frame, whole[:-1], whole[: len(whole) // 2]):
        assert world.send(request, [first, texts]).reply.status == INVALID
    for frames in ([whole, whole], [whole, texts[:-1]], [whole], [texts, whole], [whole, texts, texts], []):
        assert world.send(request, frames).reply.status == INVALID
    assert world.dump() == before
    assert rollout.finish(lease) == COMMITTED


def test_workers_that_ask_together_get_what_is_theirs_by_version_and_by_record(world: World) -> None:
    old, new, lost = Rollout(world, "old"), Rollout(world, "new"), Rollout(world, "lost")
    (forgotten,) = lost.lease()
    old.hold(-2)  # more than η behind every step
    asked = [
        pb.ExchangeRequest(
            member_id=worker.member_id,
            term=world.ledger.term,
            lease=pb.LeaseRequest(room=room, held=pb.Held()),
        )
        for worker, room in ((old, 2), (new, 4), (lost, 2))
    ]
    with world.ledger.transaction():
        none, two, one = lease_groups(world.exchange, world.run, asked)
    assert (none.empty, list(none.reply.lease.leases)) == (True, [])
    assert [lease.group_id for lease in two.reply.lease.leases] == [forgotten.group_id, 1]
    assert [lease.attempt for lease in two.reply.lease.leases] == [2, 1]
    assert [lease.group_id for lease in one.reply.lease.leases] == [2]
    holders = [world.group(group_id)["member_id"] for group_id in range(4)]
    assert holders == ["new", "new", "lost", None]


@pytest.mark.parametrize("what", ["digest 32", "digest 64", "reason", "texts", "finish_reasons"])
def test_frames_that_do_not_fit_together_are_invalid(world: World, what: str) -> None:
    rollout = Rollout(world)
    (lease,) = rollout.lease(2)
    request, (whole, texts) = rollout.result(lease)
    said = pb.Texts.FromString(texts)
    if what.startswith("digest"):
        request.group.digest = "0" * int(what.split()[1])
    elif what == "reason":
        said.finish_reasons[0] = "abort"
    else:
        said.ClearField(what)
    before = world.dump()
    assert world.send(request, [whole, said.SerializeToString()]).reply.status == INVALID
    assert world.dump() == before


def test_a_group_without_tokens_is_invalid(world: World) -> None:
    rollout = Rollout(world)
    (lease,) = rollout.lease(2)
    empty = [type(c)(c.token_ids[:0], c.logprobs[:0], (), "length") for c in rollout.completions(lease)]
    rollout.completions = lambda lease, length=4: empty  # type: ignore[method-assign]
    assert rollout.finish(lease) == INVALID


def test_a_request_without_a_body_is_invalid(world: World) -> None:
    assert world.send(pb.ExchangeRequest()).reply.status == INVALID


def test_replies_name_the_request_and_the_term(world: World) -> None:
    world.restart()
    reply = world.send(pb.ExchangeRequest(request_id=77, task=pb.TaskRequest(room=1))).reply
    assert (reply.request_id, reply.term, reply.protocol) == (77, 2, PROTOCOL)


def sizes(value: object) -> dict[str, int]:
    """Return the lengths of everything in an object that has one."""
    return {name: len(field) for name, field in vars(value).items() if hasattr(field, "__len__")}


def test_the_exchange_keeps_nothing_of_what_is_over(make_world: Any) -> None:
    world = make_world(grpo={"max_num_steps": 70})
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world, world_size=2)

    def train(steps: range) -> dict[str, int]:
        for step in steps:
            rollout.hold(step)
            fill(rollout, reward, 4)
            learner.ask(step + 1)
            learner.ask(step + 10**6)
            learner.train(step)
        return sizes(world.exchange) | sizes(world.exchange.workers) | sizes(world.run) | sizes(world.run.state)

    early = train(range(3))
    assert train(range(3, 60)) == early
    assert early["first_requested_s"] <= 2
    assert world.counters["groups:trained"] == 120


def test_a_silent_worker_does_not_take_up_again_leases_of_others(world: World) -> None:
    silent, other = Rollout(world, "silent"), Rollout(world, "other")
    held = [lease.group_id for lease in silent.lease(8)]
    asked = [
        pb.ExchangeRequest(
            member_id=worker.member_id,
            term=world.ledger.term,
            lease=pb.LeaseRequest(room=8, held=pb.Held(group_ids=ids)),
        )
        for worker, ids in ((other, []), (silent, held))
    ]
    world.exchange.workers.suspected.add("silent")
    with world.ledger.transaction():
        assert leases.revoke_work(world.exchange, ["silent"], with_leases=True) == len(held)
        others, _ = lease_groups(world.exchange, world.run, asked)
    assert [lease.group_id for lease in others.reply.lease.leases] == held
