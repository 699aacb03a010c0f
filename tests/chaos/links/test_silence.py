"""A link that goes silent is noticed at both ends while the silence lasts, and what was not answered comes when it is over."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from links.proxy import Proxy

from paceline.services.common.serving import endpoints as zmq_keepalive
from paceline.services.common.serving.grpc_server import GrpcServer
from paceline.services.common.worker.membership import Membership
from paceline.services.coordinator.exchange.transport.router_socket import ExchangeSocket, PendingRequest, parse
from paceline.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import PROTOCOL

DEADLINE_S = 60.0
Reports = asyncio.Queue[worker_pb2.ConnectRequest]


class Coordinator(worker_pb2_grpc.WorkerServiceServicer):
    """Keeps what workers say; its exchange is a real socket that nobody answers at by itself."""

    def __init__(self) -> None:
        self.reports: Reports = asyncio.Queue()
        self.socket = ExchangeSocket("127.0.0.1", 0)
        self.exchange = Proxy(lambda: f"127.0.0.1:{self.socket.port}", messages=True)

    async def Connect(
        self, request_iterator: AsyncIterator[worker_pb2.ConnectRequest], context: Any
    ) -> AsyncIterator[worker_pb2.ConnectResponse]:
        """Welcome, then only ears."""
        welcome = worker_pb2.Welcome(term=1, exchange_endpoint=f"tcp://{self.exchange.address}")
        yield worker_pb2.ConnectResponse(welcome=welcome)
        async for report in request_iterator:
            self.reports.put_nowait(report)

    async def hear(self, kind: str) -> None:
        """The next report of a kind, from here on."""
        while not self.reports.empty():
            self.reports.get_nowait()
        async with asyncio.timeout(DEADLINE_S):
            while (await self.reports.get()).WhichOneof("report") != kind:
                pass

    async def take(self) -> PendingRequest:
        """The next request at the exchange; introductions ask for nothing."""
        received: list[PendingRequest] = []

        def has_come() -> bool:
            message = self.socket.receive()
            request = parse(message, 30.0) if message else None
            received.extend([request] if request and request.kind else [])
            return bool(received)

        await until(has_come)
        return received[0]


async def until(true: Callable[[], bool]) -> None:
    pause = threading.Event()
    deadline_s = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline_s
        await asyncio.to_thread(pause.wait, 0.01)


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Coordinator, Proxy, Membership]]:
    """A worker that belongs to a coordinator, and the proxy before the control plane."""
    monkeypatch.setattr(zmq_keepalive, "PING_S", 0.1)
    monkeypatch.setattr(zmq_keepalive, "SILENCE_S", 0.5)

    async def on_directive(_: worker_pb2.ConnectResponse) -> None:
        return

    def hello() -> worker_pb2.Hello:
        return worker_pb2.Hello(role=common_pb2.ROLE_ROLLOUT, member_id="rollout-1", protocol=PROTOCOL)

    coordinator, server = Coordinator(), GrpcServer("127.0.0.1", 0)
    server.add(coordinator, worker_pb2_grpc.add_WorkerServiceServicer_to_server, "paceline.v1.WorkerService")
    control = Proxy(lambda: f"127.0.0.1:{server.port}")
    async with server:
        membership = Membership(control.address, hello, on_directive)
        belonging = asyncio.create_task(membership.run())
        await coordinator.hear("heartbeat")
        yield coordinator, control, membership
        belonging.cancel()
        await asyncio.wait((belonging,))
        await asyncio.to_thread(control.close)
    await asyncio.to_thread(coordinator.exchange.close)
    coordinator.socket.close()


async def test_both_ends_of_the_exchange_notice_its_silence(
    world: tuple[Coordinator, Proxy, Membership],
) -> None:
    coordinator, _, membership = world
    request = pb.ExchangeRequest(run_id="run-1", lease=pb.LeaseRequest(room=1))
    asked = asyncio.create_task(membership.request(request))
    first = await coordinator.take()
    coordinator.exchange.harm("drop")
    await until(lambda: coordinator.exchange.met["unheard"] >= 2)  # both have hung up
    coordinator.exchange.repair()
    again = await coordinator.take()
    assert again.request.lease == first.request.lease
    reply = pb.ExchangeReply(protocol=PROTOCOL, request_id=again.request.request_id, term=1)
    coordinator.socket.send(again.identity, reply)
    async with asyncio.timeout(DEADLINE_S):
        await asked
    await coordinator.hear("heartbeat")


@pytest.mark.slow
async def test_both_ends_of_the_control_plane_notice_its_silence(
    world: tuple[Coordinator, Proxy, Membership],
) -> None:
    coordinator, control, _ = world
    control.harm("drop")
    await until(lambda: control.met["unheard"] >= 2)
    control.repair()
    await coordinator.hear("heartbeat")
