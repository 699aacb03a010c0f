"""The TCP connections that this process has accepted on its ports, as the kernel tells them. Linux only: it reads /proc."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Collection
from typing import NamedTuple

from services.common.grpc_peers import Peer, plain

FOLDER = "/proc/self/fd"


class Connection(NamedTuple):
    """A connection."""

    inode: int
    """Its number, which no other connection gets."""
    descriptor: int
    """It may stand for another file by the time that it is used."""
    peer: Peer


class OpenConnections:
    """The connections of one server. Not for several threads at once."""

    def __init__(self) -> None:
        self._sockets: dict[tuple[int, int], tuple[int, Peer] | None] = {}
        """The own port and the peer of each socket by descriptor and inode; None for one that is no accepted connection."""

    def to(self, ports: Collection[int]) -> list[Connection]:
        """Return the connections to these ports, also those that the peer has closed, not those that it has reset. Raises
        OSError where the system does not tell."""
        sockets: dict[tuple[int, int], tuple[int, Peer] | None] = {}
        for name in os.listdir(FOLDER):
            descriptor = int(name)
            try:
                state = os.fstat(descriptor)
            except OSError:  # closed meanwhile, as is the descriptor of the folder itself
                continue
            if stat.S_ISSOCK(state.st_mode):
                key = descriptor, state.st_ino
                sockets[key] = self._sockets[key] if key in self._sockets else _ends(descriptor)
        self._sockets = sockets
        return [
            Connection(inode, descriptor, ends[1])
            for (descriptor, inode), ends in sockets.items()
            if ends is not None and ends[0] in ports
        ]


def _ends(descriptor: int) -> tuple[int, Peer] | None:
    """Return the own port and the peer of a socket; None where it has no peer, or is of another kind."""
    try:
        borrowed = socket.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        if borrowed.family not in (socket.AF_INET, socket.AF_INET6) or borrowed.type != socket.SOCK_STREAM:
            return None
        address, port = borrowed.getpeername()[:2]
        return int(borrowed.getsockname()[1]), (plain(address), int(port))
    except OSError:
        return None
    finally:
        borrowed.detach()


def end(descriptor: int, peer: Peer) -> bool:
    """End a connection, which its owner notices; return False when the descriptor is another file's by now."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        address, port = connection.getpeername()[:2]
        if (plain(address), port) == peer:
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False
