"""Starts a program for the local backends, and measures its processes in `/proc`; ended processes count nothing."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import secrets
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.reward.sandbox.protocol import Limits
from paceline.reward.sandbox.readable import PYTHON_PROGRAM, launcher
from paceline.reward.sandbox.seccomp_filter import build_filter

OPEN_FILES = 64
SPARE_TASKS = 1024
"""Number of tasks that the kernel allows beyond the user's present ones, enough for concurrent programs. It bounds the
tasks that a program can start between two measurements; the supervisor's limit is far lower."""


def launch_command(
    argv: Sequence[str],
    limits: Limits,
    ready: str,
    *,
    parent: bool = True,
    confined: bool = True,
    landlock: Sequence[str] = (),
) -> list[str]:
    """Return the command that applies `limits` and becomes `argv`.

    ready: the word from `new_ready`. parent: the caller starts the command, and the command dies with the calling
    thread. confined: apply the filter of system calls and drop all capabilities. landlock: further lines of the
    launcher's plan. Raises InvalidInput for unknown system calls.
    """
    kernel_limits = {
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_CPU": math.ceil(limits.time_s) + 1,
        "RLIMIT_FSIZE": limits.disk_bytes,
        "RLIMIT_NOFILE": OPEN_FILES,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
    }
    lines = [f"ready {ready}", f"tasks {limits.threads + SPARE_TASKS}"]
    lines += [f"limit {name} {value}" for name, value in kernel_limits.items()]
    if parent:
        lines.append(f"parent {os.getpid()}")
    if confined:
        lines.append("capabilities none")
        lines.append(f"seccomp {build_filter(platform.machine(), limits.processes == 1).hex()}")
    return [PYTHON_PROGRAM, "-I", "-S", str(launcher()), "\n".join([*lines, *landlock]), *argv]


def new_ready() -> str:
    """Return a word that a program cannot guess."""
    return secrets.token_hex(12)


class PopenChild:
    """A started sandbox with its program: a child of this process."""

    def __init__(
        self,
        argv: Sequence[str],
        folder: str,
        environment: Mapping[str, str],
        *,
        helpers: int = 0,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """`helpers` is the number of processes of the sandbox itself. Raises OSError."""
        self.helpers = helpers
        self._process = subprocess.Popen(
            list(argv),
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.stdin, self.stdout, self.stderr = (_taken(getattr(self._process, name)) for name in STREAMS)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the process, its descendants, and its process group. Repeated calls have no effect."""
        if self._process.returncode is not None:
            return
        for pid in reversed(descendants(self.pid)):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> int:
        """Wait for the end and return the exit code, negative for a signal. Raises TimeoutError."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None


STREAMS = ("stdin", "stdout", "stderr")


def _taken(stream: Any) -> int:
    number = os.dup(stream.fileno())
    stream.close()
    return number


CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def descendants(pid: int) -> list[int]:
    """Return `pid` and its descendants that are alive or not reaped yet."""
    found, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        found.append(parent)
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                with contextlib.suppress(OSError):
                    waiting += map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split())
    return found


def num_threads(pid: int) -> int:
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}/task").st_nlink - 2
    return 0


def resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    return 0


def unlinked_bytes(pid: int) -> int:
    """Return the bytes on disk of deleted files that a process holds open."""
    used = 0
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                state = os.stat(f"/proc/{pid}/fd/{name}")
                used += state.st_blocks * 512 if state.st_nlink == 0 else 0
    return used


def processor_seconds(pid: int) -> float:
    """Return the processor seconds of a process, user and system."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = _status_fields(pid)
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
    return 0.0


def is_runnable(pid: int) -> bool:
    """Return whether a process waits for a processor or the disk, rather than sleeping."""
    with contextlib.suppress(OSError, IndexError):
        return _status_fields(pid)[0] in ("R", "D")
    return False


def _status_fields(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` after the name (which may contain anything): state, parent and more."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
