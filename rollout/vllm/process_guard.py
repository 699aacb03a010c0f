"""Guard of an engine's processes: it ends them and removes their shared memory, however their owner ends.

An engine of several processes outlives a killed owner, and shared memory outlives all processes. So the owner starts a
guard first: a bare interpreter, in a separate session and without a parent, that waits for the end of a pipe which only
the owner holds. When the pipe ends, the guard kills every process that has the engine's mark in its environment, and
unlinks the shared memory that these processes mapped. Promise: this holds for any end of the owner, including SIGKILL
of its whole process group; only a killed guard breaks it.

This module runs as a file, so it imports no module of this project. Linux only: it reads /proc.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from multiprocessing import resource_tracker

VARIABLE = "PACELINE_ENGINE"
"""Environment variable that marks a process as belonging to an engine; children inherit it."""
SHARED_MEMORY = "/dev/shm/"
STARTING_S = 0.1
RUNNING_S = 5.0
"""Longest time in seconds between checks of the processes' shared memory, before and after the owner has reported
their start; new files cause a check at once."""
LOOK_S = 0.02
"""Shortest time in seconds between checks, even if other programs put many files into shared memory."""
IN_CREATE = 0x100
"""inotify(7): a file was created in the folder."""
KILL_S = 10.0
"""Seconds within which killed processes must end."""


class ProcessGuard:
    """The owner's object for a guard. Make it before the engine, start the engine with `environment`, then `close` it."""

    def __init__(self) -> None:
        # The resource tracker of this process removes the process's semaphores at its end. It has to run before the
        # mark is in the environment, or it would count as one of the engine's processes.
        resource_tracker.ensure_running()
        mark = uuid.uuid4().hex
        self.directory = tempfile.mkdtemp(prefix="paceline-")
        """Folder for the engine's sockets; removed at the engine's end."""
        self.environment = {VARIABLE: mark, "SPT_NOENV": "1"}
        """Variables for the engine's processes. (SPT_NOENV keeps setproctitle from overwriting the mark.)"""
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark, self.directory, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
        )
        assert guard.stdin is not None
        assert guard.stdout is not None
        self._owner, self._end = guard.stdin, guard.stdout
        self._lock = threading.Lock()
        guard.wait()  # the guard itself continues as a separate process

    def started(self) -> None:
        """Report that all processes run; return once the guard, which then checks less often, has noted their shared
        memory."""
        self._owner.write(b"s")
        self._owner.flush()
        ready, _, _ = select.select([self._end], [], [], KILL_S)
        if ready:
            os.read(self._end.fileno(), 1)

    def kill(self) -> None:
        """Kill the engine's current processes; the guard continues."""
        with self._lock:
            if not self._owner.closed:
                self._owner.write(b"k")
                self._owner.flush()

    def close(self, timeout_s: float = 2 * KILL_S) -> bool:
        """End the remaining processes and remove their files; return whether that was done within `timeout_s`."""
        with self._lock:
            if self._owner.closed:
                return True
            self._owner.close()
        ready, _, _ = select.select([self._end], [], [], timeout_s)
        self._end.close()
        return bool(ready)


class _Engine:
    """The processes in /proc that have one engine's mark, and the shared memory that they have mapped."""

    def __init__(self, mark: str, owner: int) -> None:
        self._owner = owner
        self._mark = f"{VARIABLE}={mark}".encode()
        self._others = set(os.listdir(SHARED_MEMORY))
        self._files: set[str] = set()
        self._owners_files: set[str] = set()

    def scan(self) -> list[int]:
        """Return the process ids, and note their shared memory."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        pids = [pid for pid in pids if self._mark in _read(pid, "environ").split(b"\0")]
        for pid in pids:
            self._files |= self._mapped(pid)
        self._owners_files |= self._mapped(self._owner)
        return pids

    def _mapped(self, pid: int) -> set[str]:
        """Return a process's shared-memory files: only new files, and no files in folders, because a user may keep a
        model there."""
        lines = _read(pid, "maps").decode(errors="replace").splitlines()
        names = {line.partition(SHARED_MEMORY)[2].removesuffix(" (deleted)") for line in lines}
        return {name for name in names if name and "/" not in name} - self._others

    def end(self) -> None:
        """Kill the processes and remove their files. Python's resource trackers come last, because they remove shared memory."""
        deadline_s = time.monotonic() + KILL_S
        while (pids := self.scan()) and time.monotonic() < deadline_s:
            trackers = {pid for pid in pids if b"resource_tracker" in _read(pid, "cmdline")}
            late = time.monotonic() > deadline_s - KILL_S / 2
            for pid in pids:
                if pid not in trackers or late:
                    self._kill(pid)
            time.sleep(0.02)
        # The owner's resource tracker removes the owner's semaphores, but the tracker may have been killed with the
        # owner.
        owner_lives = bool(_read(self._owner, "maps"))
        for name in self._files if owner_lives else self._files | self._owners_files:
            with contextlib.suppress(OSError):
                os.unlink(SHARED_MEMORY + name)

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            process = os.pidfd_open(pid)
            try:
                # Checked again while the process is held, because another process may have got its number in between.
                if self._mark in _read(pid, "environ").split(b"\0"):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            finally:
                os.close(process)


def watch_folder(path: str) -> int:
    """Return a file descriptor that becomes readable when a file is created in `path`; -1 if the system cannot make
    one."""
    import ctypes

    libc = ctypes.CDLL(None)
    events = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if events >= 0 and libc.inotify_add_watch(events, path.encode(), IN_CREATE) < 0:
        os.close(events)
        return -1
    return events


def _read(pid: int, name: str) -> bytes:
    """Return a file of a process in /proc; empty if the process has ended or is another user's."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _guard(mark: str, directory: str, owner: int) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    engine = _Engine(mark, owner)
    created = watch_folder(SHARED_MEMORY)
    sources = [0, created] if created >= 0 else [0]
    interval_s = STARTING_S
    while True:
        ready, _, _ = select.select(sources, [], [], interval_s)
        word = os.read(0, 1) if 0 in ready else b"-"
        if not word:
            break
        if created in ready:
            os.read(created, 1 << 16)
        if word == b"k":
            engine.end()
            continue
        engine.scan()
        if word == b"s":
            interval_s = RUNNING_S
            os.write(1, b".")
        elif created in ready:
            time.sleep(LOOK_S)
    engine.end()
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    _guard(sys.argv[1], sys.argv[2], int(sys.argv[3]))
