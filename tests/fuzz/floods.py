"""Floods: connections that say nothing or half a thing, clients that do not read, and more submissions than anybody needs.

Each flood is bounded in number and time, is at loopback ports of this test's own processes, and ends with its connections closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
import uuid
from collections import Counter
from dataclasses import dataclass

import aiohttp
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.calls.backoff import from_error
from paceline.calls.token import Metadata
from paceline.v1 import run_pb2, run_pb2_grpc

CONNECT_S = 5.0
ANSWER_S = 60.0
"""Seconds in which a service answers an honest request while a flood is on."""

SUBMITTERS = 16
"""Submissions at a time."""

BEGINNINGS = (
    b"",
    b"\x00",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
    b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{",
    b"PRI * HTTP/2.0\r\n\r\nSM",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04",
    b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03",
    b"\x16\x03\x01\x02\x00\x01",
)
"""Beginnings of HTTP, HTTP/2, ZMTP and TLS, and of nothing."""


@dataclass(frozen=True)
class Port:
    """A listening port of a service."""

    service: str
    kind: str
    """`grpc`, `exchange`, `agent`, or of HTTP `endpoint`, `page` or `metrics`."""
    address: str
    unread_path: str = ""
    """A path of an HTTP port whose answer is left unread."""


async def half_open(port: Port, number: int, seed: int) -> tuple[int, str]:
    """Open `number` connections that get no further, and ask the service something meanwhile. Return how many were opened,
    and what was wrong, empty for nothing."""
    host, _, number_of_port = port.address.rpartition(":")
    dice, opened = random.Random(f"{seed}/{port.address}"), 0
    writers: list[asyncio.StreamWriter] = []
    try:
        for _ in range(number):
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    _, writer = await asyncio.open_connection(host.strip("[]"), int(number_of_port))
                opened += 1
                writers.append(writer)
                writer.write(dice.choice(BEGINNINGS))
        return opened, await fault_of(port)
    finally:
        for writer in writers:
            writer.transport.abort()


async def unread(port: Port, number: int) -> int:
    """Ask `number` times for an answer that is not read; return how many were asked for."""
    host, _, number_of_port = port.address.rpartition(":")
    loop, clients, asked = asyncio.get_running_loop(), [], 0
    try:
        for _ in range(number):
            client = socket.socket()
            clients.append(client)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    await loop.sock_connect(client, (host.strip("[]"), int(number_of_port)))
                    request = f"GET {port.unread_path} HTTP/1.1\r\nHost: localhost\r\n\r\n"
                    await loop.sock_sendall(client, request.encode() * 20)
                    asked += 1
        return asked
    finally:
        for client in clients:
            client.close()


async def unread_watches(address: str, run_id: str, number: int, credentials: Metadata) -> Counter[str]:
    """Watch a run `number` times at once and read nothing; return the calls by how they went."""
    found: Counter[str] = Counter()
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        watch = run_pb2_grpc.RunServiceStub(channel).Watch
        calls = [watch(run_pb2.WatchRequest(run_id=run_id), metadata=credentials) for _ in range(number)]
        for call in calls:
            with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    await call.initial_metadata()
            found["refused" if call.done() else "streams"] += 1
        for call in calls:
            call.cancel()
    return found


async def fault_of(port: Port) -> str:
    """Return what is wrong with a service that should answer now; empty for one that does."""
    started_s, fault = time.monotonic(), ""
    while time.monotonic() - started_s < ANSWER_S:
        try:
            async with asyncio.timeout(ANSWER_S):
                if port.kind == "grpc":
                    async with grpc.aio.insecure_channel(port.address) as channel:
                        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
                elif port.unread_path:
                    async with (
                        aiohttp.ClientSession() as client,
                        client.get(f"http://{port.address}{port.unread_path}") as answer,
                    ):
                        await answer.read()
                        if answer.status not in (200, 429):  # 429: this address has its share
                            raise OSError(f"it answers {answer.status}")
                return ""
        except (grpc.aio.AioRpcError, aiohttp.ClientError, OSError, TimeoutError) as error:
            fault = f"{port.service} ({port.address}) does not answer in a flood: {error}"
            await asyncio.sleep(0.5)  # it may have closed a full port's newest connection, and says when to come again
    return fault


async def submissions(address: str, spec_yaml: str, number: int, credentials: Metadata) -> Counter[str]:
    """Submit a spec `number` times, SUBMITTERS at a time; return the calls by status, and `without hint` those that were refused
    without a time to come again."""
    found: Counter[str] = Counter()
    left = iter(range(number))
    async with grpc.aio.insecure_channel(address) as channel:
        submit = run_pb2_grpc.RunServiceStub(channel).Submit

        async def submit_some() -> None:
            for _ in left:
                request = run_pb2.SubmitRequest(spec_yaml=spec_yaml, submission=uuid.uuid4().hex)
                try:
                    await submit(request, timeout=ANSWER_S, metadata=credentials)
                    found["queued"] += 1
                except grpc.aio.AioRpcError as error:
                    found[error.code().name] += 1
                    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and from_error(error) is None:
                        found["without hint"] += 1

        async with asyncio.TaskGroup() as tasks:
            for _ in range(SUBMITTERS):
                tasks.create_task(submit_some())
    return found
