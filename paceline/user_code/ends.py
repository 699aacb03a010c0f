"""Describes the end of a process of user code: the errors, their text for users, and whether the process was
starved."""

from __future__ import annotations

import contextlib
import os
import signal

import psutil

from paceline.errors import PacelineError

STARVED_SHARE = 0.1
"""A runnable process is starved if the processor time that it gets is below this fraction of the measured time."""
NOT_SLEEPING = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP, psutil.STATUS_STOPPED)


class ProcessTimeout(PacelineError):
    """The process gave no answer within its time limit."""

    starved = False
    """True if the process was always runnable but hardly got a processor (or its disk): no fault of the user code."""


class ProcessDied(PacelineError):
    """The process ended instead of answering. The message says how, as in `died with signal SIGKILL`."""

    by_signal = False
    """True if the kernel (out of memory, a crash) or a person ended the process by a signal, not this service."""


class ProcessNotStarted(ProcessDied):
    """This host had no room for the process (memory, descriptors, files). The host may have room later, so the failed
    start counts like a process that was killed."""

    by_signal = True


def starved_seconds(pid: int, used_before_s: float, window_s: float) -> float | None:
    """Return the processor seconds that a process got in the last `window_s` seconds if it was starved, else None.
    `used_before_s` is the process' `usage` at the beginning of these seconds."""
    since_s = usage(pid) - used_before_s
    return since_s if since_s < STARVED_SHARE * window_s and is_runnable(pid) else None


def usage(pid: int) -> float:
    """Return the processor seconds of a process and its children, ended ones included; 0 if the process is gone."""
    used_s = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for member in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                used_s += sum(member.cpu_times()[:4])  # user and system, with those of its ended children
    return used_s


def is_runnable(pid: int) -> bool:
    """Return whether a process or a child waits for a processor or the disk, or was stopped, rather than sleeps."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return any(_status(member) in NOT_SLEEPING for member in [process, *process.children(recursive=True)])
    return False


def _status(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return str(process.status())
    return ""


def describe_end(returncode: int | None) -> str:
    """Return a text on the end of a process: the signal or the exit code, and the likely cause."""
    if returncode is None:
        return "closed its connection"
    if returncode == -signal.SIGKILL:
        return "died with signal SIGKILL, probably because the host ran out of memory"
    if -returncode in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS):
        return (
            f"died with signal {signal.Signals(-returncode).name}, a crash in native code, perhaps beyond its memory_mb"
        )
    if returncode < 0:
        return f"died with signal {signal.strsignal(-returncode) or -returncode}"
    return f"ended its process with exit code {returncode}"


def kill_group(pid: int) -> None:
    """Kill a process that leads its group, and the other processes of the group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
