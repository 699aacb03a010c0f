"""The exchange behind real sockets, and peers that speak to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio
from exchange_drivers import World

from paceline.groups import Version
from paceline.services.common.serving.endpoints import in_brackets, use_ipv6
from paceline.services.coordinator.exchange.notices import Notice
from paceline.services.coordinator.exchange.transport.receiver import DEFAULT_LIMITS, ServerLimits
from paceline.services.coordinator.exchange.transport.server import ExchangeServer
from paceline.v1 import exchange_pb2 as pb
from paceline.v1.common_pb2 import ROLE_ROLLOUT, Role
from paceline.wire import PROTOCOL

DEADLINE_S = 60.0


FOREVER_S = 30.0
"""Longer than any test: a reply that comes earlier was not the end of a wait."""


class Peer:
    """A DEALER of its own."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        world: World,
        endpoint: str,
        member_id: str,
        role: Role.ValueType = ROLE_ROLLOUT,
    ):
        self.world = world
        self.role = role
        self.member_id = member_id
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        use_ipv6(self.socket, endpoint)
        self.socket.connect(endpoint)
        world.enter(member_id, role)

    async def send(self, request: pb.ExchangeRequest, frames: list[bytes] | None = None, number: int = 1) -> None:
        """Sends a request."""
        request.protocol = request.protocol or PROTOCOL
        request.term = request.term or self.world.ledger.term
        request.run_id, request.request_id, request.member_id = self.world.run_id, number, self.member_id
        request.secret = request.secret or self.world.enter(self.member_id, self.role).stream.secret
        await self.socket.send_multipart([request.SerializeToString(), *(frames or [])])

    async def receive(self) -> pb.ExchangeReply:
        """The next reply."""
        header, *_ = await asyncio.wait_for(self.socket.recv_multipart(), DEADLINE_S)
        return pb.ExchangeReply.FromString(header)

    async def ask(
        self, request: pb.ExchangeRequest, frames: list[bytes] | None = None, number: int = 1
    ) -> pb.ExchangeReply:
        """Sends a request and waits for its reply."""
        await self.send(request, frames, number)
        reply = await self.receive()
        assert reply.request_id == number
        return reply


class Service:
    """The server on a free port, its peers, and the notices that it left."""

    def __init__(self, world: World, context: zmq.asyncio.Context, host: str, limits: ServerLimits):
        self.world = world
        self.host = host
        self.context = context
        self.notices: list[Notice] = []
        self.peers: list[Peer] = []
        self.lock = asyncio.Lock()
        """Nothing is answered while a test holds it."""
        self.server = ExchangeServer(
            world.exchange, self.lock, lambda _: None, self._on_notices, host, 0, limits=limits
        )

    def peer(self, member_id: str, role: Role.ValueType = ROLE_ROLLOUT) -> Peer:
        """A new connection of a member."""
        endpoint = f"tcp://{in_brackets(self.host)}:{self.server.port}"
        peer = Peer(self.context, self.world, endpoint, member_id, role)
        self.peers.append(peer)
        return peer

    def rollout(self, member_id: str, step: int | None = 0) -> Peer:
        """A connection of a rollout worker that holds a version."""
        if step is not None:
            self.world.exchange.workers.versions[member_id] = Version(1, step)
        return self.peer(member_id)

    async def _on_notices(self, notices: list[Notice]) -> None:
        self.notices += notices


@asynccontextmanager
async def serving(
    world: World, host: str = "127.0.0.1", limits: ServerLimits = DEFAULT_LIMITS
) -> AsyncIterator[Service]:
    context = zmq.asyncio.Context()
    service = Service(world, context, host, limits)
    loop = asyncio.create_task(service.server.serve())
    try:
        yield service
        assert not loop.done()
    finally:
        loop.cancel()
        await asyncio.wait([loop])
        for peer in service.peers:
            peer.socket.close()
        context.term()
        service.server.close()


def lease(wait_s: float = 0.0, room: int = 2) -> pb.ExchangeRequest:
    return pb.ExchangeRequest(lease=pb.LeaseRequest(room=room, wait_s=wait_s))
