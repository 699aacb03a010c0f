"""Handshakes of TLS that came to no call, with the address of who tried: gRPC ends those that it refuses and names nobody.

Promise: each connection to the server's ports that ends before a call is told once, some seconds after its end, by its address as far
as the kernel showed it while it was open; and no connection is told on which a call was made, or that stands for longer than a
handshake may take. A peer that goes away by itself before it calls, as a check of the port does, is told too: from here it looks the
same.

gRPC asks for the certificate once for each connection that it has accepted, before the handshake; then the kernel is asked for the
connections. In a flood not every connection is looked for; those that were gone before anybody looked are told without an address.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection

from services.common.grpc_peers import Peer, peer_of
from services.common.open_connections import Connection

SWEEP_S = 2.0
"""Seconds between two sweeps."""

LOOK_SHARE = 0.05
"""Most of a processor that looking for new connections takes."""


class Handshakes:
    """The connections to one server. `began` is called on gRPC's threads, `called` on the event loop, `sweep` on any thread."""

    def __init__(
        self,
        connections: Callable[[], Collection[Connection]],
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`connections` returns the open connections, or raises OSError; it is called by one thread at a time. A handshake has
        `limit_s` seconds."""
        self._connections, self._limit_s, self._clock = connections, limit_s, clock
        self._lock = threading.Lock()
        self._began = self._began_before = 0
        """Connections that were accepted, now and at the last sweep."""
        self._found = 0
        """Those of them that were found by a look or by a call."""
        self._open: dict[int, Peer] = {}
        """Connections that the last look showed, by inode."""
        self._waiting: dict[int, tuple[Peer, float]] = {}
        """Connections without a call yet, by inode, and when they were first seen."""
        self._missing: set[int] = set()
        """Those of them that were closed at the last sweep; a call of theirs may be on its way."""
        self._settled: set[Peer] = set()
        """Peers with a call, and those whose connection has outlived the handshake."""
        self._left: set[Peer] = set()
        """Those of them that were gone at the last sweep."""
        self._not_looked_for: set[Peer] = set()
        """Peers with a call whose connection no look has shown."""
        self._next_look_s = 0.0

    def began(self) -> None:
        """Note that a connection was accepted. Never raises."""
        with self._lock:
            self._began += 1
            now_s = self._clock()
            if now_s >= self._next_look_s:
                began_s = time.thread_time()
                self._look(now_s)
                self._next_look_s = now_s + (time.thread_time() - began_s) / LOOK_SHARE

    def called(self, name: str) -> None:
        """Note a call on the connection with gRPC's name of its peer."""
        peer = peer_of(name)
        if peer in self._settled:  # nearly always, and without the lock
            return
        with self._lock:
            waiting = [inode for inode, (each, _) in self._waiting.items() if each == peer]
            for inode in waiting:
                del self._waiting[inode]
            if not waiting and peer not in self._left:
                self._found += 1
                self._not_looked_for.add(peer)
            self._settled.add(peer)

    def sweep(self) -> Counter[str]:
        """Return the connections that have ended without a call since the last sweep: their number by address and port; an empty
        text stands for those that were gone before anybody looked."""
        refused: Counter[str] = Counter()
        with self._lock:
            if self._began == self._began_before <= self._found and not self._waiting:
                return refused
            now_s = self._clock()
            if not self._look(now_s):
                return refused
            for inode, (peer, since_s) in list(self._waiting.items()):
                if inode in self._open:
                    if now_s - since_s > self._limit_s + SWEEP_S:
                        del self._waiting[inode]
                        self._settled.add(peer)
                elif inode in self._missing:
                    del self._waiting[inode]
                    refused[_text(peer)] += 1
            self._missing = self._waiting.keys() - self._open.keys()
            if (nameless := self._began_before - self._found) > 0:
                refused[""] += nameless
            self._found = min(max(self._found, self._began_before), self._began)
            self._began_before = self._began
            self._forget()
        return refused

    def _look(self, now_s: float) -> bool:
        """Note the connections that are open, and those that are new; return False where the system does not tell."""
        try:
            found = {each.inode: each.peer for each in self._connections()}
        except OSError:
            return False
        for inode in found.keys() - self._open.keys():
            peer = found[inode]
            if peer in self._not_looked_for:
                self._not_looked_for.discard(peer)
                continue
            self._found += 1
            self._settled.discard(peer)  # of an earlier connection from the same port
            self._waiting[inode] = peer, now_s
        self._open = found
        return True

    def _forget(self) -> None:
        """Forget the peers that were gone at the last sweep and still are."""
        gone = self._settled - set(self._open.values())
        self._settled -= gone & self._left
        self._not_looked_for &= self._settled
        self._left = gone & self._settled


def _text(peer: Peer) -> str:
    address, port = peer
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
