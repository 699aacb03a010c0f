"""One relay for all processes of a host: started by the first, replaced when it dies or stops, gone after the last."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from paceline.weights.hosts.client import SILENCE_S, RelayClient
from paceline.weights.hosts.local_socket import FOLDER_VARIABLE, LABEL_VARIABLE, socket_name

WAIT_S = 60.0
Start = Callable[..., RelayClient]


@pytest.fixture(params=["abstract", "folder"])
def start(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv(LABEL_VARIABLE, str(tmp_path))
    folder = tempfile.mkdtemp(prefix="relays-")  # a socket's name is short
    if request.param == "folder":
        monkeypatch.setenv(FOLDER_VARIABLE, folder)
    clients: list[RelayClient] = []

    def started(silence_s: float = SILENCE_S) -> RelayClient:
        name = socket_name("127.0.0.1:7070", "127.0.0.1")
        clients.append(RelayClient(name, "127.0.0.1", "127.0.0.1", "here", silence_s))
        clients[-1].start()
        return clients[-1]

    yield started
    pids = {pid_of(client) for client in clients if client.identity is not None}
    for client in clients:
        client.close()
    for pid in pids:  # it ends by itself
        assert psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], WAIT_S)[1] == []
    shutil.rmtree(folder)


def pid_of(client: RelayClient) -> int:
    assert client._connection is not None
    return client._connection.peer_pid


def test_all_processes_of_a_host_have_one_relay(start: Start) -> None:
    clients = [start(), start(), start()]
    assert all(client.wait(WAIT_S) for client in clients)
    identities = [client.identity for client in clients]
    assert identities[0] is not None
    assert identities[0] == identities[1] == identities[2]
    assert identities[0].zone == "here"
    assert identities[0].address.startswith("127.0.0.1:")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_relay_that_dies_or_stops_is_replaced(start: Start, number: signal.Signals) -> None:
    client, again = start(silence_s=1.5), threading.Event()
    assert client.wait(WAIT_S)
    before = client.identity
    client.on_connected = again.set
    os.kill(pid_of(client), number)
    assert again.wait(WAIT_S)
    assert client.identity is not None
    assert before is not None
    assert client.identity.agent_id != before.agent_id


def test_the_relays_of_two_coordinators_or_addresses_are_apart() -> None:
    names = {
        socket_name("127.0.0.1:7070", "127.0.0.1"),
        socket_name("127.0.0.1:7071", "127.0.0.1"),
        socket_name("127.0.0.1:7070", "10.0.0.1"),
    }
    assert len(names) == 3
