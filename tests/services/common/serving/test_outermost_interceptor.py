"""Calls of every kind leave no cycle in memory, whoever aborted them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.calls.token import metadata
from paceline.errors import Conflict
from paceline.services.common.access.callers import TokenCallers
from paceline.services.common.access.rights import CallerRole, Right
from paceline.services.common.access.token_guard import TokenGuard
from paceline.services.common.serving.grpc_server import GrpcServer, with_status, with_stream_status

CALLS = 20
DEADLINE_S = 60.0


class Refusing:
    """A servicer that refuses."""

    @with_status
    async def One(self, request: bytes, context: Any) -> bytes:
        raise Conflict("no")

    @with_stream_status
    async def Many(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        raise Conflict("no")

    @with_stream_status
    async def Talk(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            raise Conflict("no")
        yield b""


async def stream(sends: bool) -> AsyncIterator[bytes]:
    """Send one message, or none: gRPC's client reports INTERNAL if a call is refused while it sends."""
    if not sends:
        await asyncio.Event().wait()
    yield b"x"


def _register(_: Any, server: grpc.aio.Server) -> None:
    servicer: Any = Refusing()
    handlers = {
        "One": grpc.unary_unary_rpc_method_handler(servicer.One),
        "Many": grpc.unary_stream_rpc_method_handler(servicer.Many),
        "Talk": grpc.stream_stream_rpc_method_handler(servicer.Talk),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))


def aborted() -> int:
    """Return how many errors of aborted calls are in memory.

    It compares types, because `isinstance` asks each object for its class, and torch has one that answers with a
    warning.
    """
    return sum(type(each) is grpc.aio.AbortError for each in gc.get_objects())


@pytest.fixture(scope="module", autouse=True)
def only_new_objects() -> Iterator[None]:
    """Leave the objects of the tests before this file out of each collection and each count: there are a million."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("token", ["secret", "another"])
@pytest.mark.parametrize("method", ["One", "Many", "Talk"])
async def test_an_aborted_call_is_freed_without_the_collector(method: str, token: str) -> None:
    rights = {f"test.Service/{name}": Right(frozenset(CallerRole)) for name in ("One", "Many", "Talk")}
    callers = TokenCallers(lambda: "secret", Path("token"))
    server = GrpcServer("127.0.0.1", 0, TokenGuard(callers, rights=rights))
    server.add(None, _register, "test.Service")
    expected = grpc.StatusCode.FAILED_PRECONDITION if token == "secret" else grpc.StatusCode.UNAUTHENTICATED
    async with server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        kind = {"One": "unary_unary", "Many": "unary_stream", "Talk": "stream_stream"}[method]
        call: Any = getattr(channel, kind)(f"/test.Service/{method}")

        async def refused() -> None:
            request: Any = stream(token == "secret") if method == "Talk" else b"x"
            made = call(request, metadata=metadata(token), timeout=DEADLINE_S)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await made if method == "One" else [each async for each in made]
            assert caught.value.code() is expected

        await refused()
        gc.collect()
        gc.disable()
        before = aborted()
        try:
            for _ in range(CALLS):
                await refused()
            left = aborted() - before
        finally:
            gc.enable()
    assert left < CALLS, "gRPC has a few for the next calls, and the last ones may be ending"
