"""The connections of the exchange's socket, watched from outside of ZeroMQ: who sends without ever ending a message is cut off,
and who sends far more than is read.

ZeroMQ gives a message out when its last frame is there, and bounds frames, not messages: until then everything is kept in memory.
So the kernel is asked how many bytes have come on each connection beyond those of the messages that were read. More than a message
can have, when all whole ones were read, means that the rest would never be wanted. Connections on which no member has spoken share
a budget, and those that stay like that, or say only what is refused, are closed: strangers use up neither memory nor the limit of
open files. An empty frame of two bytes costs ZeroMQ some 64, so the memory of this process is looked at too: where it grows
by far more than what is under way, whatever is under way is cut off. Honest senders connect again and send again.

Descriptors belong to ZeroMQ's thread, which says by its monitor when it opens and closes them. Between the closing and our
hearing of it a number may stand for another file: what is not a connection of this port is left alone.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.wire import MAX_MESSAGE_BYTES
from services.coordinator.memory import give_freed_memory_back

MAX_BYTES = MAX_MESSAGE_BYTES + (32 << 20)
"""That may come on a connection without a message being whole: arrays, texts and header of a group."""

MAX_UNREAD_BYTES = 4 * MAX_MESSAGE_BYTES
"""That may have come on a connection while whole messages wait to be read."""

MAX_REFUSED = 256
"""Messages on a connection on which no member has spoken."""

MAX_STRANGERS_BYTES = 512 << 20
"""Of either kind, on all connections together on which no member has spoken. A worker's first message may be a large group."""

MAX_STRANGERS_SHARE = 0.25
"""Of the files that may be open: as many connections may stand on which no member has spoken."""

MAX_GROWTH_BYTES = 256 << 20
"""By which this process may grow, beside twice what is under way, while a message comes."""

SUSPECT_BYTES = 64 << 10
"""Under way on a connection that is cut off when memory grows; less than that cannot be why."""

TRIM_S = 1.0
"""After a connection was cut off, ZeroMQ has freed what it kept of it by then."""

STRANGER_S = 15.0
"""So long a connection may stand on which no member has spoken."""

BYTES_RECEIVED = 128
"""Offset of tcpi_bytes_received in Linux's struct tcp_info."""


@dataclass
class Connection:
    """One of them."""

    opened_s: float
    mark: int = 0
    """Bytes that had come when the last message of it that had arrived was read."""
    read: int = 0
    """Bytes of its messages that were read since."""
    refused: int = 0
    """Messages of it that were no member's."""
    memory: int = 0
    """Of this process when next to nothing was under way on it, in bytes."""
    of_member: bool = False

    def under_way(self, came: int, memory: int, all_read: bool) -> int:
        """Bytes of messages that are not read, when so many have come in all and this process has so much memory."""
        if self.read and all_read:
            self.read, self.mark = 0, came
        size = max(0, came - self.mark - self.read)
        if size <= SUSPECT_BYTES:
            self.memory = memory
        return size


class Connections:
    """Those of the socket that is bound to `port`."""

    def __init__(self, port: int, clock: Callable[[], float] = time.monotonic):
        self._port, self._clock = port, clock
        self._max_strangers = int(MAX_STRANGERS_SHARE * resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._by_descriptor: dict[int, Connection] = {}
        self._trim_at_s = math.inf

    def __len__(self) -> int:
        return len(self._by_descriptor)

    def opened(self, descriptor: int) -> None:
        """ZeroMQ has accepted a connection."""
        self._by_descriptor[descriptor] = Connection(self._clock(), memory=_resident_bytes())

    def closed(self, descriptor: int) -> None:
        """ZeroMQ has closed it."""
        self._by_descriptor.pop(descriptor, None)

    def is_of_member(self, descriptor: int) -> bool:
        """Whether a member has spoken on it."""
        connection = self._by_descriptor.get(descriptor)
        return connection is not None and connection.of_member

    def note_message(self, descriptor: int, size: int, *, of_member: bool) -> None:
        """A whole message of `size` bytes was read from it."""
        connection = self._by_descriptor.get(descriptor)
        if connection is not None:
            connection.read += size
            connection.refused += not of_member
            connection.of_member |= of_member

    def check(self, *, all_read: bool = True) -> list[str]:
        """Cuts off what has too much under way, or is nobody's; says so, a sentence each. Unless every whole message has been
        read, nobody is blamed for what may be said in one that waits."""
        said, strangers_bytes, memory = [], 0, _resident_bytes()
        strangers = sum(not connection.of_member for connection in self._by_descriptor.values())
        under_way = {
            descriptor: connection.under_way(_bytes_received(descriptor), memory, all_read)
            for descriptor, connection in self._by_descriptor.items()
        }
        limit = memory - MAX_GROWTH_BYTES - 2 * sum(under_way.values())
        for descriptor, connection in list(self._by_descriptor.items()):
            size = under_way[descriptor]
            strangers_bytes += 0 if connection.of_member else size
            reason = self._fault(connection, size, strangers_bytes, strangers, all_read)
            is_suspect = size > SUSPECT_BYTES and (all_read or not connection.of_member)
            if not reason and is_suspect and connection.memory < limit:
                reason = f"this process has grown by {(memory - connection.memory) >> 20} MB while {size} bytes came on it"
            if reason:
                strangers -= not connection.of_member
                strangers_bytes -= 0 if connection.of_member else size
                if self.cut(descriptor):
                    said.append(reason)
                del self._by_descriptor[descriptor]
        self._trim(bool(said))
        return said

    def _trim(self, cut: bool) -> None:
        """Gives back to the system what ZeroMQ had kept: else the next to try would find it there, and nothing would grow."""
        now_s = self._clock()
        if cut:
            self._trim_at_s = now_s + TRIM_S
        elif now_s >= self._trim_at_s:
            self._trim_at_s = math.inf
            give_freed_memory_back()

    def _fault(
        self, connection: Connection, under_way: int, strangers_bytes: int, strangers: int, all_read: bool
    ) -> str:
        """Why a connection is cut off; empty where it stays. Asked for the oldest first: members introduce themselves at once."""
        if all_read and under_way > MAX_BYTES:
            return f"{under_way} bytes came on it without the end of a message, {MAX_BYTES} are allowed"
        if under_way > MAX_UNREAD_BYTES:
            return f"{under_way} bytes came on it that are not read yet, {MAX_UNREAD_BYTES} are allowed"
        if connection.of_member:
            return ""
        return self._strangers_fault(connection, strangers_bytes, strangers, all_read)

    def _strangers_fault(
        self, connection: Connection, strangers_bytes: int, strangers: int, all_read: bool
    ) -> str:
        """Likewise, where no member has spoken."""
        silent_s = self._clock() - connection.opened_s
        if connection.refused > MAX_REFUSED:
            return f"{connection.refused} messages on it were refused, and no member has spoken on it"
        if strangers_bytes > MAX_STRANGERS_BYTES:
            return f"connections on which no member has spoken have {strangers_bytes} bytes under way"
        if all_read and silent_s > STRANGER_S:
            return f"no member has spoken on it for {silent_s:.0f} s"
        if all_read and strangers > self._max_strangers:
            return f"{strangers} connections stand on which no member has spoken, {self._max_strangers} may"
        return ""

    def cut(self, descriptor: int) -> bool:
        """Ends a connection; ZeroMQ notices and frees what it has kept. False when the number is another file's by now, or
        none."""
        with contextlib.suppress(OSError, ValueError), _borrowed(descriptor) as connection:
            name = connection.getsockname()
            if isinstance(name, tuple) and name[1] == self._port:
                connection.shutdown(socket.SHUT_RDWR)
                return True
        return False


class _borrowed:
    """A socket object over a descriptor that stays ZeroMQ's."""

    def __init__(self, descriptor: int):
        self._socket = socket.socket(
            socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=descriptor
        )

    def __enter__(self) -> socket.socket:
        return self._socket

    def __exit__(self, *_: object) -> None:
        self._socket.detach()


def _bytes_received(descriptor: int) -> int:
    """Bytes that have come on a TCP connection; 0 where the system does not say."""
    if not sys.platform.startswith("linux"):
        return 0
    try:
        with _borrowed(descriptor) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED + 8)
    except OSError:  # it is closed by now
        return 0
    return int(struct.unpack_from("Q", info, BYTES_RECEIVED)[0]) if len(info) >= BYTES_RECEIVED + 8 else 0


def _resident_bytes() -> int:
    """Memory of this process that is in use; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
