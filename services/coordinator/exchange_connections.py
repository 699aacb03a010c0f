"""The connections of the exchange's socket, watched from outside of ZeroMQ: who sends without ever ending a message is cut off.

ZeroMQ gives a message out when its last frame is there, and bounds frames, not messages: until then everything is kept in memory.
So the kernel is asked how many bytes have come on each connection since the last whole message of it. More than a message can
have means that the rest would never be wanted. Connections on which no member has spoken share a budget, and those that stay like
that are closed: strangers use up neither memory nor the limit of open files.

Descriptors belong to ZeroMQ's thread, which says by its monitor when it opens and closes them. Between the closing and our
hearing of it a number may stand for another file: what is not a connection of this port is left alone.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.wire import MAX_MESSAGE_BYTES

MAX_BYTES = MAX_MESSAGE_BYTES + (32 << 20)
"""That may come on a connection without a message being whole: arrays, texts and header of a group."""

MAX_STRANGERS_BYTES = 512 << 20
"""Likewise on all connections together on which no member has spoken. A worker's first message may be a large group."""

MAX_STRANGERS_SHARE = 0.25
"""Of the files that may be open: as many connections may stand on which no member has spoken."""

STRANGER_S = 15.0
"""So long a connection may stand on which no member has spoken."""

BYTES_RECEIVED = 128
"""Offset of tcpi_bytes_received in Linux's struct tcp_info."""


@dataclass
class Connection:
    """One of them."""

    opened_s: float
    mark: int = 0
    """Bytes that had come when a message of it was last seen whole."""
    heard: bool = False
    """Whether one was since the last look."""
    of_member: bool = False


class Connections:
    """Those of the socket that is bound to `port`."""

    def __init__(self, port: int, clock: Callable[[], float] = time.monotonic):
        self._port, self._clock = port, clock
        self._max_strangers = int(MAX_STRANGERS_SHARE * resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._by_descriptor: dict[int, Connection] = {}

    def __len__(self) -> int:
        return len(self._by_descriptor)

    def opened(self, descriptor: int) -> None:
        """ZeroMQ has accepted a connection."""
        self._by_descriptor[descriptor] = Connection(self._clock())

    def closed(self, descriptor: int) -> None:
        """ZeroMQ has closed it."""
        self._by_descriptor.pop(descriptor, None)

    def is_of_member(self, descriptor: int) -> bool:
        """Whether a member has spoken on it."""
        connection = self._by_descriptor.get(descriptor)
        return connection is not None and connection.of_member

    def heard(self, descriptor: int, *, of_member: bool) -> None:
        """A whole message has come on it."""
        connection = self._by_descriptor.get(descriptor)
        if connection is not None:
            connection.heard = True
            connection.of_member |= of_member

    def look(self) -> list[str]:
        """Cuts off what has too much under way, or is nobody's; says so, a sentence each. Only when every whole message has
        been read."""
        said, strangers_bytes = [], 0
        strangers = sum(not connection.of_member for connection in self._by_descriptor.values())
        for descriptor, connection in list(self._by_descriptor.items()):
            came = _bytes_received(descriptor)
            if connection.heard:
                connection.heard, connection.mark = False, came
            under_way = came - connection.mark
            strangers_bytes += 0 if connection.of_member else under_way
            reason = self._fault(connection, under_way, strangers_bytes, strangers)
            if reason:
                strangers -= not connection.of_member
                strangers_bytes -= 0 if connection.of_member else under_way
                if self._cut(descriptor):
                    said.append(reason)
                del self._by_descriptor[descriptor]
        return said

    def _fault(self, connection: Connection, under_way: int, strangers_bytes: int, strangers: int) -> str:
        """Why a connection is cut off; empty where it stays. Asked for the oldest first: members introduce themselves at once."""
        silent_s = self._clock() - connection.opened_s
        if under_way > MAX_BYTES:
            return f"{under_way} bytes came on it without the end of a message, {MAX_BYTES} are allowed"
        if not connection.of_member and silent_s > STRANGER_S:
            return f"no member has spoken on it for {silent_s:.0f} s"
        if not connection.of_member and strangers > self._max_strangers:
            return f"{strangers} connections stand on which no member has spoken, {self._max_strangers} may"
        if not connection.of_member and strangers_bytes > MAX_STRANGERS_BYTES:
            return f"connections on which no member has spoken have {strangers_bytes} bytes under way"
        return ""

    def _cut(self, descriptor: int) -> bool:
        """Ends a connection; ZeroMQ notices and frees what it has kept. False when the number is another file's by now."""
        with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
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
