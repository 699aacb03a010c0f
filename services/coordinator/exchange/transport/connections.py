"""Watches the connections of the exchange's socket from outside of ZeroMQ, and closes those of senders that never end a
message or send far more than is read.

ZeroMQ delivers a message when its last frame has arrived; until then it keeps all frames in memory. It limits the size
of a frame, but not that of a message. So the kernel is asked how many bytes have arrived on each connection beyond
those of the messages that were read. If all whole messages were read and more bytes are left than a message can have,
the connection is closed. Connections on which no member has sent a message share a budget. They are closed if this
lasts too long, or if they send only refused messages, so strangers use up neither memory nor the limit of open files.
An empty frame of two bytes costs ZeroMQ some 64 bytes, so the memory of this process is checked too: if it grows by far
more than the unread bytes, the connections with unread bytes are closed. Honest senders connect and send again.

Descriptors belong to ZeroMQ's thread, whose monitor reports when they open and close. Between the close of a descriptor
and the report of it, its number may belong to another file, so a descriptor that is no connection of this port is
ignored.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paceline.host.resources import give_freed_memory_back
from paceline.services.common.serving.endpoints import in_brackets
from paceline.wire import MAX_MESSAGE_BYTES

MAX_STRANGERS_SHARE = 0.25
"""Largest share of the files that may be open for connections on which no member has sent a message."""

HARMLESS_BYTES = 64 << 10
"""Largest number of unread bytes with which a connection is not closed because of memory growth."""

TRIM_S = 1.0
"""Seconds after which ZeroMQ has freed the memory of a closed connection."""

STRANGER_S = 15.0
"""Longest time, in seconds, for which a connection may be open on which no member has sent a message."""

BYTES_RECEIVED = 128
"""Offset, in bytes, of tcpi_bytes_received in Linux's struct tcp_info."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of a socket's connections. A stranger is a connection on which no member has sent a message."""

    message_bytes: int = MAX_MESSAGE_BYTES + (32 << 20)
    """Largest number of bytes of a connection without the end of a message: a group's arrays, texts and header."""
    unread_bytes: int = 4 * MAX_MESSAGE_BYTES
    """Largest number of bytes of a connection while whole messages wait to be read."""
    refused: int = 256
    """Largest number of refused messages of a stranger."""
    strangers_bytes: int = 512 << 20
    """Largest number of unread bytes of all strangers together. A worker's first message may be a large group."""
    strangers: int = 4096
    """Largest number of strangers, even if more files may be open, because each stranger takes memory."""
    growth_bytes: int = 256 << 20
    """Bytes by which this process may grow, beyond twice the unread bytes, while a message arrives."""
    discarded_at_once: int = 10_000
    """Largest number of frames that one turn of the event loop discards of a message with too many frames."""


DEFAULT_LIMITS = ConnectionLimits()


@dataclass
class Connection:
    opened_s: float
    mark: int = 0
    """Bytes that had arrived on the connection when all arrived messages were last read."""
    read: int = 0
    """Bytes of the connection's messages read since `mark` was set."""
    refused: int = 0
    memory: int = 0
    """Memory of this process, in bytes, when the connection last had almost no unread bytes."""
    of_member: bool = False

    def under_way(self, came: int, memory: int, all_read: bool) -> int:
        """Return the bytes of unread messages; `came` bytes have arrived, and this process uses `memory` bytes."""
        if self.read and all_read:
            self.read, self.mark = 0, came
        size = max(0, came - self.mark - self.read)
        if size <= HARMLESS_BYTES:
            self.memory = memory
        return size


class Connections:
    """Open connections of the socket that is bound to `port`."""

    def __init__(
        self, port: int, limits: ConnectionLimits = DEFAULT_LIMITS, clock: Callable[[], float] = time.monotonic
    ):
        self._port, self._limits, self._clock = port, limits, clock
        share = int(MAX_STRANGERS_SHARE * resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._max_strangers = min(limits.strangers, share)
        self._by_descriptor: dict[int, Connection] = {}
        self._trim_at_s = math.inf

    def __len__(self) -> int:
        return len(self._by_descriptor)

    def opened(self, descriptor: int) -> None:
        self._by_descriptor[descriptor] = Connection(self._clock(), memory=_resident_bytes())

    def closed(self, descriptor: int) -> None:
        self._by_descriptor.pop(descriptor, None)

    def is_of_member(self, descriptor: int) -> bool:
        connection = self._by_descriptor.get(descriptor)
        return connection is not None and connection.of_member

    def note_message(self, descriptor: int, size: int, *, of_member: bool) -> None:
        """Note that a whole message of `size` bytes was read from a connection."""
        connection = self._by_descriptor.get(descriptor)
        if connection is not None:
            connection.read += size
            connection.refused += not of_member
            connection.of_member |= of_member

    def check(self, *, all_read: bool = True) -> list[str]:
        """Close connections with too many unread bytes, and those that no member uses; return the reasons. Unless every
        whole message was read, no connection is closed for bytes that a waiting message may explain."""
        reasons, strangers_bytes, memory = [], 0, _resident_bytes()
        strangers = sum(not connection.of_member for connection in self._by_descriptor.values())
        under_way = {
            descriptor: connection.under_way(_bytes_received(descriptor), memory, all_read)
            for descriptor, connection in self._by_descriptor.items()
        }
        limit = memory - self._limits.growth_bytes - 2 * sum(under_way.values())
        for descriptor, connection in list(self._by_descriptor.items()):
            size = under_way[descriptor]
            strangers_bytes += 0 if connection.of_member else size
            reason = self._fault(connection, size, strangers_bytes, strangers, all_read)
            may_be_cause = size > HARMLESS_BYTES and (all_read or not connection.of_member)
            if not reason and may_be_cause and connection.memory < limit:
                reason = f"this process grew by {(memory - connection.memory) >> 20} MB while {size} bytes arrived"
            if reason:
                strangers -= not connection.of_member
                strangers_bytes -= 0 if connection.of_member else size
                if self.cut(descriptor):
                    reasons.append(reason)
                del self._by_descriptor[descriptor]
        self._trim(bool(reasons))
        return reasons

    def _trim(self, cut: bool) -> None:
        """Return freed memory to the system; otherwise the growth by the next attack would not show."""
        now_s = self._clock()
        if cut:
            self._trim_at_s = now_s + TRIM_S
        elif now_s >= self._trim_at_s:
            self._trim_at_s = math.inf
            give_freed_memory_back()

    def _fault(
        self, connection: Connection, under_way: int, strangers_bytes: int, strangers: int, all_read: bool
    ) -> str:
        """Return why a connection must be closed; empty if it may stay. Called for the oldest connection first."""
        limits = self._limits
        if all_read and under_way > limits.message_bytes:
            return f"{under_way} bytes arrived without the end of a message, but {limits.message_bytes} are allowed"
        if under_way > limits.unread_bytes:
            return f"{under_way} bytes arrived that are not read yet, but {limits.unread_bytes} are allowed"
        if connection.of_member:
            return ""
        silent_s = self._clock() - connection.opened_s
        if connection.refused > limits.refused:
            return f"{connection.refused} messages were refused, and no member has used the connection"
        if strangers_bytes > limits.strangers_bytes:
            return f"connections that no member has used have {strangers_bytes} unread bytes"
        if all_read and silent_s > STRANGER_S:
            return f"no member has used the connection for {silent_s:.0f} s"
        if all_read and strangers > self._max_strangers:
            return f"{strangers} connections are open that no member has used, but {self._max_strangers} are allowed"
        return ""

    def address_of(self, descriptor: int) -> str:
        """Return the peer of a connection as host:port; empty if the descriptor is closed or another file's."""
        with contextlib.suppress(OSError, ValueError), _borrowed(descriptor) as connection:
            if connection.getsockname()[1] == self._port:
                host, port = connection.getpeername()[:2]
                return f"{in_brackets(host)}:{port}"
        return ""

    def cut(self, descriptor: int) -> bool:
        """Shut a connection down; return False if the descriptor is closed or another file's."""
        with contextlib.suppress(OSError, ValueError), _borrowed(descriptor) as connection:
            name = connection.getsockname()
            if isinstance(name, tuple) and name[1] == self._port:
                connection.shutdown(socket.SHUT_RDWR)
                return True
        return False


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Yield a socket object for a descriptor that ZeroMQ owns."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()


def _bytes_received(descriptor: int) -> int:
    """Return the bytes received on a TCP connection; 0 if the system does not report them."""
    if not sys.platform.startswith("linux"):
        return 0
    try:  # without `_borrowed`, because every tick asks for every connection
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=descriptor)
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_RECEIVED + 8)
        finally:
            connection.detach()
    except OSError:  # already closed
        return 0
    return int(struct.unpack_from("Q", info, BYTES_RECEIVED)[0]) if len(info) >= BYTES_RECEIVED + 8 else 0


def _resident_bytes() -> int:
    """Return the resident memory of this process; 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
