"""A result counts only from the holder of its attempt; requests of another role, rank or session never count."""

from __future__ import annotations

import pytest
from exchange_drivers import COMMITTED, DUPLICATE, INVALID, OK, STALE, Learner, Reward, Rollout, World, fill

from paceline.v1 import common_pb2
from paceline.v1 import exchange_pb2 as pb


def test_every_holder_is_on_record(world: World) -> None:
    first, second = Rollout(world, "first"), Rollout(world, "second")
    (lease,) = first.lease()
    world.release("first")
    (again,) = second.lease()
    assert (again.group_id, again.attempt) == (lease.group_id, 2)
    assert world.group(lease.group_id)["holders"].split("\n") == ["first", "second"]


def test_a_result_of_an_attempt_that_another_holds_is_stale_and_changes_nothing(world: World) -> None:
    holder, other = Rollout(world, "holder"), Rollout(world, "other")
    (lease,) = holder.lease()
    other.lease()
    before = world.dump()
    assert other.finish(lease) == STALE
    assert world.dump() == before
    assert holder.finish(lease) == COMMITTED


@pytest.mark.parametrize("attempt", [0, 2, 2**32 - 1])
def test_a_holder_speaks_for_its_own_attempt_alone(world: World, attempt: int) -> None:
    first, second = Rollout(world, "first"), Rollout(world, "second")
    (lease,) = first.lease()
    world.release("first")
    (again,) = second.lease()
    lease.attempt = attempt
    assert first.finish(lease) == STALE
    lease.attempt = 1
    assert first.finish(lease) == COMMITTED  # the first result of any attempt
    assert second.finish(again) == DUPLICATE


@pytest.mark.parametrize("error", ["", "no such prompt"])
def test_a_lease_is_returned_by_its_holder_alone(world: World, error: str) -> None:
    holder, other = Rollout(world, "holder"), Rollout(world, "other")
    (lease,) = holder.lease()
    before = world.dump()
    assert other.return_lease(lease, error=error).reply.status == STALE
    assert world.dump() == before
    assert holder.return_lease(lease, error=error).reply.status == COMMITTED


@pytest.mark.parametrize("reason", ["run_ended", "stale", "poison", "x" * 100_000])
def test_a_worker_does_not_choose_under_which_reason_a_group_is_dropped(world: World, reason: str) -> None:
    rollout = Rollout(world)
    (lease,) = rollout.lease()
    returned = pb.LeaseReturn(group_id=lease.group_id, attempt=1, data_error="no", data_error_reason=reason)
    before = world.dump()
    reply = world.send(pb.ExchangeRequest(member_id="rollout", lease_return=returned)).reply
    assert reply.status == INVALID
    assert reason[:64] in reply.message
    assert len(reply.message) < 300
    assert world.dump() == before


def test_a_long_error_is_cut_before_it_is_written_down(world: World) -> None:
    rollout = Rollout(world)
    (lease,) = rollout.lease()
    assert rollout.return_lease(lease, error="x" * 1_000_000).reply.status == COMMITTED
    (warning,) = world.kinds("warning")
    assert len(warning["message"]) < 5000


REQUESTS = {
    "lease": (common_pb2.ROLE_ROLLOUT, pb.ExchangeRequest(lease=pb.LeaseRequest(room=2))),
    "group": (common_pb2.ROLE_ROLLOUT, pb.ExchangeRequest(group=pb.GroupResult(group_id=0, attempt=1))),
    "lease_return": (
        common_pb2.ROLE_ROLLOUT,
        pb.ExchangeRequest(lease_return=pb.LeaseReturn(group_id=0, attempt=1)),
    ),
    "task": (common_pb2.ROLE_REWARD, pb.ExchangeRequest(task=pb.TaskRequest(room=2))),
    "score": (common_pb2.ROLE_REWARD, pb.ExchangeRequest(score=pb.ScoreResult(group_id=0, attempt=1))),
    "batch": (common_pb2.ROLE_LEARNER, pb.ExchangeRequest(batch=pb.BatchRequest(step=0, world_size=1))),
    "receipt": (common_pb2.ROLE_LEARNER, pb.ExchangeRequest(receipt=pb.Receipt(step=0, world_size=1))),
}


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("role", [common_pb2.ROLE_ROLLOUT, common_pb2.ROLE_REWARD, common_pb2.ROLE_LEARNER])
def test_each_role_has_its_own_requests(world: World, kind: str, role: common_pb2.Role.ValueType) -> None:
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    fill(rollout, reward, 2)
    owner, request = REQUESTS[kind]
    if role == owner:
        return
    world.enter("sender", role, session=learner.session)
    request = pb.ExchangeRequest.FromString(request.SerializeToString())
    request.member_id, request.session = "sender", learner.session
    before = world.dump()
    reply = world.send(request).reply
    assert reply.status == INVALID
    assert "sender is a" in reply.message
    assert world.dump() == before
    assert learner.part(0) is not None


def test_a_part_is_for_the_rank_that_said_hello_as_it(world: World) -> None:
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world, world_size=2)
    fill(rollout, reward, 2)
    asked = pb.BatchRequest(step=0, rank=1, world_size=2)
    request = pb.ExchangeRequest(member_id="learner-0", session=learner.session, batch=asked)
    assert world.send(request).reply.status == INVALID
    request = pb.ExchangeRequest(member_id="learner-1", session=learner.session, batch=asked)
    assert world.send(request).reply.status == OK


def test_nothing_is_for_a_rank_that_the_learner_does_not_have(world: World) -> None:
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    fill(rollout, reward, 2)
    world.exchange.active.state.ranks = 1
    part = learner.part(0)
    assert part is not None
    world.enter("liar", common_pb2.ROLE_LEARNER, rank=1)
    before = world.dump()
    for world_size in (1, 2):
        asked = pb.BatchRequest(step=0, rank=1, world_size=world_size)
        receipt = pb.Receipt(step=0, rank=1, world_size=world_size, tokens=7)
        for body in ({"batch": asked}, {"receipt": receipt}):
            request = pb.ExchangeRequest(member_id="liar", session=learner.session, **body)
            assert world.send(request).reply.status == INVALID
    assert world.dump() == before
    assert learner.train(0) is not None


def test_a_learner_that_stands_by_neither_gets_the_sessions_part_nor_receipts_it(world: World) -> None:
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    fill(rollout, reward, 2)
    world.enter("stands-by", common_pb2.ROLE_LEARNER)
    part = learner.part(0)
    assert part is not None
    asked = pb.BatchRequest(step=0, rank=0, world_size=1)
    request = pb.ExchangeRequest(member_id="stands-by", session=learner.session, batch=asked)
    assert world.send(request).reply.status == STALE
    tokens = sum(world.group(group.group_id)["tokens"] for group in part)
    receipt = pb.Receipt(step=0, rank=0, world_size=1, tokens=tokens, groups=part)
    request = pb.ExchangeRequest(member_id="stands-by", session=learner.session, receipt=receipt)
    assert world.send(request).reply.status == STALE
    assert world.row["next_step"] == 0
    assert learner.train(0) is not None
