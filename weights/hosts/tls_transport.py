"""TCP under TLS between the agents of two hosts: both sides present a worker's certificate.

The listening side makes its handshake when its channel is first used, which is in the thread of that channel: a stranger that says
nothing holds up nobody else. `transport_of` chooses between this and plain TCP.
"""

from __future__ import annotations

import contextlib
import socket
import ssl

from paceline.errors import Unavailable
from paceline.tls.folder import tls_folder
from paceline.tls.peers import PeerTls, check_worker
from paceline.weights.hosts.transport import TcpChannel, TcpListener, TcpTransport


class TlsTransport(TcpTransport):
    """TCP, encrypted with the newest certificates of `peers` for each connection."""

    name = "tls"

    def __init__(self, peers: PeerTls) -> None:
        self._peers = peers

    def listen(self, host: str, port: int, timeout_s: float) -> TcpListener:
        """As `Transport.listen`."""
        return TcpListener(host, port, timeout_s, self._accepted)

    def connect(self, address: str, timeout_s: float) -> TcpChannel:
        """As `Transport.connect`, with the handshake."""
        channel = TlsChannel(self._connected(address, timeout_s), address, timeout_s, self._peers, False)
        try:
            channel.shake_hands()
        except Unavailable:
            channel.close()
            raise
        return channel

    def _accepted(self, connection: socket.socket, peer: str, timeout_s: float) -> TcpChannel:
        return TlsChannel(connection, peer, timeout_s, self._peers, True)


class TlsChannel(TcpChannel):
    """One connection. One thread sends and receives: the two sides of an agent's protocol speak in turns."""

    _socket: ssl.SSLSocket

    def __init__(
        self, connection: socket.socket, peer: str, timeout_s: float, peers: PeerTls, server: bool
    ) -> None:
        super().__init__(connection, peer, timeout_s)
        self._socket = peers.context(server=server).wrap_socket(
            connection, server_side=server, do_handshake_on_connect=False
        )
        self._has_shaken_hands = False

    def shake_hands(self) -> None:
        """Verify the other side, once. Raises Unavailable."""
        if self._has_shaken_hands:
            return
        try:
            self._socket.do_handshake()
        except (OSError, ValueError) as error:
            raise Unavailable(f"{self.peer} is refused, TLS: {error}") from error
        try:
            check_worker(self._socket)
        except Unavailable as error:
            raise Unavailable(f"{self.peer} is refused: {error}") from None
        self._has_shaken_hands = True

    def send(self, data: bytes | memoryview) -> None:
        """As `Channel.send`."""
        self.shake_hands()
        super().send(data)

    def receive_into(self, memory: memoryview) -> None:
        """As `Channel.receive_into`."""
        self.shake_hands()
        super().receive_into(memory)

    def close(self) -> None:
        """As `Channel.close`."""
        with contextlib.suppress(OSError):
            # Not SSLSocket's, which makes another thread read on without TLS.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
        self._socket.close()


def transport_of() -> TcpTransport:
    """Return the transport of this process: TLS where the environment names a folder with certificates. Raises InvalidInput for one
    without a certificate of this process."""
    folder = tls_folder()
    return TcpTransport() if folder is None else TlsTransport(PeerTls(folder))
