"""The filter of requests at the socket: no useless frames, nothing unbounded, nothing twice; and the checks of parked
requests."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence

import pytest
from exchange_drivers import COMMITTED, DUPLICATE, INVALID, OK, MakeWorld, Reward, Rollout, World
from exchange_service import DEADLINE_S, FOREVER_S, Peer, Service, lease, serving

from paceline.services.coordinator.exchange.replies import Outcome
from paceline.services.coordinator.exchange.requests import task
from paceline.services.coordinator.exchange.state import Exchange
from paceline.services.coordinator.exchange.transport import receiver, transactions
from paceline.services.coordinator.exchange.transport.receiver import ServerLimits
from paceline.services.coordinator.exchange.uploads.intake import Arrived
from paceline.v1 import exchange_pb2 as pb
from paceline.v1.common_pb2 import ROLE_LEARNER, ROLE_REWARD, ROLE_ROLLOUT

REQUESTS = {
    "lease": (ROLE_ROLLOUT, pb.ExchangeRequest(lease=pb.LeaseRequest(room=2, wait_s=FOREVER_S)), 0),
    "group": (ROLE_ROLLOUT, pb.ExchangeRequest(group=pb.GroupResult(group_id=0, attempt=1)), 2),
    "lease_return": (
        ROLE_ROLLOUT,
        pb.ExchangeRequest(lease_return=pb.LeaseReturn(group_id=0, attempt=1)),
        1,
    ),
    "task": (ROLE_REWARD, pb.ExchangeRequest(task=pb.TaskRequest(room=2, wait_s=FOREVER_S)), 0),
    "score": (ROLE_REWARD, pb.ExchangeRequest(score=pb.ScoreResult(group_id=0, attempt=1)), 1),
    "batch": (
        ROLE_LEARNER,
        pb.ExchangeRequest(batch=pb.BatchRequest(step=0, world_size=1, wait_s=FOREVER_S)),
        0,
    ),
    "receipt": (ROLE_LEARNER, pb.ExchangeRequest(receipt=pb.Receipt(step=0, world_size=1)), 0),
}


@pytest.mark.parametrize("kind", REQUESTS)
async def test_more_frames_than_a_kind_has_use_for_are_refused_and_not_parked(world: World, kind: str) -> None:
    role, request, frames = REQUESTS[kind]
    request = pb.ExchangeRequest.FromString(request.SerializeToString())
    async with serving(world) as service:
        reply = await service.peer("sender", role).ask(request, [b"x" * 1000] * (frames + 1))
        assert reply.status == INVALID
        assert f"{frames} payload frames" in reply.message
        assert len(service.server.transactions.parked) == 0


@pytest.mark.parametrize("kind", ["lease", "task"])
async def test_a_worker_holds_so_many_groups_at_most(world: World, kind: str) -> None:
    role, _, _ = REQUESTS[kind]
    async with serving(world) as service:
        sender = service.peer("sender", role)
        for number, status in ((receiver.MAX_HELD + 1, INVALID), (receiver.MAX_HELD, OK)):
            held = pb.Held(group_ids=range(number))
            body = pb.LeaseRequest(held=held) if kind == "lease" else pb.TaskRequest(held=held)
            assert (await sender.ask(pb.ExchangeRequest(**{kind: body}))).status == status


async def test_a_header_is_no_place_for_bulk(world: World) -> None:
    async with serving(world) as service:
        request = lease(FOREVER_S)
        request.run_id = ""
        request.lease.held.SetInParent()
        padded = pb.ExchangeRequest.FromString(
            request.SerializeToString() + b"\xfa\x3f" + b"\x80\x80\x20" + bytes(1 << 19)
        )
        reply = await service.rollout("rollout", step=None).ask(padded)
        assert reply.status == INVALID
        assert "header of a lease request" in reply.message


async def test_texts_come_only_with_the_samples_that_they_are_of(world: World) -> None:
    """Their bytes then count among those that wait for the disk."""
    async with serving(world) as service:
        worker, driver = service.rollout("worker"), Rollout(world, "worker")
        (given,) = (await worker.ask(lease())).lease.leases
        returned = pb.LeaseReturn(group_id=given.group_id, attempt=1, texts=["x" * (1 << 20)])
        reply = await worker.ask(pb.ExchangeRequest(lease_return=returned))
        assert reply.status == INVALID
        assert "header of a lease_return request" in reply.message
        sizes: list[int] = []
        server = service.server
        server._checks.put = lambda waiting: sizes.append(waiting.size)  # type: ignore[method-assign]
        returned.finish_reasons.extend(["stop", "stop"])
        frames = [driver.result(given)[1][0]]
        await worker.send(pb.ExchangeRequest(lease_return=returned), frames)
        await worker.ask(lease_that_is_refused(), number=2)  # so it has arrived
        assert sizes[0] > 1 << 20
        assert server.receiver.pending_bytes == sizes[0]


async def test_a_learner_has_so_many_ranks_at_most(world: World) -> None:
    async with serving(world) as service:
        asked = pb.BatchRequest(step=0, world_size=2**32 - 1)
        reply = await service.peer("learner", ROLE_LEARNER).ask(pb.ExchangeRequest(batch=asked))
        assert reply.status == INVALID
        assert "ranks" in reply.message


async def test_one_members_unanswered_requests_are_bounded_and_others_are_served(world: World) -> None:
    async with serving(world, limits=ServerLimits(unanswered=5)) as service:
        flood, other = service.rollout("flood"), service.rollout("other")
        async with service.lock:  # nothing is answered meanwhile
            for number in range(6):
                await flood.send(pb.ExchangeRequest(lease_return=pb.LeaseReturn()), number=number + 1)
            reply = await flood.receive()
            assert (reply.request_id, reply.status) == (6, INVALID)
            assert "are unanswered already" in reply.message
            await other.send(lease())
        assert (await other.receive()).status == OK
        assert [(await flood.receive()).request_id for _ in range(5)] == [1, 2, 3, 4, 5]
        assert (await flood.ask(lease())).status == OK  # answered requests no longer count
        assert not service.server.receiver.filter.unanswered


async def test_whatever_room_is_said_the_answer_is_bounded(world: World) -> None:
    rollout, reward = Rollout(world), Reward(world)
    leases = rollout.lease(2**32 - 1)
    assert len(leases) == 4
    for given in leases:
        rollout.finish(given)
    assert len(reward.tasks(2**32 - 1)) == 4


def test_tasks_in_one_answer_are_bounded_by_bytes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout, reward = Rollout(world), Reward(world)
    for given in rollout.lease(8):
        rollout.finish(given)
    monkeypatch.setattr(task, "MAX_TASK_BYTES", 1000)  # more than one group has, less than three have
    sizes = [len(reward.tasks()) for _ in range(5)]
    assert sum(sizes) == 4
    assert max(sizes) < 4
    monkeypatch.setattr(task, "MAX_TASK_BYTES", 1)
    for group_id in range(4):
        world.send(
            reward.message(
                pb.ScoreTask(group_id=group_id, attempt=1, digest=world.group(group_id)["digest"]), handed_back=True
            )
        )
    assert [len(reward.tasks()) for _ in range(5)] == [1, 1, 1, 1, 0]  # an answer may always have one group


async def test_a_result_that_is_sent_again_is_stored_once(world: World) -> None:
    async with serving(world) as service:
        worker, again = service.rollout("worker"), service.rollout("worker")
        (given,) = (await worker.ask(lease())).lease.leases
        request, frames = Rollout(world, "worker").result(given)
        async with service.lock:  # nothing is answered meanwhile
            await worker.send(request, frames, number=1)
            await worker.ask(lease_that_is_refused(), number=2)  # so the first has arrived
            request.again = True
            await again.send(request, frames, number=3)
            await again.ask(lease_that_is_refused(), number=4)
            assert len(service.server.receiver.filter.under_way) == 1
        reply = await again.receive()  # to the last sender
        assert (reply.request_id, reply.status) == (3, COMMITTED)
        stored = stored_bytes(service)
        reply = await again.ask(request, frames, number=5)
        assert reply.status == DUPLICATE
        assert stored_bytes(service) == stored
        assert service.server.receiver.pending_bytes == 0
        assert not service.server.receiver.filter.under_way


def lease_that_is_refused() -> pb.ExchangeRequest:
    """Return a request that is answered on arrival, outside of any transaction."""
    return pb.ExchangeRequest(lease=pb.LeaseRequest(held=pb.Held(group_ids=range(receiver.MAX_HELD + 1))))


async def test_what_was_committed_before_a_restart_is_not_stored_again(world: World) -> None:
    rollout = Rollout(world, "worker")
    (given,) = rollout.lease()
    request, frames = rollout.result(given)
    assert rollout.finish(given) == COMMITTED
    request.again, request.term = True, 0
    async with serving(world) as service:
        stored = stored_bytes(service)
        assert (await service.rollout("worker").ask(request, frames)).status == DUPLICATE
        assert stored_bytes(service) == stored
        assert "tokens:wasted" not in world.counters


def stored_bytes(service: Service) -> int:
    """Return the bytes of the segments beside the ledger."""
    return sum(path.stat().st_size for path in service.world.ledger.payloads.folder.glob("*.seg"))


async def test_returned_samples_count_in_backpressure(world: World) -> None:
    async with serving(world, limits=ServerLimits(pending_bytes=1000)) as service:
        worker, driver = service.rollout("worker"), Rollout(world, "worker")
        leases = (await worker.ask(lease(room=8))).lease.leases
        async with service.lock:
            for number, given in enumerate(leases):
                pair = driver.completions(given)
                returned = pb.LeaseReturn(
                    group_id=given.group_id,
                    attempt=given.attempt,
                    finish_reasons=["stop", "stop"],
                    texts=["", ""],
                )
                frames = [driver.result(given)[1][0]]
                assert len(pair) == 2
                await worker.send(pb.ExchangeRequest(lease_return=returned), frames, number=number)
            async with asyncio.timeout(DEADLINE_S):
                await until_full(service, 1000)
            assert service.server.receiver.pending_bytes < 2000  # the rest is not read
        replies = [await worker.receive() for _ in leases]
        assert {reply.status for reply in replies} == {COMMITTED}
        assert service.server.receiver.pending_bytes == 0


async def until_full(service: Service, pending_bytes: int) -> None:
    """Wait until the server has stopped reading."""
    pause = asyncio.Event()
    while service.server.receiver.pending_bytes < pending_bytes:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(pause.wait(), 0.01)


async def test_of_many_parked_requests_a_few_are_looked_at_when_nothing_has_happened(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, workers = make_world(), 200
    looks: list[int] = []
    handle_leases = transactions.handle_leases

    def counted(exchange: Exchange, asked: Sequence[Arrived]) -> list[Outcome]:
        looks.append(len(asked))
        return handle_leases(exchange, asked)

    async with serving(world, limits=ServerLimits(tick_s=3600.0)) as service:
        peers: list[Peer] = [service.rollout(f"rollout-{index}", step=None) for index in range(workers)]
        for peer in peers:
            await peer.send(lease(FOREVER_S))
        other: Peer = service.rollout("other", step=None)
        while len(service.server.transactions.parked) < workers:
            await other.ask(lease())
        monkeypatch.setattr(transactions, "handle_leases", counted)
        server = service.server
        for tick in range(1, 4):
            server.transactions._ticked = True
            await server.transactions._transact(set(), set())
            assert len(server.transactions._leases) + sum(looks) == tick * transactions.PARKED_AT_ONCE
            while server.transactions._leases:
                await server.transactions._transact(set(), set())
        looks.clear()
        world.acknowledge("rollout-7", Rollout(world, "holder").version)
        server.wake("lease")  # after an event all are checked
        assert len((await peers[7].receive()).lease.leases) == 1
        assert sum(looks) >= workers


def has_ipv6() -> bool:
    """Return whether this host has the loopback address of IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this host has no ::1")
async def test_the_exchange_listens_and_is_reached_by_ipv6(world: World) -> None:
    async with serving(world, host="::1") as service:
        assert (await service.rollout("rollout").ask(lease())).status == OK
