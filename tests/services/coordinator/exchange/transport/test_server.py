"""The exchange over real sockets: whatever bytes arrive, others are served, and parked requests end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from episode_drivers import ENVIRONMENT, EnvironmentWorker, serving_rollout
from exchange_drivers import COMMITTED, INVALID, OK, STALE, Learner, MakeWorld, Reward, Rollout, World
from exchange_service import DEADLINE_S, FOREVER_S, Service, lease, serving

from paceline.errors import Conflict
from paceline.groups import Version
from paceline.services.coordinator.exchange.notices import Notice
from paceline.services.coordinator.exchange.requests.table import KINDS
from paceline.services.coordinator.exchange.transport.receiver import ServerLimits
from paceline.services.coordinator.exchange.transport.server import ExchangeServer
from paceline.v1 import exchange_pb2 as pb
from paceline.v1.common_pb2 import ROLE_ENVIRONMENT, ROLE_LEARNER, ROLE_REWARD
from paceline.wire import MAX_MESSAGE_BYTES, PROTOCOL


@pytest_asyncio.fixture
async def service(world: World) -> AsyncIterator[Service]:
    async with serving(world) as service:
        yield service


async def test_a_group_over_the_wire(world: World) -> None:
    async with serving(world, limits=ServerLimits(tick_s=3600.0)) as service:  # events alone wake requests
        await send_a_group(service)


async def send_a_group(service: Service) -> None:
    rollout, reward = service.rollout("rollout"), service.peer("reward", ROLE_REWARD)
    session = Learner(service.world).session
    learner = service.peer("learner-0", ROLE_LEARNER)
    asked = pb.BatchRequest(step=0, rank=0, world_size=1, wait_s=FOREVER_S)
    await learner.send(pb.ExchangeRequest(session=session, batch=asked))
    await reward.send(pb.ExchangeRequest(task=pb.TaskRequest(room=1, wait_s=FOREVER_S)))
    driver = Rollout(service.world, "rollout")
    leases = (await rollout.ask(lease(room=4))).lease.leases
    for group in leases:  # each commit wakes the reward worker, and the second score the learner
        assert (await rollout.ask(*driver.result(group))).status == COMMITTED
        (task,) = (await reward.receive()).task.tasks
        score = pb.ScoreResult(group_id=task.group_id, digest=task.digest, attempt=task.attempt)
        score.rewards.extend([0.0, 1.0])
        score.functions.append("exact_match")
        assert (await reward.ask(pb.ExchangeRequest(score=score))).status == COMMITTED
        await reward.send(pb.ExchangeRequest(task=pb.TaskRequest(room=1, wait_s=FOREVER_S)))
    reply = await learner.receive()
    assert [group.group_id for group in reply.batch.groups] == [0, 1]
    receipt = pb.Receipt(step=0, rank=0, world_size=1, groups=reply.batch.groups, tokens=18)
    assert (await learner.ask(pb.ExchangeRequest(session=session, receipt=receipt))).status == COMMITTED
    assert [notice.kind for notice in service.notices] == ["metrics", "step"]


@pytest.mark.parametrize(
    "frames",
    [
        [b"\xff\xff\xff"],
        [b""],
        [b"", b""],
        [b"GET / HTTP/1.1"],
        [b"\x08\x63" * 1000, b"x" * 1000],
        [b"\0"] * 100,
    ],
)
async def test_garbage_is_answered_and_others_live_on(service: Service, frames: list[bytes]) -> None:
    vandal = service.peer("vandal")
    await vandal.socket.send_multipart(frames)
    reply = await vandal.receive()
    assert reply.status == INVALID
    assert reply.message
    assert len((await service.rollout("rollout").ask(lease())).lease.leases) == 1


async def test_another_protocol_is_told_which_side_is_older(service: Service) -> None:
    request = lease()
    request.protocol = 99
    reply = await service.rollout("rollout").ask(request)
    assert reply.status == INVALID
    assert f"protocol 99 is not the coordinator's {PROTOCOL}" in reply.message


async def test_another_term_is_stale_at_once(service: Service) -> None:
    request = lease(FOREVER_S)
    request.term = 99
    assert (await service.rollout("rollout").ask(request)).status == STALE


@pytest.fixture
def raw(service: Service) -> Iterator[Callable[[], socket.socket]]:
    """Makes plain TCP connections to the exchange's port."""
    connections: list[socket.socket] = []

    def connect() -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", service.server.port), DEADLINE_S)
        connections.append(connection)
        return connection

    yield connect
    for connection in connections:
        connection.close()


def read_until(connection: socket.socket, mark: bytes) -> None:
    """Read until `mark` has arrived; fail at the socket's own deadline."""
    said = b""
    while mark not in said:
        chunk = connection.recv(65536)
        assert chunk, f"hung up after {said!r}"
        said += chunk


def shake_hands(connection: socket.socket) -> None:
    """Become a DEALER by ZMTP 3.0 with the NULL mechanism."""
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    ready = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
    connection.sendall(b"\x04" + bytes([len(ready)]) + ready)
    read_until(connection, b"ROUTER")


def wait_until_closed(connection: socket.socket) -> None:
    """Wait until the other side has closed it; fail at the socket's own deadline."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(65536):
            pass


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n" * 50, b"\0" * 999, b"\xff" * 999, b"\x16\x03\x01" * 99])
async def test_junk_on_the_port_harms_nobody(service: Service, raw: Callable[[], socket.socket], junk: bytes) -> None:
    connection = raw()
    connection.sendall(junk)
    rollout = service.rollout("rollout")
    assert len((await rollout.ask(lease())).lease.leases) == 1
    connection.close()
    assert len((await rollout.ask(lease())).lease.leases) == 1


@pytest.mark.parametrize("size_bytes", [MAX_MESSAGE_BYTES + 1, 1 << 62])
async def test_an_oversized_frame_ends_its_connection_and_no_other(
    service: Service, raw: Callable[[], socket.socket], size_bytes: int
) -> None:
    connection, rollout = raw(), service.rollout("rollout", step=None)
    await rollout.send(lease(FOREVER_S))
    await asyncio.to_thread(shake_hands, connection)
    connection.sendall(b"\x02" + size_bytes.to_bytes(8, "big") + b"x" * 100)
    await asyncio.to_thread(wait_until_closed, connection)
    service.world.exchange.workers.versions["rollout"] = Version(1, 0)
    service.server.wake("lease")
    assert len((await rollout.receive()).lease.leases) == 1


async def test_a_request_that_breaks_its_handler_undoes_nothing_else(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("no such column")

    monkeypatch.setitem(KINDS, "score", replace(KINDS["score"], answer=broken))
    vandal, rollout = service.peer("vandal", ROLE_REWARD), service.rollout("rollout")
    score = pb.ScoreResult(group_id=2**64 - 1)
    await vandal.send(pb.ExchangeRequest(score=score), number=1)
    await rollout.send(lease(), number=2)
    assert (await rollout.receive()).lease.leases[0].attempt == 1
    reply = await vandal.receive()
    assert reply.status == INVALID
    assert "the coordinator failed on this request" in reply.message
    assert service.world.states()[0] == "leased"
    assert service.notices == []


async def test_a_request_that_fails_half_way_leaves_nothing_behind(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = service.world.run.prompts
    assert prompts is not None
    draw = prompts.draw

    def fail_at_the_third(cursor: int) -> tuple[Any, dict[str, Any]]:
        if cursor == 2:
            raise KeyError("no such column")
        return draw(cursor)

    rollout = service.rollout("rollout")
    with monkeypatch.context() as patch:
        patch.setattr(prompts, "draw", fail_at_the_third)
        reply = await rollout.ask(lease())
    assert reply.status == INVALID
    assert service.world.states() == {}  # two of four groups had been admitted by then
    assert "groups:ever_admitted" not in service.world.counters
    assert [group.group_id for group in (await rollout.ask(lease())).lease.leases] == [0]


async def test_of_workers_that_ask_at_the_same_time_only_the_one_that_breaks_it_gets_none(
    service: Service,
) -> None:
    line = service.rollout("rollout-0")
    async with service.lock:
        for index in range(3):
            line.member_id = f"rollout-{index}"
            service.world.enter(line.member_id)
            service.world.exchange.workers.versions[line.member_id] = Version(1, 0)
            await line.send(lease(), number=index)
        service.world.exchange.workers.versions["rollout-1"] = "no version"  # type: ignore[assignment]
        await line.socket.send(b"\xff")
        assert (await line.receive()).status == INVALID  # so all earlier messages have arrived
    first, broken, last = sorted([await line.receive() for _ in range(3)], key=lambda reply: reply.request_id)
    assert broken.status == INVALID
    assert "the coordinator failed on this request" in broken.message
    given = [group.group_id for reply in (first, last) for group in reply.lease.leases]
    assert sorted(given) == [0, 1]
    assert [service.world.group(group_id)["state"] for group_id in (0, 1, 2)] == [
        "leased",
        "leased",
        "admitted",
    ]


async def test_a_waiting_request_is_answered_empty_at_its_end(service: Service) -> None:
    reply = await service.rollout("rollout", step=None).ask(lease(wait_s=0.05), number=5)
    assert reply.status == OK
    assert reply.WhichOneof("body") == "lease"
    assert list(reply.lease.leases) == []


@pytest.mark.parametrize("wait_s", [math.nan, math.inf, 1e300])
async def test_no_request_waits_for_ever(world: World, wait_s: float) -> None:
    async with serving(world, limits=ServerLimits(wait_s=0.05)) as service:
        assert (await service.rollout("rollout", step=None).ask(lease(wait_s))).status == OK


@pytest.mark.parametrize("wait_s", [0.0, -1.0, -math.inf])
async def test_who_does_not_wait_is_answered_at_once(service: Service, wait_s: float) -> None:
    assert (await service.rollout("rollout", step=None).ask(lease(wait_s))).status == OK


async def test_a_lease_comes_when_a_version_does(service: Service) -> None:
    rollout, other = service.rollout("rollout", step=None), service.rollout("other", step=None)
    await rollout.send(lease(FOREVER_S, room=8))
    await other.ask(lease())  # so the first one waits by now
    service.world.exchange.workers.versions["rollout"] = Version(1, 0)
    service.server.wake("lease")
    assert [group.group_id for group in (await rollout.receive()).lease.leases] == [0, 1, 2, 3]
    await other.send(lease(FOREVER_S))
    service.world.exchange.workers.versions["other"] = Version(1, 0)
    returned = pb.LeaseReturn(group_id=1, attempt=1)
    assert (await rollout.ask(pb.ExchangeRequest(lease_return=returned))).status == COMMITTED
    (again,) = (await other.receive()).lease.leases
    assert (again.group_id, again.attempt) == (1, 2)


async def test_a_request_that_waits_does_not_restore_leases_returned_since(
    service: Service,
) -> None:
    worker, other = service.rollout("worker"), service.rollout("other")
    held = [group.group_id for group in (await worker.ask(lease(room=8))).lease.leases]
    asked = lease(FOREVER_S)
    asked.lease.held.group_ids.extend(held)
    await worker.send(asked, number=7)
    await other.ask(lease())  # so the worker's request waits by now
    returned = pb.LeaseReturn(group_id=1, attempt=1)
    await worker.send(pb.ExchangeRequest(lease_return=returned), number=8)
    replies = {(reply := await worker.receive()).request_id: reply for _ in range(2)}
    assert replies[8].status == COMMITTED
    assert [(again.group_id, again.attempt) for again in replies[7].lease.leases] == [(1, 2)]


async def test_a_worker_on_a_new_connection_has_nothing_on_the_old(service: Service) -> None:
    old, new = service.rollout("rollout", step=None), service.rollout("rollout", step=None)
    await old.send(lease(FOREVER_S), number=7)
    await service.peer("other").ask(lease())  # the old request waits by now
    await new.send(lease(FOREVER_S), number=7)
    await service.peer("another").ask(lease())
    service.world.exchange.workers.versions["rollout"] = Version(1, 0)
    service.server.wake("lease")
    assert [group.group_id for group in (await new.receive()).lease.leases] == [0]
    reply = await old.ask(pb.ExchangeRequest(task=pb.TaskRequest(room=1)), number=8)
    assert reply.request_id == 8  # the first reply on the old connection
    assert service.world.states()[1] == "admitted"


async def test_a_second_question_ends_the_wait_of_the_first(service: Service) -> None:
    rollout = service.rollout("rollout", step=None)
    await rollout.send(lease(FOREVER_S), number=1)
    await rollout.send(lease(FOREVER_S), number=2)
    reply = await rollout.receive()
    assert (reply.request_id, list(reply.lease.leases)) == (1, [])
    service.world.exchange.workers.versions["rollout"] = Version(1, 0)
    service.server.wake("lease")
    assert (await rollout.receive()).request_id == 2


async def test_what_was_asked_before_ends_when_the_next_question_is_answered(service: Service) -> None:
    """Otherwise it would report later that the worker does not hold its newer leases."""
    old, new = service.rollout("rollout", step=None), service.rollout("rollout", step=None)
    asked = lease(FOREVER_S)
    asked.lease.held.SetInParent()
    await old.send(asked, number=1)
    await service.rollout("other", step=None).ask(lease())  # so the first one waits by now
    service.world.exchange.workers.versions["rollout"] = Version(1, 0)
    (given,) = (await new.ask(lease(), number=2)).lease.leases
    reply = await old.receive()
    assert (reply.request_id, reply.WhichOneof("body"), list(reply.lease.leases)) == (1, "lease", [])
    service.server.wake("lease")
    await service.rollout("other", step=None).ask(lease())
    assert service.world.group(given.group_id)["member_id"] == "rollout"


async def test_the_ranks_of_one_learner_wait_side_by_side(service: Service) -> None:
    session = Learner(service.world, world_size=2).session
    ranks = [service.peer(f"learner-{rank}", ROLE_LEARNER) for rank in range(2)]
    for rank, peer in enumerate(ranks):
        asked = pb.BatchRequest(step=0, rank=rank, world_size=2, wait_s=FOREVER_S)
        await peer.send(pb.ExchangeRequest(session=session, batch=asked), number=1)
    await service.peer("other").ask(lease())
    driver, reward = Rollout(service.world), Reward(service.world)
    for group in driver.lease(4):
        driver.finish(group)
    for task in reward.tasks():
        reward.score(task)
    service.server.wake("batch")
    parts = [[group.group_id for group in (await peer.receive()).batch.groups] for peer in ranks]
    assert parts == [[0], [1]]


async def test_a_dead_workers_waiting_request_takes_no_task(service: Service) -> None:
    dead, rollout = service.peer("dead", ROLE_REWARD), service.rollout("rollout")
    await dead.send(pb.ExchangeRequest(task=pb.TaskRequest(room=1, wait_s=FOREVER_S)))
    (group,) = (await rollout.ask(lease())).lease.leases
    service.world.release("dead")
    driver = Rollout(service.world, "rollout")
    assert (await rollout.ask(*driver.result(group))).status == COMMITTED
    reply = await service.peer("alive", ROLE_REWARD).ask(
        pb.ExchangeRequest(task=pb.TaskRequest(room=1, wait_s=FOREVER_S))
    )
    assert [task.group_id for task in reply.task.tasks] == [0]


async def test_a_taken_port_is_said(service: Service) -> None:
    async def ignore(notices: list[Notice]) -> None: ...

    with pytest.raises(Conflict, match=f"cannot listen on 127.0.0.1:{service.server.port}"):
        ExchangeServer(service.world.exchange, asyncio.Lock(), lambda _: None, ignore, "127.0.0.1", service.server.port)


async def test_a_closed_port_is_free_again(world: World) -> None:
    async with serving(world) as first:
        port = first.server.port
    with closing(socket.create_server(("127.0.0.1", port), reuse_port=False)) as server:
        assert server.getsockname()[1] == port


async def test_turns_that_wait_together_share_their_syncs(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most one synced write a turn: all turns that wait when a transaction begins are synced with it."""
    world = make_world(**ENVIRONMENT, grpo={"num_prompts_per_step": 16})
    serving_rollout(world)
    worker = EnvironmentWorker(world)
    groups = worker.lease(16)
    synced = itertools.count()
    sync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (next(synced), sync(fd))[1])
    turns = 0
    async with serving(world) as service:
        peer = service.peer("environment", ROLE_ENVIRONMENT)
        for last in (False, False, True):
            sent = [(held, sample) for held in groups for sample in range(len(held.samples))]
            for number, (held, sample) in enumerate(sent, 1):
                arrays = worker.next_turn(held, sample, Version(1, 0))
                await peer.send(*worker.turn_message(held, sample, arrays, last=last), number)
                held.samples[sample].turns.append(arrays)
            replies = [await peer.receive() for _ in sent]
            assert {reply.status for reply in replies} == {COMMITTED}
            turns += len(sent)
    assert turns == 3 * 16
    assert next(synced) <= turns
