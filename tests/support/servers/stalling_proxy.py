"""A TCP proxy in front of a server, that can stop answering and can refuse."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

CHUNK = 65536


class StallingProxy:
    """Passes connections on to `port` of this host. While `hangs`, connections are accepted and nothing moves; while `refuses`, each is
    closed at once."""

    def __init__(self, port: int):
        self._target = port
        self.hangs = threading.Event()
        self.refuses = threading.Event()
        self.stalled = threading.Event()
        """A connection arrived while it hung or refused."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Close all connections."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._sockets.clear()

    def close(self) -> None:
        """End."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.hangs.is_set() or self.refuses.is_set():
                self.stalled.set()
            if self.refuses.is_set():
                client.close()
                continue
            self._sockets.append(client)
            if self.hangs.is_set():
                continue  # never answered
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets.append(server)
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                if self.hangs.is_set():
                    self.stalled.set()
                    return  # what was under way is lost, and nobody is told
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def stalling_proxy(port: int) -> Iterator[StallingProxy]:
    """Start a proxy and end it."""
    proxy = StallingProxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
