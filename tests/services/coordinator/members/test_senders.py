"""Strangers and earlier secrets change nothing, and honest workers recover from both."""

from __future__ import annotations

from pathlib import Path

import pytest
from control_plane import Plane, learner, rollout
from exchange_drivers import COMMITTED, INVALID, STALE, Learner, MakeWorld, Reward, Rollout, World, fill
from exchange_service import FOREVER_S, Service, lease, serving

from paceline.services.coordinator.exchange.transport.receiver import ServerLimits
from paceline.services.coordinator.members.registry import Introduction, Member, Senders, Standing
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import PROTOCOL


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    """A world with 3 groups a step, so that as many are open while a batch is served."""
    return make_world(grpo={"num_prompts_per_step": 3})


def every_request(world: World) -> dict[str, tuple[pb.ExchangeRequest, list[bytes]]]:
    """Return one valid request of each kind, each of another member, in a world where each would change something."""
    rollout, reward, learner = Rollout(world), Reward(world), Learner(world)
    fill(rollout, reward, 3)
    part = learner.part(0)
    assert part is not None
    first, second, third = rollout.lease(6)
    rollout.finish(third)
    (task,) = reward.tasks()
    returned = pb.LeaseReturn(group_id=second.group_id, attempt=1, data_error="no such prompt")
    tokens = sum(world.group(group.group_id)["tokens"] for group in part)
    receipt = pb.Receipt(step=0, rank=0, world_size=1, tokens=tokens, groups=part)
    asked = pb.BatchRequest(step=1, rank=0, world_size=1, wait_s=FOREVER_S)
    return {
        "lease": (pb.ExchangeRequest(member_id="rollout", lease=pb.LeaseRequest(room=8, held=pb.Held())), []),
        "group": rollout.result(first),
        "lease_return": (pb.ExchangeRequest(member_id="rollout", lease_return=returned), []),
        "task": (pb.ExchangeRequest(member_id="reward", task=pb.TaskRequest(room=1, held=pb.Held())), []),
        "score": (reward.message(task, rewards=[1e6, 0.0], functions=["exact_match"]), []),
        "batch": (pb.ExchangeRequest(member_id="learner-0", session=learner.session, batch=asked), []),
        "receipt": (pb.ExchangeRequest(member_id="learner-0", session=learner.session, receipt=receipt), []),
    }


KINDS = ("lease", "group", "lease_return", "task", "score", "batch", "receipt")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("member_id", ["", "nobody", None], ids=["no name", "a made-up name", "another's name"])
def test_a_stranger_is_refused_and_changes_nothing(world: World, kind: str, member_id: str | None) -> None:
    request, frames = every_request(world)[kind]
    request.member_id = request.member_id if member_id is None else member_id
    request.secret = b"0" * 16
    request.protocol, request.term, request.run_id = PROTOCOL, world.ledger.term, world.run_id
    before = world.dump()
    outcome = world.send(request, frames)
    assert outcome.reply.status == INVALID
    assert "secret" in outcome.reply.message
    assert not outcome.empty
    assert world.dump() == before
    assert world.notices == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_earlier_secret_is_stale_and_the_same_request_counts_under_the_new_one(world: World, kind: str) -> None:
    request, frames = every_request(world)[kind]
    member = world.exchange.senders.get(request.member_id)
    assert member is not None
    request.secret = member.stream.secret
    world.exchange.senders.enter(again := Member(member.member_id, member.introduction, 0.0, session=member.session))
    before = world.dump()
    reply = world.send(request, frames).reply
    assert (reply.status, reply.term) == (STALE, 0)
    assert world.dump() == before
    request.secret = again.stream.secret
    reply = world.send(request, frames).reply
    assert reply.status not in (INVALID, STALE), reply.message


def test_a_secret_is_good_for_its_member_alone(world: World) -> None:
    one, other = world.enter("one"), world.enter("other")
    assert world.exchange.senders.standing("one", one.stream.secret) is Standing.MEMBER
    assert world.exchange.senders.standing("one", other.stream.secret) is Standing.STRANGER
    assert world.exchange.senders.standing("one", b"") is Standing.STRANGER


def test_secrets_of_the_past_are_bounded() -> None:
    known = Senders(max_earlier=3)
    members = [Member(f"worker-{i}", Introduction(1), 0.0) for i in range(5)]
    for member in members:
        known.enter(member)
        known.leave(member.member_id)
    standings = [known.standing(member.member_id, member.stream.secret) for member in members]
    assert standings == [Standing.STRANGER] * 2 + [Standing.EARLIER] * 3


async def test_each_welcome_brings_another_secret(plane: Plane) -> None:
    first = (await rollout(plane, "rollout-1").hear("welcome")).secret
    rank = (await learner(plane, "learner-1-rank1", rank=1).hear("welcome")).secret
    again = (await rollout(plane, "rollout-1", secret=first).hear("welcome")).secret
    assert len({first, rank, again}) == 3
    assert min(map(len, (first, rank, again))) >= 16
    standing = plane.coordinator.exchange.senders.standing
    assert standing("rollout-1", again) is Standing.MEMBER
    assert standing("rollout-1", first) is Standing.EARLIER
    assert standing("learner-1-rank1", rank) is Standing.MEMBER


async def test_a_stranger_is_answered_at_once_and_ends_nobodys_wait(world: World) -> None:
    async with serving(world, limits=ServerLimits(tick_s=3600.0)) as service:
        worker, stranger = service.rollout("worker", step=None), service.peer("stranger")
        await worker.send(lease(FOREVER_S), number=1)
        await service.rollout("other", step=None).ask(lease())  # so the worker's request waits by now
        request = lease(FOREVER_S)
        request.secret = b"guessed"
        stranger.member_id = "worker"
        assert (await stranger.ask(request, number=7)).status == INVALID
        Rollout(world, "worker")
        service.server.wake("lease")
        reply = await worker.receive()
        assert (reply.request_id, len(reply.lease.leases)) == (1, 1)


async def test_a_strangers_group_does_not_reach_the_disk(world: World) -> None:
    async with serving(world) as service:
        worker = service.rollout("worker")
        (given,) = (await worker.ask(lease())).lease.leases
        request, frames = Rollout(world, "worker").result(given)
        request.secret = b"guessed"
        assert (await worker.ask(request, frames)).status == INVALID
        assert stored_bytes(service) == 0
        request.ClearField("secret")
        assert (await worker.ask(request, frames)).status == COMMITTED
        assert stored_bytes(service) > 0


def stored_bytes(service: Service) -> int:
    """Return the bytes of the segments beside the ledger."""
    folder: Path = service.world.ledger.payloads.folder
    return sum(path.stat().st_size for path in folder.glob("*.seg"))


def test_a_key_is_known_while_its_member_belongs() -> None:
    known, key = Senders(), bytes(range(32))
    known.enter(Member("reward-1", Introduction(2, exchange_key=key), 0.0))
    known.enter(Member("reward-2", Introduction(2), 0.0))
    assert (known.knows_key(key), known.owner_of(key), known.knows_key(b"")) == (True, "reward-1", False)
    known.leave("reward-2")
    assert known.knows_key(key)
    known.enter(Member("reward-1", Introduction(2, exchange_key=key), 0.0))  # on a new stream
    assert known.knows_key(key)
    known.leave("reward-1")
    assert not known.knows_key(key)
