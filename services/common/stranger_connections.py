"""Connections to a gRPC server on which nobody has made an accepted call, bounded by address.

Promise: one address keeps MAX_OF_ADDRESS such connections for longer than two checks; others are ended, and connections of
callers never are.

gRPC tells a server who connects with the first call only, so the kernel is asked for the connections of this process. It is
asked on a thread, and only while there are enough of them to matter. A descriptor may stand for another file by the time that its
connection is to end, so the end is of a duplicate whose peer was compared.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection

from services.common.grpc_peers import Peer, peer_of
from services.common.open_connections import FOLDER, Connection, OpenConnections, end

MAX_OF_ADDRESS = 256
"""Connections without an accepted call that stay open from one address."""

CHECK_S = 5.0
"""Seconds between two checks."""

MAX_NAMED = 1024
"""Callers beyond which those that have left are looked for, however few files are open."""


class StrangerConnections:
    """The connections to one server. `accepted` is called on the event loop, `check` on a thread."""

    def __init__(self, max_of_address: int = MAX_OF_ADDRESS):
        self._most = max_of_address
        self._connections = OpenConnections()
        self._callers: set[Peer] = set()
        self._seen: set[Peer] = set()
        """Strangers at the last check."""
        self._ended: set[int] = set()
        """Inodes of connections that were ended here and that gRPC has not closed yet."""

    @property
    def num_callers(self) -> int:
        """Return the number of connections that are remembered as those of callers."""
        return len(self._callers)

    def accepted(self, peer: str) -> None:
        """Note that a call on the connection with gRPC's name `peer` was accepted."""
        self._callers.add(peer_of(peer))

    def check(self, ports: Collection[int]) -> int:
        """End the connections to these ports that are too many of one address; return their number."""
        if _num_files() <= self._most and len(self._callers) <= MAX_NAMED:
            self._seen = set()
            return 0
        # Later ones may be of connections that are missing in what the kernel says.
        callers = set(self._callers)
        try:
            found_here = self._connections.to(ports)
        except OSError:  # this system, or this container, does not say
            return 0
        self._ended &= {each.inode for each in found_here}
        strangers: dict[str, list[Connection]] = defaultdict(list)
        for each in found_here:
            if each.peer not in self._callers and each.inode not in self._ended:
                strangers[each.peer[0]].append(each)
        self._callers -= callers - {each.peer for each in found_here}
        num_ended = 0
        for found in strangers.values():
            # The newest may be about to make their first call.
            old = [each for each in found if each.peer in self._seen]
            for each in old[: max(0, len(found) - self._most)]:
                if end(each.descriptor, each.peer):
                    self._ended.add(each.inode)
                    num_ended += 1
        self._seen = {each.peer for found in strangers.values() for each in found}
        return num_ended


def _num_files() -> int:
    """Return the number of this process's open files; 0 where the system does not report it."""
    try:
        return len(os.listdir(FOLDER))
    except OSError:
        return 0
