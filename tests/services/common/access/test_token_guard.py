"""Authentication: a server behind the guard, callers with and without the token, and a worker without it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.calls.token import make_token, metadata, open_channel, read_token
from paceline.client import Client
from paceline.errors import PacelineError
from paceline.rate_limited_log import RateLimitedLog
from paceline.services.common.access import token_guard
from paceline.services.common.access.callers import TokenCallers
from paceline.services.common.access.rights import CallerRole, Right
from paceline.services.common.access.token_guard import Call, TokenGuard, worker_guard
from paceline.services.common.serving.grpc_server import GrpcServer
from paceline.services.common.worker.membership import Membership
from paceline.services.local.cluster import LocalCluster
from paceline.services.reward.main import RewardServicer
from paceline.spec import ClusterSection
from paceline.v1 import common_pb2, reward_pb2, reward_pb2_grpc, worker_pb2, worker_pb2_grpc
from paceline.wire import PROTOCOL

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A coordinator whose token is in its directory, as without any option or variable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_TOKEN_FILE", "")
        patch.delenv("PACELINE_TOKEN_FILE")
        started = LocalCluster(tmp_path_factory.mktemp("guarded"), ClusterSection())
        try:
            started.start_coordinator()
            yield started
        finally:
            started.stop()


@pytest.fixture
def other_token(tmp_path: Path) -> Path:
    """A token that is not the coordinator's."""
    make_token(tmp_path / "other")
    return tmp_path / "other"


def test_the_token_lies_in_the_directory_and_the_process_that_started_the_cluster_has_it(
    cluster: LocalCluster,
) -> None:
    assert cluster.token_file == cluster.directory / "token"
    assert cluster.token_file.stat().st_mode & 0o777 == 0o600
    with Client(cluster.address) as client:
        assert client.runs() == []
        assert client.members() == []


def test_without_the_token_every_call_is_refused_with_the_file_that_would_help(
    cluster: LocalCluster, other_token: Path, tmp_path: Path
) -> None:
    other = f"the call has another token; this service requires the token in the file {cluster.token_file}"
    none = f"this process has no token, because the file {tmp_path / 'none'} is missing"
    for path, wanted in ((tmp_path / "none", none), (other_token, other)):
        with Client(cluster.address, token_file=path) as client:
            for call in (client.runs, client.members, lambda: client.cancel("x")):
                with pytest.raises(PacelineError, match=wanted):
                    call()
            with pytest.raises(PacelineError, match=wanted):
                list(client.watch("x"))


def test_a_stream_without_the_token_is_refused_before_its_first_message_counts(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    hello = worker_pb2.Hello(role=common_pb2.ROLE_ROLLOUT, member_id="stranger", protocol=PROTOCOL)
    with open_channel(cluster.address, tmp_path / "none") as channel:
        stream = worker_pb2_grpc.WorkerServiceStub(channel).Connect(
            iter([worker_pb2.ConnectRequest(hello=hello)]), timeout=DEADLINE_S
        )
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
    with Client(cluster.address) as client:
        assert client.members() == []


async def test_what_a_stranger_sends_is_not_read() -> None:
    """Each call may bring 64 MB, and strangers may make any number of calls."""
    read: list[int] = []

    def deserialize(content: bytes) -> bytes:
        read.append(len(content))
        return content

    async def answer(request: bytes, context: Any) -> bytes:
        return b""

    async def answer_in_parts(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b""

    handlers = {
        "One": grpc.unary_unary_rpc_method_handler(answer, request_deserializer=deserialize),
        "Many": grpc.unary_stream_rpc_method_handler(answer_in_parts, request_deserializer=deserialize),
    }

    def register(_: Any, server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))

    rights = {f"test.Service/{name}": Right(frozenset(CallerRole)) for name in handlers}
    server = GrpcServer("127.0.0.1", 0, TokenGuard(TokenCallers(lambda: "secret", Path("token")), rights=rights))
    server.add(None, register, "test.Service")
    content, known = bytes(1 << 20), metadata("secret")
    async with server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        one, many = channel.unary_unary("/test.Service/One"), channel.unary_stream("/test.Service/Many")
        for refused in (lambda: one(content), lambda: many(content).read()):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await refused()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert read == []
        assert await one(content, metadata=known) == b""
        assert await many(content, metadata=known).read() == b""
    assert read == [len(content)] * 2


async def test_a_permitted_call_whose_message_does_not_come_is_ended() -> None:
    answered: list[bytes] = []

    async def answer(request: bytes, context: Any) -> bytes:
        answered.append(request)
        return b""

    def register(_: Any, server: grpc.aio.Server) -> None:
        handler = grpc.unary_unary_rpc_method_handler(answer)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"One": handler}),))

    noted: list[Call] = []
    rights = {"test.Service/One": Right(frozenset(CallerRole))}
    callers = TokenCallers(lambda: "secret", Path("token"))
    server = GrpcServer("127.0.0.1", 0, TokenGuard(callers, note=noted.append, rights=rights, message_s=0.01))
    server.add(None, register, "test.Service")
    ended = asyncio.Event()

    async def silent() -> AsyncIterator[bytes]:
        await ended.wait()
        yield b"too late"

    async with server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.stream_unary("/test.Service/One")(silent(), metadata=metadata("secret"))
        async with asyncio.timeout(DEADLINE_S):
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
        ended.set()
        assert "test.Service/One takes one message, but no message came within 0.01 s" in str(await call.details())
    assert answered == []
    assert [(each.code, each.request) for each in noted] == [(grpc.StatusCode.UNAVAILABLE, None)]


def test_requests_that_cannot_be_decoded_do_not_fill_the_log(cluster: LocalCluster) -> None:
    log = cluster.log_path("coordinator")
    before = log.read_text().count("Traceback")
    with grpc.insecure_channel(cluster.address) as channel:
        call = channel.unary_unary("/paceline.v1.RunService/Get")
        begun_s = time.monotonic()
        for _ in range(100):
            with pytest.raises(grpc.RpcError):
                call(b"\xff", timeout=DEADLINE_S, metadata=metadata(read_token(cluster.token_file)))
        lasted_s = time.monotonic() - begun_s
    assert 1 <= log.read_text().count("Traceback") - before <= 2 + lasted_s


def test_health_stays_open(cluster: LocalCluster) -> None:
    with grpc.insecure_channel(cluster.address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_worker_that_gets_the_token_later_belongs_then(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused at first, it reports the reason and tries again, because the file may still be on its way."""
    late = tmp_path / "late"
    monkeypatch.setenv("PACELINE_TOKEN_FILE", str(late))
    welcomed = asyncio.Event()

    async def on_directive(directive: worker_pb2.ConnectResponse) -> None:
        if directive.WhichOneof("directive") == "welcome":
            welcomed.set()

    hello = worker_pb2.Hello(role=common_pb2.ROLE_REWARD, member_id="reward-late", protocol=PROTOCOL)
    membership = Membership(cluster.address, lambda: hello, on_directive)
    refused = asyncio.Event()
    seen = caplog.handler.emit

    def emit(record: logging.LogRecord) -> None:
        seen(record)
        if "refuses this worker" in record.getMessage() and "has no token" in record.getMessage():
            refused.set()

    monkeypatch.setattr(caplog.handler, "emit", emit)
    belonging = asyncio.create_task(membership.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            await refused.wait()
            late.write_text(cluster.token_file.read_text())
            await welcomed.wait()
    finally:
        belonging.cancel()
        await asyncio.wait((belonging,))


async def test_a_workers_own_service_wants_the_same_token_and_logs_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(token_guard, "seldom", RateLimitedLog(logging.getLogger(token_guard.__name__), float("inf")))
    path = tmp_path / "token"
    monkeypatch.setenv("PACELINE_TOKEN_FILE", str(path))
    server = GrpcServer("127.0.0.1", 0, worker_guard())
    server.add(
        RewardServicer(cast(Any, SimpleNamespace(functions=()))),
        reward_pb2_grpc.add_RewardServiceServicer_to_server,
        "paceline.v1.RewardService",
    )

    def ask() -> int:
        address = f"127.0.0.1:{server.port}"
        with open_channel(address, known=lambda: metadata(read_token(path))) as channel:
            stub = reward_pb2_grpc.RewardServiceStub(channel)
            return len(stub.ListFunctions(reward_pb2.ListFunctionsRequest(), timeout=DEADLINE_S).functions)

    def ask_as_a_stranger() -> str:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = reward_pb2_grpc.RewardServiceStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.ListFunctions(reward_pb2.ListFunctionsRequest(), timeout=DEADLINE_S)
            return str(caught.value.details())  # type: ignore[attr-defined]

    async with server:
        assert "this service has no token" in await asyncio.to_thread(ask_as_a_stranger)
        make_token(path)
        assert "the call has no token" in await asyncio.to_thread(ask_as_a_stranger)
        assert await asyncio.to_thread(ask) > 0
    (line,) = [line for line in caplog.messages if "refused a call" in line]
    assert "paceline.v1.RewardService/ListFunctions from 127.0.0.1:" in line
    assert "this service has no token" in line
