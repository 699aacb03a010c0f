"""Connections without an accepted call are bounded by address, and those of callers stay."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import grpc
import pytest

from paceline.token import metadata
from protos.paceline.v1 import status_pb2, status_pb2_grpc
from services.common import stranger_connections
from services.common.access.caller import Caller, CallerRole
from services.common.grpc_server import GrpcServer
from services.common.open_connections import OpenConnections
from services.common.stranger_connections import StrangerConnections
from services.common.token_guard import TokenGuard

WAIT_S = 60.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


class Names:
    """Callers whose token is their name."""

    async def caller(self, token: str, certificate: str = "") -> Caller:
        return Caller(token, frozenset(CallerRole))


class Status(status_pb2_grpc.StatusServiceServicer):
    async def Status(self, request: Any, context: Any) -> status_pb2.StatusResponse:
        return status_pb2.StatusResponse(advice="all is well")


async def test_strangers_of_one_address_are_bounded_and_a_caller_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = StrangerConnections(max_of_address=2)
    monkeypatch.setattr("services.common.grpc_server.StrangerConnections", lambda: kept)
    server = GrpcServer("127.0.0.1", 0, TokenGuard(Names()))
    server.add(Status(), status_pb2_grpc.add_StatusServiceServicer_to_server, "paceline.v1.StatusService")
    async with server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = status_pb2_grpc.StatusServiceStub(channel)
        await stub.Status(status_pb2.StatusRequest(), metadata=metadata("ann"))
        strangers = []
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(PREFACE)
            await asyncio.wait_for(reader.read(1), WAIT_S)  # gRPC has taken it
            strangers.append((reader, writer))
        check = lambda: asyncio.to_thread(kept.check, {server.port})  # noqa: E731
        assert await check() == 0, "each may be about to call"
        assert await check() == 3
        reads = [asyncio.create_task(reader.read()) for reader, _ in strangers]
        done: set[Any] = set()
        async with asyncio.timeout(WAIT_S):
            while len(done) < 3:
                done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
        assert await check() == 0
        answer = await stub.Status(status_pb2.StatusRequest(), metadata=metadata("ann"))
        assert answer.advice == "all is well"
        for read, (_, writer) in zip(reads, strangers, strict=True):
            read.cancel()
            writer.close()


def test_an_ended_connection_counts_no_more_before_its_server_has_closed_it() -> None:
    kept = StrangerConnections(max_of_address=0)
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listener.getsockname()[1]
        for _ in range(2):
            sockets.enter_context(socket.create_connection(("127.0.0.1", port)))
            sockets.enter_context(listener.accept()[0])
        assert [kept.check({port}) for _ in range(3)] == [0, 2, 0]


def test_few_open_files_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenConnections, "to", lambda *_: pytest.fail("the kernel was asked"))
    assert StrangerConnections(max_of_address=1 << 20).check({1}) == 0


def test_a_system_that_does_not_say_leaves_callers_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(OpenConnections, "to", refuse)
    kept = StrangerConnections(max_of_address=0)
    kept.accepted("ipv4:10.0.0.1:1")
    assert kept.check({1}) == 0
    assert kept.num_callers == 1


def test_callers_that_have_left_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stranger_connections, "MAX_NAMED", 3)
    kept = StrangerConnections(max_of_address=1 << 20)
    for port in range(1, 10):
        kept.accepted(f"ipv4:10.0.0.1:{port}")
    assert kept.num_callers == 9
    assert kept.check({1}) == 0
    assert kept.num_callers == 0
