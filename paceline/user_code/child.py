"""Runs in each process of user code: connects to the service, redirects output, limits memory, and finds causes of
errors. Promises: the user code runs in its box (`paceline.user_code.box`), its output cannot get into the protocol, it
cannot add more address space than its limit, and the process does not outlive the service. This module never imports
torch or transformers."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from paceline.host.process import die_with_parent
from paceline.user_code.box import Box

MAX_LIMIT_BYTES = 2**62
"""Largest value that setrlimit takes."""
OOM_SCORE = 500
"""OOM score, at most 1000: if the host runs out of memory, the kernel kills this process before the service."""


def connect(killed_first: bool = True) -> socket.socket:
    """Return the process' end of the socket pair. argv[2] is its descriptor, argv[3] the service's process, argv[5] the
    box. killed_first: the kernel kills this process before the service if the host runs out of memory."""
    connection_fd, service_pid = int(sys.argv[2]), int(sys.argv[3])
    # On systems other than Linux, the closed socket ends an idle process.
    die_with_parent(service_pid, signal.SIGKILL)
    if killed_first:
        be_killed_first()
    print_to_stderr()
    os.set_inheritable(connection_fd, False)
    if len(sys.argv) > 5:
        Box.read(sys.argv[5]).close()
    return socket.socket(fileno=connection_fd)


class MemoryBudget:
    """Limit of the address space that user code may add to the process over all calls."""

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self._added_bytes = 0

    @contextlib.contextmanager
    def limit(self) -> Iterator[None]:
        """Limit the address space of this process while the user code runs."""
        mapped_before = mapped_bytes()
        if mapped_before is None:
            yield
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit_bytes = min(mapped_before + max(0, self.memory_bytes - self._added_bytes), MAX_LIMIT_BYTES)
        if hard != resource.RLIM_INFINITY:
            limit_bytes = min(limit_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
            self._added_bytes += (mapped_bytes() or mapped_before) - mapped_before


def mapped_bytes() -> int | None:
    """Return the address space of this process; None on systems other than Linux."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None


def is_unreachable(error: BaseException | None) -> bool:
    """Return whether a failed connection caused `error`: a fault of the called service, not of user code or data."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
            return True
        seen.add(id(error))
        reason = getattr(error, "reason", None)  # urllib's URLError keeps the cause there
        error = reason if isinstance(reason, BaseException) else error.__cause__ or error.__context__
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the memory limit caused `error`."""
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and "allocate memory" in str(error))  # torch
        or (isinstance(error, RuntimeError) and "can't start new thread" in str(error))
    )


def be_killed_first() -> None:
    """Let the kernel kill this process before the service if the host runs out of memory. Linux only."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))


def print_to_stderr() -> None:
    """Redirect the user code's output, also below Python, to the service's log."""
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True, errors="backslashreplace")
