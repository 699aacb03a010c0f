"""The key-value store of the nodes' rendezvous: c10d's, with JSON values of bounded length. torch's own dynamic
rendezvous pickles its state into such a store; that is unsafe, because everybody who reaches the port can change the
store. A client waits without limit for a silent host, so each operation runs on a thread. After a deadline the thread
and the store are abandoned."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from paceline.errors import InvalidInput, first_line

PREFIX = "paceline/"
MAX_VALUE = 4096
WAIT_S = 15.0
"""Seconds to wait for an answer of the store."""
CONNECT_S = 2.0
"""Seconds for each attempt to reach the store's port."""
ANSWER_S = 20.0
"""Seconds for each attempt to open the store; torch resolves each host's name, for 5 s if an answer is lost."""
FAULTS = (RuntimeError, OSError)
"""Errors of an operation if the store cannot be reached; torch's DistError is a RuntimeError."""
ResultT = TypeVar("ResultT")


class NodeStore:
    """JSON objects by key in the rendezvous store."""

    def __init__(self, store: Any, wait_s: float | None = None):
        """`store` is one of torch.distributed; `wait_s` bounds each operation, None for a store in this process."""
        self._store, self._wait_s = store, wait_s
        self._is_silent = False

    def number(self, key: str, increment: int) -> int:
        """Add `increment` to the counter `key`, and return the new value. Raises FAULTS."""
        return int(self._bounded(lambda: self._store.add(PREFIX + key, increment)))

    def write(self, key: str, **value: Any) -> None:
        """Write an object. Raises FAULTS."""
        self._bounded(lambda: self._store.set(PREFIX + key, json.dumps(value)))

    def read(self, key: str) -> dict[str, Any] | None:
        """Return an object without waiting for it: None if absent, empty if the value is no object. Raises FAULTS."""

        def read() -> bytes | None:
            return self._store.get(PREFIX + key) if self._store.check([PREFIX + key]) else None

        data = self._bounded(read)
        if data is None:
            return None
        try:
            value = json.loads(data) if len(data) <= MAX_VALUE else {}
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    def _bounded(self, operation: Callable[[], ResultT]) -> ResultT:
        """Return an operation's result. Raises TimeoutError after the deadline; later operations then raise it at once."""
        if self._wait_s is None:
            return operation()
        if self._is_silent:
            raise TimeoutError(f"no answer for {self._wait_s:g} s")
        try:
            return bounded(operation, self._wait_s)
        except TimeoutError:
            self._is_silent = True
            raise


def bounded(operation: Callable[[], ResultT], wait_s: float) -> ResultT:
    """Return an operation's result, or raise its error. Raises TimeoutError after `wait_s`; the operation continues."""
    result: Future[ResultT] = Future()

    def run() -> None:
        try:
            result.set_result(operation())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return result.result(wait_s)
    except TimeoutError:
        raise TimeoutError(f"no answer for {wait_s:g} s") from None


def connect(host: str, port: int) -> NodeStore:
    """Return the store of another host. Raises FAULTS if the port is closed or does not answer within ANSWER_S."""
    wait = timedelta(seconds=ANSWER_S)
    # Torch writes a C++ trace for each port that is closed.
    socket.create_connection((host, port), CONNECT_S).close()

    def connected() -> Any:
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)  # type: ignore[attr-defined]

    store = bounded(connected, ANSWER_S)
    store.set_timeout(timedelta(seconds=WAIT_S))
    return NodeStore(store, WAIT_S)


def serve(host: str, port: int) -> NodeStore:
    """Return a new store in this process that listens only on `host`. Raises InvalidInput if that is not possible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InvalidInput(f"--host {host!r} is not an address of this host: {error}") from None
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
            f"node 0 cannot host the rendezvous on {host}, port {port}: {first_line(error)}; give an address of this host as "
            "--host, and a free port in --rendezvous"
        ) from None
    listening.detach()  # the store closes it
    return NodeStore(store)
