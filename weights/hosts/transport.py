"""Connections between the agents of two hosts, behind one interface.

A transport listens and connects; a *channel* carries bytes in order in both directions. The promise of every transport: each
call ends within the channel's `timeout_s` of silence or raises Unavailable, and a channel that failed is closed and never
used again. What a channel carries is verified by those who use it (`paceline.weights.hosts.reading`).

`TcpTransport` is the one that every host has; several channels between two hosts are its several streams. With certificates
`paceline.weights.hosts.tls_transport` takes its place.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Protocol

from paceline.errors import PacelineError, Unavailable
from paceline.weights.hosts.accepting import next_connection, seldom

CHUNK_BYTES = 256 << 10
"""Bytes that have to be taken within one time-out."""
BACKLOG = 512


class Channel(Protocol):
    """A connection to another host. One thread sends, one receives."""

    peer: str
    """Address of the other side, for messages."""

    def send(self, data: bytes | memoryview) -> None:
        """Send all bytes. Raises Unavailable when the other side takes none for the time-out, or is gone."""

    def receive_into(self, memory: memoryview) -> None:
        """Fill `memory`. Raises Unavailable when nothing comes for the time-out, or the other side is gone."""

    def close(self) -> None:
        """End the connection; calls that wait in other threads raise Unavailable."""


class Listener(Protocol):
    """The place where other hosts connect."""

    port: int

    def accept(self) -> Channel | None:
        """Return the next connection; None after `close`."""

    def close(self) -> None:
        """Take no more connections."""


class Transport(Protocol):
    """A way between two hosts."""

    name: str

    def listen(self, host: str, port: int, timeout_s: float) -> Listener:
        """Listen on one address. `port` 0 takes a free one; `timeout_s` is that of the channels. Raises OSError."""

    def connect(self, address: str, timeout_s: float) -> Channel:
        """Return a channel to the agent at HOST:PORT. Raises Unavailable."""


class TcpTransport:
    """TCP, not encrypted: beyond loopback for processes without certificates alone (`--insecure`)."""

    name = "tcp"

    def listen(self, host: str, port: int, timeout_s: float) -> TcpListener:
        """As `Transport.listen`."""
        return TcpListener(host, port, timeout_s)

    def connect(self, address: str, timeout_s: float) -> TcpChannel:
        """As `Transport.connect`."""
        return TcpChannel(self._connected(address, timeout_s), address, timeout_s)

    @staticmethod
    def _connected(address: str, timeout_s: float) -> socket.socket:
        host, _, port = address.rpartition(":")
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        except (OSError, ValueError, OverflowError) as error:
            raise Unavailable(f"{address} cannot be reached: {error}") from error


class TcpListener:
    """A listening socket."""

    def __init__(
        self,
        host: str,
        port: int,
        timeout_s: float,
        accepted: Callable[[socket.socket, str, float], TcpChannel] | None = None,
    ) -> None:
        """`accepted` makes the channel of a connection, without waiting for its peer."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._timeout_s, self._accepted = timeout_s, accepted or TcpChannel
        self._is_closed = False
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(BACKLOG)
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    def accept(self) -> TcpChannel | None:
        """As `Listener.accept`."""
        while (taken := next_connection(self._socket, lambda: self._is_closed)) is not None:
            connection, address = taken
            host = f"[{address[0]}]" if ":" in address[0] else address[0]
            try:
                return self._accepted(connection, f"{host}:{address[1]}", self._timeout_s)
            except (OSError, PacelineError) as error:  # reset by its peer, or without certificates to read
                connection.close()
                seldom.warning("channel", "a connection of %s came to nothing: %s", host, error)
        return None

    def close(self) -> None:
        """As `Listener.close`."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in `accept`
        self._socket.close()


class TcpChannel:
    """One connection."""

    def __init__(self, connection: socket.socket, peer: str, timeout_s: float) -> None:
        self.peer = peer
        self._socket = connection
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes | memoryview) -> None:
        """As `Channel.send`."""
        view = memoryview(data)
        try:
            for begin in range(0, len(view), CHUNK_BYTES):
                self._socket.sendall(view[begin : begin + CHUNK_BYTES])
        except (OSError, ValueError) as error:
            raise Unavailable(f"{self.peer} takes no bytes: {error}") from error

    def receive_into(self, memory: memoryview) -> None:
        """As `Channel.receive_into`."""
        done = 0
        try:
            while done < len(memory):
                count = self._socket.recv_into(memory[done : done + CHUNK_BYTES])
                if not count:
                    raise Unavailable(f"{self.peer} closed the connection")
                done += count
        except (OSError, ValueError) as error:
            raise Unavailable(f"{self.peer} sends nothing: {error}") from error

    def close(self) -> None:
        """As `Channel.close`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
