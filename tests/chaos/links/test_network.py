"""The effects of the rollout workers' network on a real connection. Skipped where this machine cannot make one."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from links.network import Network, missing

DEADLINE_S = 30.0
ECHO = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as peer:
    while data := peer.recv(65536):
        peer.sendall(data)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    lacking = missing()
    if lacking:
        pytest.skip(f"a network of their own: {lacking}")
    made = Network()
    yield made
    made.close()


@pytest.fixture
def echo(network: Network) -> Iterator[socket.socket]:
    """A connection to a process inside that sends back whatever comes."""
    with socket.create_server((network.near, 0)) as server:
        server.settimeout(DEADLINE_S)
        port = str(server.getsockname()[1])
        command = [*network.launcher, sys.executable, "-c", ECHO, network.near, port]
        process = subprocess.Popen(command)
        peer, address = server.accept()
    assert address[0] == network.far
    with peer:
        peer.settimeout(DEADLINE_S)
        yield peer
    process.terminate()
    process.wait(DEADLINE_S)


def read(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := peer.recv(size - len(data))):
        data += more
    return data


def test_drop_swallows_packets_and_breaks_nothing(network: Network, echo: socket.socket) -> None:
    echo.sendall(b"before")
    assert read(echo, 6) == b"before"
    network.harm("drop")
    echo.sendall(b"during")
    deadline_s, pause = time.monotonic() + DEADLINE_S, threading.Event()
    while network.count_dropped() == 0:
        assert time.monotonic() < deadline_s
        pause.wait(0.01)
    echo.setblocking(False)
    with pytest.raises(BlockingIOError):
        echo.recv(1)
    echo.settimeout(DEADLINE_S)
    network.repair()
    assert network.met["dropped"] > 0
    assert read(echo, 6) == b"during"  # TCP sends it again
    echo.sendall(b"after")
    assert read(echo, 5) == b"after"


def test_delay_lets_everything_through_late(network: Network, echo: socket.socket) -> None:
    network.harm("delay")
    qdiscs = subprocess.run(["tc", "qdisc", "show"], check=True, capture_output=True, text=True).stdout
    assert "netem" in qdiscs or "tbf" in qdiscs
    echo.sendall(bytes(50_000))
    assert read(echo, 50_000) == bytes(50_000)
    network.repair()
    echo.sendall(b"after")
    assert read(echo, 5) == b"after"


def test_nothing_else_can_be_done_to_it(network: Network) -> None:
    with pytest.raises(ValueError, match="truncate"):
        network.harm("truncate")
