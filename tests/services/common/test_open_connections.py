"""The connections of this process by port and peer, and names of peers."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from services.common.open_connections import Connection, OpenConnections, end

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@linux
@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_accepted_connections_are_found_until_they_are_closed(
    family: socket.AddressFamily, address: str
) -> None:
    connections = OpenConnections()
    try:
        listener = socket.create_server((address, 0), family=family)
    except OSError:
        pytest.skip("this host has no IPv6")
    port = listener.getsockname()[1]
    with listener:
        assert connections.to({port}) == []
        with socket.create_connection((address, port)) as client:
            accepted, _ = listener.accept()
            own = (address, client.getsockname()[1])
            number = accepted.fileno()
            there = [Connection(os.fstat(number).st_ino, number, own)]
            assert connections.to({port}) == there
            assert connections.to({port + 1}) == []
            client.close()
            assert connections.to({port}) == there
            accepted.close()
            with open(os.devnull, "rb") as other:  # has the number now
                assert connections.to({port}) == []
                assert not end(number, own)
                assert not other.closed


@linux
def test_a_connection_is_ended_if_it_is_still_that_peers() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
    ):
        accepted, peer = listener.accept()
        with accepted:
            assert not end(accepted.fileno(), ("127.0.0.1", peer[1] + 1))
            assert end(accepted.fileno(), ("127.0.0.1", peer[1]))
            assert client.recv(1) == b""
