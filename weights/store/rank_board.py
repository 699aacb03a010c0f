"""A board of notes for the background threads of all learner ranks, which must not use the default process group: its
collectives belong to training, and other collectives would interleave with them. A single rank needs no network;
several ranks use a rendezvous that rank 0 serves for this purpose only."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

POLL_S = 0.5
"""Seconds between a waiting thread's checks whether it has to stop."""
CONNECT_TIMEOUT = timedelta(seconds=60)
"""Longest attempt to reach the rendezvous, and longest wait for its answer. Never short: before it connects, torch asks
the resolver for the host's name (`getnameinfo` in c10d's socket.cpp), also for a numeric address and within the same
time-out. One lost answer of a name server takes 5 s (resolv.conf(5), `timeout`), and every shorter time-out then
failed."""


class RankBoard:
    """Notes under keys in the memory of a single rank. A note is written once; any rank may read it, repeatedly."""

    def __init__(self) -> None:
        self._notes: dict[str, bytes] = {}

    def put(self, key: str, note: bytes) -> None:
        self._notes[key] = note

    def wait(self, key: str, closed: threading.Event) -> bytes | None:
        """Wait for the note of that key and return it; None if `closed` was set first."""
        return self._notes[key]  # the only thread has written the note itself

    def remove(self, key: str) -> None:
        self._notes.pop(key, None)


def make_board(host: str, reachable: str, broadcast: Callable[[bytes], bytes]) -> RankBoard:
    """Return the board of all ranks: a collective call. Rank 0 listens on `host`, the others connect to `reachable`.
    `broadcast` returns rank 0's bytes on every rank."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return RankBoard()
    if dist.get_rank() == 0:
        store, port = serve_rendezvous(host)
        broadcast(f"{reachable} {port}".encode())
        return _TcpBoard(store)
    address, port_text = broadcast(b"").decode().split()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        address, int(port_text), is_master=False, timeout=CONNECT_TIMEOUT
    )
    return _TcpBoard(store)


def serve_rendezvous(bind_host: str) -> tuple[Any, int]:
    """Start a rendezvous at a free port, on one address only. Return its TCP store and the port."""
    import torch.distributed as dist

    family = socket.AF_INET6 if ":" in bind_host else socket.AF_INET
    # By default the store listens on every interface.
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((bind_host, 0))
        listener.listen(512)
    except OSError:
        listener.close()
        raise
    port = int(listener.getsockname()[1])
    reachable = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(bind_host, bind_host)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        reachable,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=CONNECT_TIMEOUT,
        master_listen_fd=listener.detach(),
    )
    return store, port


class _TcpBoard(RankBoard):
    """Board on torch's TCP store; used by one thread of each rank."""

    def __init__(self, store: Any, poll_s: float = POLL_S) -> None:
        self._store, self._poll_s = store, poll_s

    def put(self, key: str, note: bytes) -> None:
        self._store.set(key, note)

    def wait(self, key: str, closed: threading.Event) -> bytes | None:
        while not closed.is_set():
            if self._store.check([key]):
                return bytes(self._store.get(key))
            started_s = time.monotonic()
            try:
                self._store.wait([key], timedelta(seconds=self._poll_s))
            except RuntimeError:  # torch's DistError
                # A time-out and a lost rendezvous raise the same error; neither may become a busy loop. `check` above
                # raises for a lost one.
                closed.wait(max(0.0, self._poll_s - (time.monotonic() - started_s)))
        return None

    def remove(self, key: str) -> None:
        self._store.delete_key(key)
