"""A reward worker that joins a coordinator and has no work, for tests of who is let in."""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio
from zmq.utils import z85

from paceline.services.common.worker.membership import Membership
from paceline.v1 import common_pb2, worker_pb2
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import PROTOCOL


class JoinedWorker:
    """One worker, with the certificate and the token that this process has when it connects."""

    def __init__(self, address: str, name: str):
        self.name = name
        self.welcome = worker_pb2.Welcome()
        self.is_here = asyncio.Event()
        hello = worker_pb2.Hello(role=common_pb2.ROLE_REWARD, member_id=name, protocol=PROTOCOL)
        self.membership = Membership(address, lambda: hello, self._take)
        self.task = asyncio.create_task(self.membership.run())

    async def _take(self, directive: worker_pb2.ConnectResponse) -> None:
        if directive.WhichOneof("directive") == "welcome":
            self.welcome = directive.welcome
            self.is_here.set()

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.wait((self.task,))

    async def answer_to_forged(self, other: JoinedWorker) -> pb.ExchangeReply:
        """Send a request with the id and the secret of another worker over a connection with this one's key."""
        forged = pb.ExchangeRequest(
            protocol=PROTOCOL,
            member_id=other.name,
            term=other.welcome.term,
            secret=other.welcome.secret,
            request_id=1 << 40,
            run_id="none",
            task=pb.TaskRequest(),
        )
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.curve_publickey = self.membership.exchange.keys[0]
            socket.curve_secretkey = self.membership.exchange.keys[1]
            socket.curve_serverkey = z85.encode(self.welcome.exchange_key)
            socket.connect(self.welcome.exchange_endpoint)
            await socket.send(forged.SerializeToString())
            return pb.ExchangeReply.FromString((await socket.recv_multipart())[0])
