"""The Unix socket between a host's relay and its workers and learner ranks, for messages and descriptors of memory.

The socket is abstract: it belongs to a network namespace, so the containers of a pod share it, and it leaves nothing in
a file system. If several relays start at once, the relay that binds the socket remains. `PACELINE_AGENT_DIR` names a
folder for containers that share a relay but no network namespace. Both sides accept only their own user's processes.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import hashlib
import os
import socket
import struct
import threading
from pathlib import Path
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from paceline.errors import Conflict, Unavailable, Unreadable, WireError
from paceline.host.own_folder import own_folder
from paceline.weights.format.manifest import MAX_MANIFEST_BYTES

FOLDER_VARIABLE = "PACELINE_AGENT_DIR"
LABEL_VARIABLE = "PACELINE_AGENT_LABEL"
"""Environment variable that separates the relays of processes on one host, as if the processes were on several hosts.
"""
HEAD = struct.Struct("<IB3x")
"""Head of a message: its number of bytes, and 1 if a descriptor belongs to it. Several messages may be received at
once.
"""
CREDENTIALS = struct.Struct("3i")
MAX_MESSAGE_BYTES = MAX_MANIFEST_BYTES + (1 << 20)
SEND_TIMEOUT_S = 10.0
BACKLOG = 64
MessageT = TypeVar("MessageT", bound=Message)


def socket_name(coordinator: str, host: str) -> str:
    """Return the socket's name, which workers of this host with the same coordinator and address for weights share."""
    key = "\n".join((coordinator, host, os.environ.get(LABEL_VARIABLE, "")))
    name = f"paceline-agent-{os.getuid()}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    folder = os.environ.get(FOLDER_VARIABLE, "")
    return f"{folder}/{name}.sock" if folder else f"@{name}"


def listen(name: str) -> socket.socket:
    """Return a socket that listens at `name`. Raises Conflict if another process listens there, and Unavailable."""
    if not name.startswith("@"):
        try:
            own_folder(Path(name).parent, FOLDER_VARIABLE)
        except (Unreadable, OSError) as error:
            raise Unavailable(f"no relay can listen at {name}: {error}") from error
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if name.startswith("@"):
            listener.bind(_address(name))
            listener.listen(BACKLOG)
        else:
            _listen_in_folder(listener, name)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise Unavailable(
                f"no relay can listen at {name} ({error}); correct {FOLDER_VARIABLE} if it is set"
            ) from error
        raise Conflict(f"another relay listens at {name}") from error
    return listener


def connect(name: str, timeout_s: float) -> LocalConnection:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(_address(name))
        return LocalConnection(connection)
    except OSError as error:
        connection.close()
        raise Unavailable(f"no relay at {name}: {error.strerror or error}") from error


class LocalConnection:
    """A connection between a relay and a client. One thread receives, any may send."""

    def __init__(self, connection: socket.socket) -> None:
        """Raise Unavailable if the peer is a process of another user."""
        self._socket = connection
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._fds: list[int] = []
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        self.peer_pid, user, _ = CREDENTIALS.unpack(credentials)
        if user != os.getuid():
            connection.close()
            raise Unavailable(
                f"process {self.peer_pid} runs as user {user}, but this process shares weights only with processes of "
                f"user {os.getuid()}"
            )

    def send(self, message: Message, fd: int | None = None) -> None:
        """Send a message with its descriptor, if any. Raises Unavailable."""
        data = message.SerializeToString()
        data = HEAD.pack(len(data), fd is not None) + data
        ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        try:
            with self._sending:
                sent = self._socket.sendmsg([data], ancillary)
                self._socket.sendall(memoryview(data)[sent:])
        except OSError as error:
            self.close()
            raise Unavailable(f"the connection to process {self.peer_pid} broke: {error}") from error

    def receive(self, kind: type[MessageT], timeout_s: float | None) -> tuple[MessageT, int | None] | None:
        """Return the next message and its descriptor, which the caller closes; None if none came in time. Raises
        Unavailable if the peer has ended the connection, WireError for malformed bytes."""
        try:
            while True:
                parsed = self._parsed(kind)
                if parsed is not None:
                    message, has_fd = parsed
                    return message, self._fds.pop(0) if has_fd and self._fds else None
                self._socket.settimeout(timeout_s)
                data, fds, _, _ = socket.recv_fds(self._socket, 1 << 16, 4)
                self._socket.settimeout(SEND_TIMEOUT_S)
                self._fds += fds
                if not data:
                    raise Unavailable(f"process {self.peer_pid} has ended the connection")
                self._buffer += data
        except TimeoutError:
            return None
        except (OSError, ValueError) as error:
            raise Unavailable(f"the connection to process {self.peer_pid} broke: {error}") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _parsed(self, kind: type[MessageT]) -> tuple[MessageT, bool] | None:
        if len(self._buffer) < HEAD.size:
            return None
        length, has_fd = HEAD.unpack_from(self._buffer)
        if length > MAX_MESSAGE_BYTES:
            raise WireError(f"a relay's message has {length} bytes, more than {MAX_MESSAGE_BYTES}")
        end = HEAD.size + length
        if len(self._buffer) < end:
            return None
        try:
            message = kind.FromString(bytes(self._buffer[HEAD.size : end]))
        except DecodeError as error:
            raise WireError(f"the bytes received are not a message of a relay: {error}") from error
        del self._buffer[:end]
        return message, bool(has_fd)


def _address(name: str) -> str:
    return f"\0{name[1:]}" if name.startswith("@") else name


def _listen_in_folder(listener: socket.socket, name: str) -> None:
    """Listen in place of a relay that has ended; one relay at a time does so. Raises OSError if one still listens."""
    with open(f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            probe.connect(name)
        except OSError:
            new = f"{name}.new"
            Path(new).unlink(missing_ok=True)
            listener.bind(new)
            listener.listen(BACKLOG)
            os.rename(new, name)  # the name appears only when it accepts connections
        else:
            raise OSError(errno.EADDRINUSE, f"another relay listens at {name}")
        finally:
            probe.close()
