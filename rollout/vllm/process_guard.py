"""Ends an engine's processes and removes what they left behind, however the process that started them ends.

An engine of several processes outlives a killed owner, and shared memory outlives them all. So the owner starts a guard
first: a bare interpreter, in a session of its own and nobody's child, that waits for the end of a pipe which only the
owner holds. Then it kills every process that carries the engine's mark in its environment and unlinks the shared memory
that they mapped. The promise holds for any end of the owner, SIGKILL of its whole process group included; only a killed
guard breaks it.

Run as a file, it imports nothing of ours. Linux only: it reads /proc.
"""

from __future__ import annotations

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
"""Longest seconds between two looks at the processes' shared memory, until the owner says that they have started, and
after; the guard also looks whenever something new is there."""
LOOK_S = 0.02
"""Shortest seconds between two looks, however much other programs put into shared memory."""
IN_CREATE = 0x100
"""inotify(7): something was created in the folder."""
KILL_S = 10.0
"""How long killed processes may take to be gone."""


class ProcessGuard:
    """Start it before the engine, and the engine with `environment`; `close` when it has ended."""

    def __init__(self) -> None:
        # Python's resource tracker of this process removes this process's semaphores at its end. It has to be there before
        # the mark gets into the environment, or it would be taken for one of the engine's processes.
        resource_tracker.ensure_running()
        mark = uuid.uuid4().hex
        self.directory = tempfile.mkdtemp(prefix="paceline-")
        """For the engine's sockets; removed with it."""
        self.environment = {VARIABLE: mark, "SPT_NOENV": "1"}
        """What the engine's processes need in theirs. (SPT_NOENV keeps setproctitle from overwriting the mark.)"""
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
        guard.wait()  # it goes on as a process of its own

    def started(self) -> None:
        """The engine's processes are all there: returns when the guard has noted their shared memory; it looks less often
        from now on.
        """
        self._owner.write(b"s")
        self._owner.flush()
        ready, _, _ = select.select([self._end], [], [], KILL_S)
        if ready:
            os.read(self._end.fileno(), 1)

    def kill(self) -> None:
        """Kill the processes that are there now; the guard goes on."""
        with self._lock:
            if not self._owner.closed:
                self._owner.write(b"k")
                self._owner.flush()

    def close(self, timeout_s: float = 2 * KILL_S) -> bool:
        """Has everything that is left ended and removed; whether that was seen to happen within `timeout_s`."""
        with self._lock:
            if self._owner.closed:
                return True
            self._owner.close()
        ready, _, _ = select.select([self._end], [], [], timeout_s)
        self._end.close()
        return bool(ready)


class _Engine:
    """The processes with one mark, as /proc shows them, and the shared memory seen with them."""

    def __init__(self, mark: str, owner: int) -> None:
        self._owner = owner
        self._mark = f"{VARIABLE}={mark}".encode()
        self._others = set(os.listdir(SHARED_MEMORY))
        self._files: set[str] = set()
        self._owners_files: set[str] = set()

    def look(self) -> list[int]:
        """Return the process ids; takes note of their shared memory."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        pids = [pid for pid in pids if self._mark in _read(pid, "environ").split(b"\0")]
        for pid in pids:
            self._files |= self._mapped(pid)
        self._owners_files |= self._mapped(self._owner)
        return pids

    def _mapped(self, pid: int) -> set[str]:
        """Return what a process has mapped of shared memory: only what came to be in our time, and nothing in folders, since a
        user may keep a model there.
        """
        lines = _read(pid, "maps").decode(errors="replace").splitlines()
        names = {line.partition(SHARED_MEMORY)[2].removesuffix(" (deleted)") for line in lines}
        return {name for name in names if name and "/" not in name} - self._others

    def end(self) -> None:
        """Kill and removes. Python's resource trackers come last, they remove shared memory by themselves."""
        deadline_s = time.monotonic() + KILL_S
        while (pids := self.look()) and time.monotonic() < deadline_s:
            trackers = {pid for pid in pids if b"resource_tracker" in _read(pid, "cmdline")}
            late = time.monotonic() > deadline_s - KILL_S / 2
            for pid in pids:
                if pid not in trackers or late:
                    self._kill(pid)
            time.sleep(0.02)
        # The owner's semaphores are its resource tracker's to remove, but that may have been killed with it.
        owner_lives = bool(_read(self._owner, "maps"))
        for name in self._files if owner_lives else self._files | self._owners_files:
            with _Ignoring(OSError):
                os.unlink(SHARED_MEMORY + name)

    def _kill(self, pid: int) -> None:
        with _Ignoring(OSError):
            process = os.pidfd_open(pid)
            try:
                # Asked again with the process held: its number may have gone to another one in between.
                if self._mark in _read(pid, "environ").split(b"\0"):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            finally:
                os.close(process)


class _Ignoring:
    """contextlib.suppress, without the import."""

    def __init__(self, error: type[BaseException]) -> None:
        self._error = error

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, self._error)


def watch_folder(path: str) -> int:
    """Return a file descriptor that can be read when something was created in `path`; -1 where the system has none to give."""
    import ctypes

    libc = ctypes.CDLL(None)
    events = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if events >= 0 and libc.inotify_add_watch(events, path.encode(), IN_CREATE) < 0:
        os.close(events)
        return -1
    return events


def _read(pid: int, name: str) -> bytes:
    """Return a file of a process in /proc; empty if it is gone or somebody else's."""
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
        engine.look()
        if word == b"s":
            interval_s = RUNNING_S
            os.write(1, b".")
        elif created in ready:
            time.sleep(LOOK_S)
    engine.end()
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    _guard(sys.argv[1], sys.argv[2], int(sys.argv[3]))
