"""What a running program and its descendants use, read from `/proc`. What has ended meanwhile counts nothing."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def descendants(pid: int) -> list[int]:
    """Return `pid` and all processes below it that are alive or not reaped yet."""
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
    """Return the bytes on disk of files that a process holds open and that have no name any more."""
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
    """Return whether a process waits for a processor or the disk; a sleeping one waits by its choice."""
    with contextlib.suppress(OSError, IndexError):
        return _status_fields(pid)[0] in ("R", "D")
    return False


def _status_fields(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` behind the name, which may hold anything: state, parent, …"""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
