"""Bounds two things that user code leaves behind: processes, and output in the service's log.

A process that leaves its group (setsid) and whose parent ends is adopted by the nearest ancestor that asks for it
(`adopt`): a service that runs user code, or `paceline up`. `end_strays` then ends the adopted processes that have
`MARK` in their environment, with their descendants: when the last process of user code of this service has ended, at
the service's end, and in `paceline up` when a service has ended. A thread reaps the adopted processes that have ended.
Other children are left alone: services of `paceline up`, or, in a container, what `kubectl exec` left. A process of
user code that removes `MARK` from its environment is not ended. Linux only.

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
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
MARK = "PACELINE_USER_CODE"
"""Variable in the environment of user code."""
END_S = 2.0
"""Longest time in which strays are killed again, because strays may start other processes."""
REAP_S = 1.0
"""Seconds between two searches for zombies."""

log = logging.getLogger(__name__)


class _Started:
    """Children that this process has started in sessions of their own, and for whose end other code waits."""

    def __init__(self) -> None:
        self.is_adopting = False
        self.lock = threading.Lock()
        self.starting = 0
        """Number of processes that are being started, whose ids are not known yet."""
        self.pids: dict[int, bool] = {}
        """True for user code, by process id."""


_started = _Started()


def adopt() -> None:
    """Let this process adopt the processes that its descendants leave behind. For services, not for a user's program."""
    if sys.platform.startswith("linux") and not _started.is_adopting:
        _started.is_adopting = ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
        threading.Thread(target=_reap_forever, name="reaping", daemon=True).start()


@contextlib.contextmanager
def starting(*, user_code: bool = True) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the id of the process that the body starts. `reaped` or `ended` removes it."""

    def started(pid: int) -> None:
        with _started.lock:
            _started.pids[pid] = user_code

    with _started.lock:
        _started.starting += 1
    try:
        yield started
    finally:
        with _started.lock:
            _started.starting -= 1


def reaped(pid: int) -> None:
    """Note that a process was reaped."""
    with _started.lock:
        _started.pids.pop(pid, None)


async def ended(pid: int) -> None:
    """Note that a process of user code was reaped. After the last such process, end what these processes have left."""
    reaped(pid)
    with _started.lock:
        is_last = not _started.starting and not any(_started.pids.values())
    if _started.is_adopting and is_last:
        await asyncio.to_thread(end_strays)


def end_strays() -> None:
    """Kill the adopted processes that are marked, with their descendants, and reap them. May take END_S."""
    deadline_s = time.monotonic() + END_S
    chosen: set[int] = set()  # a process that is ending has no environment any more
    while True:
        reap_strays()
        found = [pid for pid in _strays() if pid in chosen or is_marked(pid)]
        if not found and not _started.starting:
            return
        if time.monotonic() > deadline_s:
            if found:
                log.warning("processes %s that user code has left behind do not end", found)
            return
        tree = _with_descendants(found)
        chosen.update(tree)
        for pid in tree:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def reap_strays() -> None:
    """Reap the adopted processes that have ended."""
    for pid in _strays():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _reap_forever() -> None:
    while True:
        time.sleep(REAP_S)
        with contextlib.suppress(OSError):
            reap_strays()


def _strays() -> list[int]:
    """Return the adopted processes: children in another session that this process has not started. None while a
    process is being started, because the new process could be taken for an adopted process."""
    if not _started.is_adopting:
        return []
    session, found = os.getsid(0), []
    for pid in _children(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) != session:
                found.append(pid)
    with _started.lock:
        return [] if _started.starting else [pid for pid in found if pid not in _started.pids]


def is_marked(pid: int) -> bool:
    """Return whether a process has MARK in its environment; false if this process itself has MARK."""
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


def _with_descendants(pids: Iterable[int]) -> list[int]:
    found, waiting = [], list(pids)
    while waiting:
        found.append(waiting.pop())
        waiting += _children(found[-1])
    return found


OUTPUT_RATE = 16 << 10
"""Bytes of output per second that a service's user code may write for a long time."""
OUTPUT_BURST = 1 << 20
"""Bytes that it may write at once."""
OUTPUT_DAILY = 64 << 20
"""Bytes that it may write in a day."""
DAY_S = 86400.0
LAST_BYTES = 1 << 10
"""Bytes at the end of a process's output that are written in any case: they may have the reason of its death."""


class OutputLimit:
    """Decides which output of user code is written. It only computes."""

    def __init__(self, rate: int = OUTPUT_RATE, burst: int = OUTPUT_BURST, daily: int = OUTPUT_DAILY):
        self._rate, self._burst, self._daily = rate, burst, daily
        self._room, self._room_today, self._room_s = float(burst), float(daily), 0.0
        self.left_out = 0
        """Bytes left out since output was last written."""

    def admit(self, data: bytes, now_s: float) -> bytes:
        """Return the part of `data` that is written, with a sentence where output is left out."""
        since_s, self._room_s = now_s - self._room_s, now_s
        self._room = min(self._burst, self._room + since_s * self._rate)
        self._room_today = min(self._daily, self._room_today + since_s * self._daily / DAY_S)
        room = min(self._room, self._room_today)
        if self.left_out and room < min(self._rate, self._burst, self._daily):
            self.left_out += len(data)
            return b""
        before = f"[{self.left_out} bytes of output of user code were left out]\n".encode() if self.left_out else b""
        kept = data[: int(room)]
        self._room -= len(kept)
        self._room_today -= len(kept)
        self.left_out = len(data) - len(kept)
        return before + kept + (self._sentence() if self.left_out else b"")

    def _sentence(self) -> bytes:
        most = f"{self._daily >> 20} MB a day" if self._room_today < self._room else f"{self._rate >> 10} KB/s"
        return f"\n[user code writes more than {most}, and a part of it is left out; let it print less]\n".encode()


_output = OutputLimit()


HELD_S = 1.0
"""Longest wait for the end of output whose process has ended: another process may hold its pipe."""


class CopiedOutput(asyncio.Protocol):
    """Copies the output of a process from a pipe to standard error, within the limit of the service; always copies its
    end."""

    def __init__(self) -> None:
        self._ended = asyncio.get_running_loop().create_future()
        self._transport: asyncio.BaseTransport | None = None
        self._last = b""
        self._is_cut = False
        self.write_fd = -1
        """Writing end, which the caller closes once the process has it."""

    @classmethod
    async def opened(cls) -> CopiedOutput:
        """Return the copy of a new pipe. Raises OSError."""
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
        self._last = (self._last + data[-LAST_BYTES:])[-LAST_BYTES:]
        _write(_output.admit(data, time.monotonic()))
        self._is_cut = _output.left_out > 0

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_cut:
            _write(b"[the process of user code ended; its last output:]\n" + self._last + b"\n")
        if not self._ended.done():
            self._ended.set_result(None)


def _write(text: bytes) -> None:
    with contextlib.suppress(OSError):  # a full disk must not end the service
        os.write(2, text)
