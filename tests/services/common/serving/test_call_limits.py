"""Calls beyond a limit are refused with the time to wait, at a real server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.calls.backoff import from_error
from paceline.calls.token import metadata
from paceline.services.common.access.rights import RPCS, Caller, CallerRole
from paceline.services.common.access.token_guard import TokenGuard
from paceline.services.common.serving.call_limits import (
    LIMITS,
    NO_LIMIT,
    OPEN_STREAM,
    USUAL,
    CallLimits,
    Limit,
    Rates,
)
from paceline.services.common.serving.grpc_server import GrpcServer, with_status, with_stream_status
from paceline.v1 import run_pb2, run_pb2_grpc

WAIT_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Runs(run_pb2_grpc.RunServiceServicer):
    """Answers `Get`; `Watch` streams an event and then waits."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.handled = 0

    @with_status
    async def Get(self, request: Any, context: Any) -> run_pb2.GetResponse:
        self.handled += 1
        return run_pb2.GetResponse()

    @with_stream_status
    async def Watch(self, request: Any, context: Any) -> AsyncIterator[run_pb2.WatchResponse]:
        yield run_pb2.WatchResponse(sequence=1)
        await self.go.wait()


class Names:
    """Callers whose token is their name."""

    async def caller(self, token: str, certificate: str = "") -> Caller:
        return Caller(token, frozenset(CallerRole))


@contextlib.asynccontextmanager
async def serving(limits: dict[str, Limit], usual: Limit = USUAL, clock: Any = None) -> AsyncIterator[tuple[Runs, Any]]:
    counted = CallLimits(limits, usual, Rates(clock or Clock()))
    server = grpc.aio.server(interceptors=[TokenGuard(Names()), counted])
    servicer = Runs()
    run_pb2_grpc.add_RunServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield servicer, run_pb2_grpc.RunServiceStub(channel)
    finally:
        await server.stop(None)


def test_a_pace_is_kept_and_a_burst_allowed() -> None:
    clock, limit = Clock(), Limit(per_s=2.0, burst=3, under_way=1, in_all=1)
    rates, key = Rates(clock), ("ann", "Get")
    assert [rates.wait_s(key, limit) for _ in range(4)] == [0, 0, 0, pytest.approx(0.5)]
    assert rates.wait_s(("ben", "Get"), limit) == 0
    assert rates.wait_s(("ann", "List"), limit) == 0
    clock.now_s += 0.25
    assert rates.wait_s(key, limit) == pytest.approx(0.25), "a refused call costs nothing"
    clock.now_s += 0.25
    assert rates.wait_s(key, limit) == 0
    assert rates.wait_s(key, limit) == pytest.approx(0.5)
    clock.now_s += 1000.0
    assert [rates.wait_s(key, limit) for _ in range(4)] == [0, 0, 0, pytest.approx(0.5)], "a pause saves up no more"


def test_what_is_kept_of_callers_is_bounded() -> None:
    rates, limit = Rates(Clock(), max_kept=10), Limit(per_s=1.0, burst=1, under_way=1, in_all=1)
    for number in range(100):
        assert rates.wait_s((str(number), "Get"), limit) == 0
    assert len(rates) == 10
    assert rates.wait_s(("99", "Get"), limit) > 0
    assert rates.wait_s(("0", "Get"), limit) == 0, "the quietest began anew"


async def test_a_caller_that_calls_too_often_waits_and_others_do_not() -> None:
    clock = Clock()
    async with serving({}, Limit(per_s=1.0, burst=2, under_way=9, in_all=9), clock) as (servicer, stub):
        for _ in range(2):
            await stub.Get(run_pb2.GetRequest(), metadata=metadata("ann"))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Get(run_pb2.GetRequest(), metadata=metadata("ann"))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.value.details() == (
            "ann calls paceline.v1.RunService/Get more than 1 times a second; call again after 1.0 s"
        )
        assert from_error(refused.value) == 1.0
        assert servicer.handled == 2, "the handler was not called"
        await stub.Get(run_pb2.GetRequest(), metadata=metadata("ben"))
        clock.now_s += 1.0
        await stub.Get(run_pb2.GetRequest(), metadata=metadata("ann"))


async def test_streams_of_one_caller_and_of_all_are_bounded_and_freed() -> None:
    limits = {"paceline.v1.RunService/Watch": Limit(per_s=1.0, burst=10_000, under_way=2, in_all=3)}

    async def opened(stub: Any, name: str) -> Any:
        call = stub.Watch(run_pb2.WatchRequest(), metadata=metadata(name))
        assert (await asyncio.wait_for(call.read(), WAIT_S)).sequence == 1
        return call

    async def refusal(stub: Any, name: str) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await opened(stub, name)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert from_error(refused.value) == 1.0
        return str(refused.value.details())

    async with serving(limits) as (_, stub):
        held = [await opened(stub, "ann"), await opened(stub, "ann")]
        assert (await refusal(stub, "ann")).startswith("ann has 2 calls of paceline.v1.RunService/Watch in progress")
        held.append(await opened(stub, "ben"))
        assert (await refusal(stub, "cid")).startswith(
            "3 calls of paceline.v1.RunService/Watch are in progress at this server"
        )
        held[0].cancel()
        async with asyncio.timeout(WAIT_S):
            while len(held) == 3:  # until the server has noticed the end of the first
                with contextlib.suppress(grpc.aio.AioRpcError):
                    held.append(await opened(stub, "ann"))


async def test_streams_without_a_token_are_bounded_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    tight = {"grpc.health.v1.Health/Watch": Limit(per_s=1.0, burst=99, under_way=1, in_all=9)}
    monkeypatch.setattr("paceline.services.common.serving.grpc_server.CallLimits", lambda **_: CallLimits(tight))
    async with (
        GrpcServer("127.0.0.1", 0) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        first = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await asyncio.wait_for(first.read(), WAIT_S)).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError, match=r"127\.0\.0\.1 has 1 calls"):
            await stub.Watch(health_pb2.HealthCheckRequest()).read()
        answer = await stub.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_every_limit_is_of_a_method_that_exists() -> None:
    open_streams = {name for name, limit in LIMITS.items() if limit is OPEN_STREAM}
    assert open_streams == {
        "grpc.health.v1.Health/Watch",
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    }
    assert LIMITS.keys() - open_streams <= RPCS.keys()
    assert USUAL.in_all < NO_LIMIT
