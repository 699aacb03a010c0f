"""Handshakes that come to no call are told with the peer's address; connections with a call never are."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest
from tls_folders import make_folders

from paceline.tls.authority import issue, make_authority
from paceline.tls.channels import open_aio_channel
from paceline.tls.folder import VARIABLE, TlsFolder
from services.common.grpc_server import GrpcServer
from services.common.handshakes import LOOK_SHARE, SWEEP_S, Handshakes
from services.common.open_connections import Connection

LIMIT_S = 10.0
DEADLINE_S = 60.0


class Kernel:
    """The open connections, and the time."""

    def __init__(self) -> None:
        self.is_open: dict[int, Connection] = {}
        self.inode = 0
        self.now_s = 0.0
        self.silent = False
        self.looks = 0
        self.handshakes = Handshakes(self.connections, LIMIT_S, lambda: self.now_s)

    def connections(self) -> list[Connection]:
        self.looks += 1
        if self.silent:
            raise PermissionError
        return list(self.is_open.values())

    def accept(self, port: int) -> str:
        """Accept a connection; return gRPC's name of its peer."""
        self.inode += 1
        self.is_open[self.inode] = Connection(self.inode, 7, ("10.0.0.7", port))
        return f"ipv4:10.0.0.7:{port}"

    def connect(self, port: int, *, stays: bool = True, seen: bool = True) -> str:
        """Accept a connection and begin its handshake. One that is not `seen` has gone before that."""
        name = self.accept(port)
        if not seen:
            del self.is_open[self.inode]
        self.handshakes.began()
        if not stays:
            self.is_open.pop(self.inode, None)
        return name

    def sweeps(self, count: int) -> Counter[str]:
        told: Counter[str] = Counter()
        for _ in range(count):
            self.now_s += SWEEP_S
            told += self.handshakes.sweep()
        return told


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel that answers in no time."""
    monkeypatch.setattr("services.common.handshakes.time.thread_time", lambda: 0.0)
    return Kernel()


def test_a_connection_that_ends_before_a_call_is_told_once(kernel: Kernel) -> None:
    kernel.connect(1, stays=False)
    kernel.handshakes.called(kernel.connect(2))
    assert kernel.sweeps(1) == {}, "its call may be on its way"
    assert kernel.sweeps(5) == {"10.0.0.7:1": 1}


def test_a_late_call_and_a_long_life_are_no_refusals(kernel: Kernel) -> None:
    late = kernel.connect(1, stays=False)
    kernel.connect(2)
    assert kernel.sweeps(1) == {}
    kernel.handshakes.called(late)
    assert kernel.sweeps(int(LIMIT_S / SWEEP_S) + 3) == {}
    kernel.is_open.clear()
    kernel.connect(3, stays=False)
    assert kernel.sweeps(3) == {"10.0.0.7:3": 1}


def test_one_that_was_gone_at_once_has_no_address(kernel: Kernel) -> None:
    kernel.connect(1, seen=False)
    kernel.handshakes.called(kernel.connect(2, seen=False))
    assert kernel.sweeps(4) == {"": 1}


def test_another_connection_from_the_port_of_a_caller_is_told(kernel: Kernel) -> None:
    kernel.handshakes.called(kernel.connect(1, stays=False))
    kernel.connect(1, stays=False)
    assert kernel.sweeps(4) == {"10.0.0.7:1": 1}
    kernel.handshakes.called(kernel.connect(1))
    assert kernel.sweeps(10) == {}


def test_connections_that_are_accepted_together_are_told_apart(kernel: Kernel) -> None:
    kernel.connect(1, seen=False)
    kernel.accept(2)
    kernel.accept(3)
    kernel.handshakes.began()  # shows both
    kernel.handshakes.began()  # shows nothing new
    kernel.is_open.clear()
    assert kernel.sweeps(4) == {"10.0.0.7:2": 1, "10.0.0.7:3": 1, "": 1}


def test_a_call_that_comes_before_any_look_counts_once(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.handshakes._next_look_s = 1.0
    kernel.handshakes.called(kernel.connect(1))
    kernel.connect(2, stays=False)
    assert kernel.sweeps(4) == {"": 1}


def test_in_a_flood_those_that_nobody_looked_for_are_counted(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 1.0])  # the first look takes a second
    monkeypatch.setattr("services.common.handshakes.time.thread_time", lambda: next(times))
    for port in range(5):
        kernel.connect(port, stays=False)
    kernel.handshakes.called(kernel.connect(5))
    assert kernel.looks == 1
    monkeypatch.setattr("services.common.handshakes.time.thread_time", lambda: 0.0)
    assert kernel.sweeps(4) == {"10.0.0.7:0": 1, "": 4}
    kernel.now_s += 1 / LOOK_SHARE
    kernel.connect(6, stays=False)
    assert kernel.sweeps(4) == {"10.0.0.7:6": 1}


def test_the_kernel_is_not_asked_while_nobody_comes_and_little_is_kept(kernel: Kernel) -> None:
    for port in range(100):
        kernel.handshakes.called(kernel.connect(port, stays=False))
    kernel.sweeps(1)
    for port in range(100, 103):
        kernel.handshakes.called(kernel.connect(port, stays=False))
        kernel.sweeps(1)
    assert len(kernel.handshakes._settled) <= 3
    kernel.sweeps(1)
    looks = kernel.looks
    assert kernel.sweeps(10) == {}
    assert kernel.looks == looks


def test_a_system_that_does_not_tell_is_no_trouble(kernel: Kernel) -> None:
    kernel.silent = True
    kernel.handshakes.called(kernel.connect(1))
    kernel.connect(2)
    assert kernel.sweeps(5) == {}


async def knock(port: int, folder: Path | None) -> str:
    """Connect with a folder's certificate, or without TLS, say something and wait for the end; return the own address."""
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as connection:
        own = "{}:{}".format(*connection.getsockname())
        connection.setblocking(False)
        context = None
        if folder is not None:
            context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
            if (folder / "tls.crt").exists():
                context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        with contextlib.suppress(OSError):  # the end, in whatever way
            reader, writer = await asyncio.open_connection(
                sock=connection, ssl=context, server_hostname="127.0.0.1" if context else None
            )
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await asyncio.wait_for(reader.read(), DEADLINE_S)
            writer.close()
    return own


def register(_: Any, server: grpc.aio.Server) -> None:
    async def answer(request: bytes, context: Any) -> bytes:
        return b"here"

    handlers = {"Who": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
async def test_a_server_tells_who_was_refused_by_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No TLS, no certificate, one of another authority, an expired one; a worker, and a call of a method that nobody has, are let in."""
    folders = make_folders(tmp_path, coordinator="coordinator", worker="worker")
    make_authority(tmp_path / "other")
    other = issue(tmp_path / "other", "stranger", "worker")
    (other / "ca.crt").write_bytes((folders["worker"] / "ca.crt").read_bytes())
    expired = issue(tmp_path / "ca", "expired", "worker", days=-0.001)
    monkeypatch.setenv(VARIABLE, str(folders["coordinator"]))
    monkeypatch.setattr("services.common.grpc_server.SWEEP_S", 0.5)
    monkeypatch.setattr("services.common.handshakes.LOOK_SHARE", math.inf)
    told: Counter[str] = Counter()
    news = asyncio.Event()

    def tell(address: str, count: int) -> None:
        told[address] += count
        news.set()

    server = GrpcServer("127.0.0.1", 0, mutual=True, on_refused_handshake=tell)
    server.add(None, register, "test.Service")

    async def call(method: str) -> grpc.StatusCode:
        folder = TlsFolder(folders["worker"])
        async with open_aio_channel(f"127.0.0.1:{server.port}", folder=folder) as channel:
            try:
                await channel.unary_unary(f"/test.Service/{method}")(b"", timeout=DEADLINE_S)
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK

    async with server:
        assert await call("Who") is grpc.StatusCode.OK
        assert await call("Nobodys") is grpc.StatusCode.UNIMPLEMENTED
        tried = {await knock(server.port, folder) for folder in (None, folders["person"], other, expired)}
        async with asyncio.timeout(DEADLINE_S):
            while told.total() < len(tried):
                news.clear()
                await news.wait()
        assert await call("Who") is grpc.StatusCode.OK
    assert told == dict.fromkeys(tried, 1)
    assert "ended before a call: its handshake was refused" in caplog.text


async def test_without_tls_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    server = GrpcServer("127.0.0.1", 0)
    server.add(None, register, "test.Service")
    async with server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        assert await channel.unary_unary("/test.Service/Who")(b"", timeout=DEADLINE_S) == b"here"
        with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S):
            assert server._handshakes is None
