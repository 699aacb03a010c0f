"""Bounds two things that user code leaves behind: processes, and output in the service's log.

A process that leaves its group (setsid) and whose parent ends is adopted by the nearest ancestor that asks for it
(`adopt`), a service that runs user code. `end_strays` then ends the adopted processes: when the last process of user
code of this service has ended, and at the service's end. Zombies among them are reaped. A service that was itself
killed by SIGKILL does not do this; `paceline up` then ends those with `MARK` in their environment. Linux only.

Output is copied to the service's standard error by `OutputLimit`: a service's log shares a disk with the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
MARK = "PACELINE_USER_CODE"
"""Variable in the environment of user code."""
END_S = 2.0
"""Longest time in which strays are killed again, because they may start others."""
REAP_S = 1.0
"""Least time between two searches for zombies."""

log = logging.getLogger(__name__)


class _Started:
    """Processes of user code that this process has started and not reaped."""

    def __init__(self) -> None:
        self.is_adopting = False
        self.starting = 0
        """Number of processes that are being started, whose ids are not known yet."""
        self.pids: set[int] = set()
        self.reaped_s = float("-inf")


_started = _Started()


def adopt() -> None:
    """Let this process adopt the processes that its descendants leave behind. For services, not for a user's program."""
    if sys.platform.startswith("linux"):
        _started.is_adopting = ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


@contextlib.contextmanager
def starting() -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the id of the process that the body starts. `ended` removes it."""
    _started.starting += 1
    try:
        yield _started.pids.add
    finally:
        _started.starting -= 1


def ended(pid: int) -> None:
    """Note that a process of user code was reaped. After the last one, end what they have left."""
    _started.pids.discard(pid)
    if _started.is_adopting and not _started.pids and not _started.starting:
        end_strays()


def reap_strays() -> None:
    """Reap adopted processes that have ended by themselves."""
    now_s = time.monotonic()
    if _started.is_adopting and not _started.starting and now_s - _started.reaped_s > REAP_S:
        _started.reaped_s = now_s
        for pid in strays():
            _reap(pid)


def end_strays(belongs: Callable[[int], bool] = lambda pid: True) -> None:
    """Kill the adopted processes for which `belongs` is true, with their descendants, and reap them."""
    deadline_s = time.monotonic() + END_S
    while found := [pid for pid in strays() if belongs(pid)]:
        for pid in (each for stray in found for each in (stray, *_descendants(stray))):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        left = [pid for pid in found if not _reap(pid)]
        if time.monotonic() > deadline_s:
            log.warning("processes %s that user code has left behind do not end", left)
            return
        if left:
            time.sleep(0.01)


def strays() -> list[int]:
    """Return the adopted processes of user code: children in another session that this process has not started."""
    session = os.getsid(0)
    found = []
    for pid in _children(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            if pid not in _started.pids and os.getsid(pid) != session:
                found.append(pid)
    return found


def is_marked(pid: int) -> bool:
    """Return whether a process has the environment of user code, which this process has not."""
    try:
        return MARK not in os.environ and f"{MARK}=1".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def _descendants(pid: int) -> Iterator[int]:
    for child in _children(pid):
        yield child
        yield from _descendants(child)


def _reap(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


OUTPUT_RATE = 16 << 10
"""Bytes of output that a service's user code may write in a second for long."""
OUTPUT_BURST = 1 << 20
"""Bytes that it may write at once."""
OUTPUT_TOTAL = 64 << 20
"""Bytes that it may write in the service's life."""


class OutputLimit:
    """Decides which output of user code is written. It only computes."""

    def __init__(self, rate: int = OUTPUT_RATE, burst: int = OUTPUT_BURST, total: int = OUTPUT_TOTAL):
        self._rate, self._burst, self._total = rate, burst, total
        self._room, self._room_s = float(burst), 0.0
        self._written = self._left_out = 0

    def admit(self, data: bytes, now_s: float) -> bytes:
        """Return the part of `data` that is written, with a sentence where output is left out."""
        if self._written >= self._total:
            return b""
        self._room = min(self._burst, self._room + (now_s - self._room_s) * self._rate)
        self._room_s = now_s
        if self._left_out and self._room < min(self._rate, self._burst):
            self._left_out += len(data)
            return b""
        before = f"[{self._left_out} bytes of output of user code were left out]\n".encode() if self._left_out else b""
        kept = data[: min(int(self._room), self._total - self._written)]
        self._room -= len(kept)
        self._written += len(kept)
        self._left_out = len(data) - len(kept)
        return before + kept + (self._sentence() if self._left_out or self._written >= self._total else b"")

    def _sentence(self) -> bytes:
        if self._written >= self._total:
            why = f"has written {self._total >> 20} MB in this service's life, and nothing more of it is kept"
        else:
            why = f"writes more than {self._rate >> 10} KB/s, and a part of it is left out"
        return f"\n[user code {why}; let it print less]\n".encode()


_output = OutputLimit()


HELD_S = 1.0
"""Longest wait for the end of output whose process has ended: another process may hold its pipe."""


class CopiedOutput(asyncio.Protocol):
    """Copies what a process writes into a pipe to standard error, within the limit of the service."""

    def __init__(self) -> None:
        self._ended = asyncio.get_running_loop().create_future()
        self._transport: asyncio.BaseTransport | None = None
        self.write_fd = -1
        """Writing end, which the caller closes once the process has it."""

    @classmethod
    async def opened(cls) -> CopiedOutput:
        """Return a new pipe's copy. Raises OSError."""
        copied = cls()
        read_fd, copied.write_fd = os.pipe()
        await asyncio.get_running_loop().connect_read_pipe(lambda: copied, os.fdopen(read_fd, "rb", 0))
        return copied

    async def close(self) -> None:
        """Copy the rest, after the end of the process."""
        await asyncio.wait((self._ended,), timeout=HELD_S)
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the service
            os.write(2, _output.admit(data, time.monotonic()))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
