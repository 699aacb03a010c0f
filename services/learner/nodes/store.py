"""The key-value store in which nodes meet: c10d's, with JSON values of bounded length.

torch's own dynamic rendezvous pickles its state into such a store, where everybody who reaches the port can change it.
"""

from __future__ import annotations

import json
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.errors import InvalidInput

PREFIX = "paceline/"
MAX_VALUE = 4096
WAIT_S = 15.0
"""Seconds to wait for an answer of the store."""
CONNECT_S = 2.0
"""Seconds of one try to reach it."""
FAULTS = (RuntimeError, OSError)
"""What an operation raises when the store is away: torch's DistError is a RuntimeError."""


class NodeStore:
    """JSON objects by key."""

    def __init__(self, store: Any):
        """`store` is one of torch.distributed."""
        self._store = store

    def number(self, key: str, increment: int) -> int:
        """Add to a counter, and return its value."""
        return int(self._store.add(PREFIX + key, increment))

    def write(self, key: str, **value: Any) -> None:
        """Write an object."""
        self._store.set(PREFIX + key, json.dumps(value))

    def read(self, key: str) -> dict[str, Any] | None:
        """Return an object without waiting for it; None if there is none, empty for a value that is no object."""
        if not self._store.check([PREFIX + key]):
            return None
        data = self._store.get(PREFIX + key)
        try:
            value = json.loads(data) if len(data) <= MAX_VALUE else {}
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


def connect(host: str, port: int) -> NodeStore:
    """Return the store of another host. Raises FAULTS when it does not answer within CONNECT_S."""
    wait = timedelta(seconds=CONNECT_S)
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=WAIT_S))
    return NodeStore(store)


def serve(host: str, port: int) -> NodeStore:
    """Return a new store that listens on `host` alone, in this process. Raises InvalidInput when that is not possible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InvalidInput(f"--host {host!r} is no address of this host: {error}") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host if host not in ("0.0.0.0", "::") else "localhost",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=WAIT_S),
            master_listen_fd=listening.fileno(),
        )
    except FAULTS as error:
        listening.close()
        raise InvalidInput(
            f"node 0 cannot host the rendezvous on {host}, port {port}: {one_line(error)}; give an address of this host as "
            "--host, and a free port in --rendezvous"
        ) from None
    listening.detach()  # the store closes it
    return NodeStore(store)


def one_line(error: BaseException) -> str:
    """Return the first line of an error's text: torch adds its C++ frames to it."""
    return str(error).partition("\n")[0].strip() or type(error).__name__
