"""Connects the relays of two hosts by TCP or TLS, and decides where weights may travel unencrypted.

A transport listens and connects; a *channel* carries bytes in order in both directions. The promise of every transport:
each call ends within the channel's `timeout_s` of silence or raises Unavailable, and a channel that failed is closed
and never used again. Its users verify the bytes (`paceline.weights.hosts.reading`). Several streams between two hosts
use several channels. With certificates both sides of a channel present the certificate of a worker.

gloo, NCCL and torch's stores know neither encryption nor authentication: beyond loopback `check_plain` refuses them if
this process has certificates, unless `weights.allow_plaintext_network` is true. A process without certificates listens
beyond its host only with `--insecure`, which covers weights too.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from paceline.calls.connection import is_loopback
from paceline.errors import InvalidInput, PacelineError, Unavailable
from paceline.rate_limited_log import RateLimitedLog
from paceline.tls.folder import tls_folder
from paceline.tls.peers import PeerTls, check_worker

CHUNK_BYTES = 256 << 10
"""Number of bytes that a peer must take within one time-out."""
BACKLOG = 512
PAUSE_S = 0.1
"""Seconds until a listener that could not accept a connection tries again."""
KEY = "weights.allow_plaintext_network"
PLAIN_SCHEMES = frozenset({"http", "ftp", "webhdfs"})
S3_SCHEMES = frozenset({"s3", "s3a"})
S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")

seldom = RateLimitedLog(logging.getLogger(__name__))


class Transport:
    """Transport by TCP, not encrypted: beyond loopback only for processes without certificates (`--insecure`)."""

    def listen(self, host: str, port: int, timeout_s: float) -> Listener:
        """Listen on one address; `port` 0 takes a free one. Channels get the time-out `timeout_s`. Raises OSError."""
        return Listener(host, port, timeout_s)

    def connect(self, address: str, timeout_s: float) -> Channel:
        """Return a channel to the relay at HOST:PORT. Raises Unavailable."""
        return Channel(self._connected(address, timeout_s), address, timeout_s)

    @staticmethod
    def _connected(address: str, timeout_s: float) -> socket.socket:
        host, _, port = address.rpartition(":")
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        except (OSError, ValueError, OverflowError) as error:
            raise Unavailable(f"{address} cannot be reached: {error}") from error


class Listener:
    def __init__(
        self,
        host: str,
        port: int,
        timeout_s: float,
        accepted: Callable[[socket.socket, str, float], Channel] | None = None,
    ) -> None:
        """`accepted` makes the channel of a connection, without waiting for its peer."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._timeout_s, self._accepted = timeout_s, accepted or Channel
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

    def accept(self) -> Channel | None:
        """Return the next connection; None after `close`."""
        while (taken := next_connection(self._socket, lambda: self._is_closed)) is not None:
            connection, address = taken
            host = f"[{address[0]}]" if ":" in address[0] else address[0]
            try:
                return self._accepted(connection, f"{host}:{address[1]}", self._timeout_s)
            except (OSError, PacelineError) as error:  # reset by its peer, or the certificates cannot be read
                connection.close()
                seldom.warning("channel", "a connection from %s failed: %s", host, error)
        return None

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in `accept`
        self._socket.close()


def next_connection(
    listener: socket.socket, is_closed: Callable[[], bool], pause_s: float = PAUSE_S
) -> tuple[socket.socket, Any] | None:
    """Return the next connection and its address; None once `is_closed`. Retries after errors, such as too few descriptors."""
    while True:
        try:
            return listener.accept()
        except OSError as error:
            if is_closed():
                return None
            seldom.warning("accept", "a connection could not be accepted: %s; trying again", error)
            time.sleep(pause_s)


class Channel:
    """A connection to another host. One thread sends, one receives. `peer` names the other host in messages."""

    def __init__(self, connection: socket.socket, peer: str, timeout_s: float) -> None:
        self.peer = peer
        self._socket = connection
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes | memoryview) -> None:
        """Send all bytes. Raises Unavailable if the peer takes none for the time-out, or has disconnected."""
        view = memoryview(data)
        try:
            for begin in range(0, len(view), CHUNK_BYTES):
                self._socket.sendall(view[begin : begin + CHUNK_BYTES])
        except (OSError, ValueError) as error:
            raise Unavailable(f"{self.peer} takes no bytes: {error}") from error

    def receive_into(self, memory: memoryview) -> None:
        """Fill `memory`. Raises Unavailable if nothing comes for the time-out, or the peer has disconnected."""
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
        """End the connection; calls that wait in other threads raise Unavailable."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class TlsTransport(Transport):
    """TCP, encrypted with the newest certificates of `peers` for each connection."""

    def __init__(self, peers: PeerTls) -> None:
        self._peers = peers

    def listen(self, host: str, port: int, timeout_s: float) -> Listener:
        return Listener(host, port, timeout_s, self._accepted)

    def connect(self, address: str, timeout_s: float) -> Channel:
        channel = TlsChannel(self._connected(address, timeout_s), address, timeout_s, self._peers, False)
        try:
            channel.shake_hands()
        except Unavailable:
            channel.close()
            raise
        return channel

    def _accepted(self, connection: socket.socket, peer: str, timeout_s: float) -> Channel:
        return TlsChannel(connection, peer, timeout_s, self._peers, True)


class TlsChannel(Channel):
    """A connection under TLS. One thread sends and receives: the two sides of a relay's protocol take turns. The
    listening side makes its handshake when its channel is first used, in the thread of that channel, so a stranger
    that sends nothing delays nobody else."""

    _socket: ssl.SSLSocket

    def __init__(self, connection: socket.socket, peer: str, timeout_s: float, peers: PeerTls, server: bool) -> None:
        super().__init__(connection, peer, timeout_s)
        self._socket = peers.context(server=server).wrap_socket(
            connection, server_side=server, do_handshake_on_connect=False
        )
        self._has_shaken_hands = False

    def shake_hands(self) -> None:
        """Verify the peer, once. Raises Unavailable."""
        if self._has_shaken_hands:
            return
        try:
            self._socket.do_handshake()
        except (OSError, ValueError) as error:
            raise Unavailable(f"{self.peer} is refused by TLS: {error}") from error
        try:
            check_worker(self._socket)
        except Unavailable as error:
            raise Unavailable(f"{self.peer} is refused: {error}") from None
        self._has_shaken_hands = True

    def send(self, data: bytes | memoryview) -> None:
        self.shake_hands()
        super().send(data)

    def receive_into(self, memory: memoryview) -> None:
        self.shake_hands()
        super().receive_into(memory)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # Not SSLSocket's close, which makes another thread read on without TLS.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        self._socket.close()


def transport_of() -> Transport:
    """Return this process's transport: TLS if the environment names a folder of certificates. Raises InvalidInput for a
    folder without this process's certificate."""
    folder = tls_folder()
    return Transport() if folder is None else TlsTransport(PeerTls(folder))


def check_plain(what: str, hosts: Iterable[str], *, allowed: bool, remedy: str) -> None:
    """Check that weights may travel unencrypted by `what` between these hosts. Raises InvalidInput."""
    if allowed or tls_folder() is None:
        return
    beyond = [host for host in hosts if host and not is_loopback(host)]
    if beyond:
        raise InvalidInput(
            f"{what} at {beyond[0]} would carry weights over the network in the clear, and this process has certificates "
            f"(--tls-dir); {remedy}, or set {KEY} to true where only the cluster's hosts reach that network"
        )


def check_store(url: str, environment: Mapping[str, str], *, allowed: bool) -> None:
    """Check that an object store is reached over TLS. Raises InvalidInput."""
    parts = urlsplit(url)
    if parts.scheme in PLAIN_SCHEMES:
        endpoint = url
    elif parts.scheme in S3_SCHEMES:
        endpoint = next((environment[name] for name in S3_ENDPOINTS if environment.get(name)), "")
    else:
        return
    if not endpoint.startswith("https://"):
        host = urlsplit(endpoint).hostname or ""
        remedy = "give it an https:// endpoint (AWS_ENDPOINT_URL)"
        check_plain(f"the object store {url.split('@')[-1]!r}", [host], allowed=allowed, remedy=remedy)
