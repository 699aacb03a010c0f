"""The targets of messages: every rpc of every service, and the exchange. Each source sends in bounded time and reads what comes
back without believing it.

Half of what is said on the control plane and on the exchange comes from members that the coordinator has accepted, so that it
meets the handlers behind the first check; the rest from strangers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from types import ModuleType
from typing import Any

import grpc
import numpy as np
import zmq
import zmq.asyncio
from google.protobuf.descriptor import Descriptor, MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from messages import Known, Maker

from paceline.calls.token import Metadata
from paceline.groups import Completion, VersionSpan
from paceline.v1 import (
    access_pb2,
    bundle_pb2,
    common_pb2,
    learner_pb2,
    records_pb2,
    registry_pb2,
    reward_pb2,
    rollout_pb2,
    run_pb2,
    status_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import PROTOCOL, encode_reference, encode_result

CALL_S = 3.0
STREAM_S = 0.3
"""Time that a stream is read."""

ORDERS = {"Cancel", "Pause", "Resume", "DropGroups", "Drain"}
"""Orders that a person with the token may give; only strangers send them, because they would be obeyed."""

EVERYWHERE = (health_pb2, reflection_pb2)
"""Services of each gRPC server, which need no token."""

SERVICES: dict[str, tuple[ModuleType, ...]] = {
    "coordinator": (
        *(
            run_pb2,
            worker_pb2,
            bundle_pb2,
            records_pb2,
            status_pb2,
            access_pb2,
            registry_pb2,
        ),
        *EVERYWHERE,
    ),
    "rollout": (rollout_pb2, *EVERYWHERE),
    "reward": (reward_pb2, *EVERYWHERE),
    "environment": EVERYWHERE,
    "learner": (learner_pb2, *EVERYWHERE),
}


def methods_of(role: str) -> list[MethodDescriptor]:
    """Every rpc of the services of a role."""
    return [
        method
        for module in SERVICES[role]
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]


class Rpcs:
    """Calls every rpc of one server."""

    def __init__(self, role: str, address: str, seed: int | str, known: Known, credentials: Metadata):
        self._maker = Maker(seed, known)
        self._methods = methods_of(role)
        self._credentials = credentials
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.max_receive_message_length", 256 << 20)])
        self.sent = 0

    async def send_one(self) -> None:
        """One call of an rpc that is due."""
        method = self._methods[self.sent % len(self._methods)]
        self.sent += 1
        stranger = method.name in ORDERS or self._maker.random.random() < 0.3
        metadata = () if stranger else self._credentials
        path = f"/{method.containing_service.full_name}/{method.name}"
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.TimeoutError, UnicodeDecodeError):
            if method.client_streaming:
                await self._talk(path, method.input_type, metadata)
            elif method.server_streaming:
                call = self._channel.unary_stream(path, _as_is, _as_is)(
                    self._maker.bytes_of(method.input_type), timeout=STREAM_S, metadata=metadata
                )
                async for _ in call:
                    pass
            else:
                await self._channel.unary_unary(path, _as_is, _as_is)(
                    self._maker.bytes_of(method.input_type), timeout=CALL_S, metadata=metadata
                )

    async def close(self) -> None:
        """Ends the connection."""
        await self._channel.close(None)

    async def _talk(self, path: str, kind: Descriptor, metadata: Metadata) -> None:
        """A stream of messages; mostly one that begins as it should."""
        reports = [self._maker.bytes_of(kind) for _ in range(self._maker.random.randrange(1, 8))]
        if self._maker.random.random() < 0.5:
            hello = self._maker.message(worker_pb2.Hello.DESCRIPTOR)
            reports.insert(0, worker_pb2.ConnectRequest(hello=hello).SerializeToString())

        async def say() -> AsyncIterator[bytes]:
            for report in reports:
                yield report

        call = self._channel.stream_stream(path, _as_is, _as_is)(say(), timeout=STREAM_S, metadata=metadata)
        async for _ in call:
            pass
        self.sent += len(reports) - 1


class Impostor:
    """A member that the coordinator has accepted and that then says anything, on its stream and on the exchange."""

    def __init__(self, role: common_pb2.Role.ValueType, name: str, address: str, known: Known, credentials: Metadata):
        self._maker = Maker(name, known)
        self._role, self._name, self._credentials = role, name, credentials
        self._channel = grpc.aio.insecure_channel(address)
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._call: Any = None
        self._listener: asyncio.Task[None] | None = None
        self.sent = 0
        """Reports, and frames for the exchange."""
        self.joined = 0
        """Number of times that it became a member."""

    async def join(self) -> None:
        """Says Hello, learns term, secret and endpoint, and keeps the stream. Raises what gRPC raises when it is refused."""
        self._call = worker_pb2_grpc.WorkerServiceStub(self._channel).Connect(metadata=self._credentials)
        # Not rank 0, which would get the run.
        hello = worker_pb2.Hello(role=self._role, member_id=self._name, protocol=PROTOCOL, rank=1, world_size=2)
        await self._call.write(worker_pb2.ConnectRequest(hello=hello))
        welcome = (await asyncio.wait_for(self._call.read(), CALL_S)).welcome
        self._maker.known |= {"term": [welcome.term], "secret": [welcome.secret], "member_id": [self._name]}
        if self._listener is not None:
            self._listener.cancel()
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDTIMEO, 1000)
        self._socket.connect(welcome.exchange_endpoint)
        self._listener = asyncio.create_task(self._listen(self._socket))

    async def send_one(self) -> None:
        """One report or one request; joins again when it was put out."""
        self.sent += 1
        if self._call is None or self._call.done():
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.TimeoutError):
                await self.join()
                self.joined += 1
        elif self._maker.random.random() < 0.1:
            report = self._maker.message(worker_pb2.ConnectRequest.DESCRIPTOR)
            if report.WhichOneof("report") != "leave":
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await self._call.write(report)
        elif self._socket is not None:
            frames = exchange_message(self._maker)
            self.sent += len(frames) - 1
            with contextlib.suppress(zmq.Again):
                await self._socket.send_multipart(frames)

    async def close(self) -> None:
        """Leaves without a word."""
        if self._listener is not None:
            self._listener.cancel()
        if self._socket is not None:
            self._socket.close(linger=0)
        self._context.term()
        await self._channel.close(None)

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        """Reads what is answered, or the other side would have to keep it."""
        while True:
            frames = await socket.recv_multipart()
            with contextlib.suppress(Exception):  # whatever it is
                reply = pb.ExchangeReply.FromString(frames[0])
                self._learn([*reply.lease.leases, *reply.task.tasks, *reply.batch.groups])

    def _learn(self, seen: Sequence[Any]) -> None:
        """Groups that it has heard of make better lies."""
        if seen:
            self._maker.known["group_id"] = [each.group_id for each in seen][-20:]
            self._maker.known["attempt"] = [1, 2, *(getattr(each, "attempt", 1) for each in seen[-3:])]
            self._maker.known["digest"] = [getattr(each, "digest", "") for each in seen[-20:]]


class Strangers:
    """Exchange messages from connections that belong to nobody, sometimes to a fresh one."""

    def __init__(self, endpoint: str, seed: int | str, known: Known):
        self._maker = Maker(seed, known)
        self._endpoint = endpoint
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self.sent = 0

    async def send_one(self) -> None:
        """One message, honest framing or none."""
        if self._socket is None or self._maker.random.random() < 0.002:
            self._connect()
        assert self._socket is not None
        if self._maker.random.random() < 0.8:
            frames = exchange_message(self._maker)
        else:
            number = self._maker.random.randrange(1, 6)
            frames = [self._maker.random.randbytes(self._maker.random.randrange(300)) for _ in range(number)]
        self.sent += len(frames)
        with contextlib.suppress(zmq.Again):
            await self._socket.send_multipart(frames)
        with contextlib.suppress(zmq.Again):
            while True:
                await self._socket.recv_multipart(zmq.NOBLOCK)

    async def close(self) -> None:
        """Ends the connection."""
        if self._socket is not None:
            self._socket.close(linger=0)
        self._context.term()

    def _connect(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDTIMEO, 1000)
        self._socket.connect(self._endpoint)


def exchange_message(maker: Maker) -> list[bytes]:
    """A request with payload frames, some of which belong to it."""
    request = maker.message(pb.ExchangeRequest.DESCRIPTOR)
    dice, frames = maker.random, []
    body = request.WhichOneof("body")
    if body in ("group", "lease_return") and dice.random() < 0.7:
        prompt, completions = np.array([2, 3, 4], np.int32), [_completion(maker) for _ in range(4)]
        frames = encode_result(prompt, completions)[: 2 if body == "group" else 1]
    elif body == "score" and dice.random() < 0.3:
        frames = [encode_reference([np.zeros(4, np.float32)])]
    elif dice.random() < 0.1:
        frames = [dice.randbytes(dice.randrange(1000)) for _ in range(dice.randrange(4))]
    return [maker.damaged(request.SerializeToString()), *(maker.damaged(frame) for frame in frames)]


def _completion(maker: Maker) -> Completion:
    dice, length = maker.random, maker.random.randrange(1, 9)
    ids = [dice.choice((2, 3, 5, 8, -1, 10**6, 2**31 - 1) if dice.random() < 0.1 else (2, 3, 5)) for _ in range(length)]
    logprobs = np.full(length, dice.choice((-0.5, 0.0, 1.0, -1e38, 3e38)), np.float32)
    sampler = dice.choice(("", "", "rollout-1", "\n", "é", "x" * 65))
    span = VersionSpan(dice.choice((1, 1, 9, 2**31)), dice.choice((0, 1, 10**9, -1)), 0, length, sampler)
    return Completion(np.array(ids, np.int32), logprobs, (span,), "length", "12")


def _as_is(content: bytes) -> bytes:
    return content
