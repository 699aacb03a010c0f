"""The exchange under CURVE accepts members by their keys, and no other peer."""

from __future__ import annotations

import asyncio
import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from joined_worker import JoinedWorker
from tls_folders import make_folders
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from paceline.client import Client
from paceline.services.coordinator.exchange.transport.router_socket import ExchangeSocket
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection
from paceline.tls.authority import renew
from paceline.tls.folder import VARIABLE
from paceline.v1 import exchange_pb2 as pb

DEADLINE_MS = 30_000
DEADLINE_S = 60.0
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
Keys = tuple[bytes, bytes]


@pytest.fixture
def member() -> Keys:
    """A member's keys in Z85."""
    return zmq.curve_keypair()


@pytest.fixture
def exchange(member: Keys) -> Iterator[ExchangeSocket]:
    """The exchange's socket, which accepts only that member."""
    public = z85.decode(member[0])
    made = ExchangeSocket("127.0.0.1", 0, lambda key: key == public)
    yield made
    made.close()


def attempt(port: int, keys: Keys | None, server_key: bytes) -> int:
    """Connect and send a message; return the event with the result of the handshake."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        if keys is not None:
            socket.curve_publickey, socket.curve_secretkey = keys
            socket.curve_serverkey = z85.encode(server_key)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | REFUSED)
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send(b"a message")
        assert monitor.poll(DEADLINE_MS)
        event = int(recv_monitor_message(monitor)["event"])
        socket.disable_monitor()
        monitor.close(linger=0)
        return event


def test_a_members_message_comes_with_its_key(exchange: ExchangeSocket, member: Keys) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.curve_publickey, socket.curve_secretkey = member
        socket.curve_serverkey = z85.encode(exchange.public_key)
        socket.connect(f"tcp://127.0.0.1:{exchange.port}")
        socket.send(b"a message")
        end_s = time.monotonic() + DEADLINE_MS / 1000
        while (message := exchange.receive()) is None and time.monotonic() < end_s:
            select.select([exchange.descriptor], [], [], 0.01)
    assert message is not None
    assert (message.header, message.key) == (b"a message", z85.decode(member[0]))


def test_other_peers_get_no_connection_and_none_of_their_messages_is_read(
    exchange: ExchangeSocket, member: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = zmq.curve_keypair()
    assert attempt(exchange.port, member, exchange.public_key) == zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert attempt(exchange.port, stranger, exchange.public_key) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    assert attempt(exchange.port, member, z85.decode(stranger[0])) != zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert attempt(exchange.port, None, b"") != zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert "its key is no member's" in caplog.text
    end_s = time.monotonic() + DEADLINE_MS / 1000
    while "its handshake failed" not in caplog.text:
        assert time.monotonic() < end_s
        exchange.check_connections()


def test_without_keys_the_socket_is_as_it_was() -> None:
    made = ExchangeSocket("127.0.0.1", 0)
    try:
        assert made.public_key == b""
        assert attempt(made.port, None, b"") == zmq.EVENT_HANDSHAKE_SUCCEEDED
    finally:
        made.close()


async def test_a_worker_speaks_for_itself_alone_and_certificates_change_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers of a real coordinator under TLS; one sends a request with the id and the secret of the other."""
    folders = make_folders(tmp_path, coordinator="coordinator", worker="worker")
    monkeypatch.setenv("PACELINE_TOKEN_FILE", "")
    monkeypatch.delenv("PACELINE_TOKEN_FILE")
    monkeypatch.setenv(VARIABLE, str(folders["coordinator"]))
    cluster = LocalCluster(tmp_path / "runs", ClusterSection())
    workers: list[JoinedWorker] = []
    try:
        await asyncio.to_thread(cluster.start_coordinator)
        monkeypatch.setenv(VARIABLE, str(folders["worker"]))
        workers += [JoinedWorker(cluster.address, name) for name in ("reward-a", "reward-b")]
        async with asyncio.timeout(DEADLINE_S):
            for worker in workers:
                await worker.is_here.wait()
                reply, _ = await worker.membership.request(pb.ExchangeRequest(task=pb.TaskRequest(), run_id="none"))
                assert reply.status == pb.REPLY_STATUS_STALE
            other, own = workers
            answer = await own.answer_to_forged(other)
            assert answer.status == pb.REPLY_STATUS_INVALID
            assert "the connection's key does not match the key that member 'reward-a' registered" in answer.message
            for name in ("coordinator", "worker"):
                renew(tmp_path / "ca", name)
            late = JoinedWorker(cluster.address, "reward-late")
            workers.append(late)
            await late.is_here.wait()
            names = await asyncio.to_thread(lambda: [m.member_id for m in Client(cluster.address).members()])
            assert sorted(names) == ["reward-a", "reward-b", "reward-late"]
        assert "does not match the key that member" in cluster.log_path("coordinator").read_text()
    finally:
        for worker in workers:
            await worker.end()
        await asyncio.to_thread(cluster.stop)
