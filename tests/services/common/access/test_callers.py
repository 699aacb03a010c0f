"""A real coordinator and callers with named tokens: a submitter's own runs, and a worker whose token is revoked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from exchange_drivers import make_spec

from paceline.calls.token import metadata
from paceline.client import Client
from paceline.errors import AccessDenied, NotFound, NotPermitted
from paceline.services.common.access.rights import CallerRole
from paceline.services.common.access.token_table import create, revoke
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection
from paceline.spec.reading import spec_to_yaml
from paceline.v1 import common_pb2, run_pb2, run_pb2_grpc, worker_pb2, worker_pb2_grpc
from paceline.wire import PROTOCOL

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A coordinator alone."""
    started = LocalCluster(tmp_path_factory.mktemp("callers"), ClusterSection())
    try:
        started.start_coordinator()
        yield started
    finally:
        started.stop()


def make_token_file(cluster: LocalCluster, name: str, role: CallerRole) -> Path:
    path = cluster.directory / f"{name}.token"
    path.write_text(create(cluster.directory / "tokens.json", name, role, 0.0))
    return path


async def until_known(cluster: LocalCluster, path: Path) -> None:
    """Wait until the coordinator has read the table again."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                await asyncio.to_thread(_try, cluster, path)
                return
            except AccessDenied:
                await asyncio.sleep(0.1)


async def read_to_end(stream: Any) -> None:
    """Read a stream to its end, or to its error."""
    while await stream.read() is not grpc.aio.EOF:
        pass


def _try(cluster: LocalCluster, path: Path) -> None:
    with Client(cluster.address, token_file=path) as client, pytest.raises((NotFound, NotPermitted)):
        client.get("none-1")


async def test_a_submitter_steers_their_own_runs_alone(cluster: LocalCluster, tmp_path: Path) -> None:
    ann, ben = (make_token_file(cluster, name, CallerRole.SUBMITTER) for name in ("ann", "ben"))
    operator, viewer = (make_token_file(cluster, name, CallerRole(name)) for name in ("operator", "viewer"))
    await until_known(cluster, viewer)
    text = spec_to_yaml(make_spec(tmp_path, logger={"tensorboard": False}))
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        stub = run_pb2_grpc.RunServiceStub(channel)
        request = run_pb2.SubmitRequest(spec_yaml=text)
        run_ids = []
        for _ in range(2):
            answer = await stub.Submit(request, metadata=metadata(ann.read_text()), timeout=DEADLINE_S)  # type: ignore[misc]
            run_ids.append(answer.run.run_id)
        urgent = run_pb2.SubmitRequest(spec_yaml=f"{text}\npriority: 1\n".replace("priority: 0\n", "", 1))
        with pytest.raises(grpc.aio.AioRpcError, match="before the runs of others"):
            await stub.Submit(urgent, metadata=metadata(ann.read_text()), timeout=DEADLINE_S)  # type: ignore[misc]
    for other, why in ((ben, "is not a run of ben"), (viewer, "for the roles submitter, operator")):
        with Client(cluster.address, token_file=other) as client:
            for command in (client.cancel, client.pause, client.resume):
                with pytest.raises(NotPermitted, match=why):
                    command(run_ids[0])
            assert client.get(run_ids[0]).run_id == run_ids[0]
    for one, run_id in ((ann, run_ids[0]), (operator, run_ids[1])):
        with Client(cluster.address, token_file=one) as client:
            client.cancel(run_id)
    ledger = Ledger(cluster.directory / "ledger.sqlite", read_only=True)
    try:
        assert [ledger.submitter(run_id) for run_id in run_ids] == ["ann", "ann"]
    finally:
        ledger.close()


async def test_a_worker_whose_token_is_revoked_is_out(cluster: LocalCluster) -> None:
    path = make_token_file(cluster, "pool", CallerRole.WORKER)
    await until_known(cluster, path)
    hello = worker_pb2.Hello(role=common_pb2.ROLE_REWARD, member_id="reward-1", protocol=PROTOCOL)

    async def reports() -> AsyncIterator[worker_pb2.ConnectRequest]:
        yield worker_pb2.ConnectRequest(hello=hello)
        while True:
            yield worker_pb2.ConnectRequest(heartbeat=worker_pb2.Heartbeat())
            await asyncio.sleep(0.5)

    async with grpc.aio.insecure_channel(cluster.address) as channel, asyncio.timeout(DEADLINE_S):
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        stream = stub.Connect(reports(), metadata=metadata(path.read_text()))
        assert (await stream.read()).WhichOneof("directive") == "welcome"  # type: ignore[attr-defined]
        revoke(cluster.directory / "tokens.json", "pool")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_end(stream)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "the token pool was revoked" in str(caught.value.details())
        again = stub.Connect(metadata=metadata(path.read_text()))
        with pytest.raises(grpc.aio.AioRpcError, match="was revoked"):
            await again.read()  # type: ignore[attr-defined]
        with Client(cluster.address) as client:
            assert client.members() == []  # its stream ends with its membership
    assert "reward-1 left (the token pool was revoked" in cluster.log_path("coordinator").read_text()


async def test_a_viewers_stream_ends_when_the_token_is_revoked(cluster: LocalCluster, tmp_path: Path) -> None:
    path = make_token_file(cluster, "reader", CallerRole.VIEWER)
    await until_known(cluster, path)
    text = spec_to_yaml(make_spec(tmp_path, logger={"tensorboard": False}))
    with Client(cluster.address) as client:
        async with grpc.aio.insecure_channel(cluster.address) as channel, asyncio.timeout(DEADLINE_S):
            stub = run_pb2_grpc.RunServiceStub(channel)
            mine = metadata(cluster.token_file.read_text().strip())
            answer = await stub.Submit(run_pb2.SubmitRequest(spec_yaml=text), metadata=mine)  # type: ignore[misc]
            run_id = answer.run.run_id
            watching = stub.Watch(run_pb2.WatchRequest(run_id=run_id), metadata=metadata(path.read_text()))
            assert (await watching.read()).kind == "state"  # type: ignore[attr-defined]
            revoke(cluster.directory / "tokens.json", "reader")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_to_end(watching)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        client.cancel(run_id)
