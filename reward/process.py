"""The runner's side of one reward process: start, calls, end.

Tasks: one watch per process life waits for its end, and then kills the rest of its process group, so that a grandchild
that still holds the socket cannot hide the death; readers see EOF after that. `start` waits for the watch of the life
before. The process dies with the thread that started it (PR_SET_PDEATHSIG), so the event loop has to run in a thread that
lasts. Every wait for an answer has the caller's time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from paceline.errors import InvalidInput, PacelineError, Unreadable, WireError
from paceline.spec import RewardFunctionSection
from reward.protocol import encode, receive_async

ROOT = str(Path(__file__).resolve().parent.parent)
# -P keeps the working directory off the import path; the child has to import the same code as this process.
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from reward.worker import main; main()"


STARVED_SHARE = 0.1
"""Fraction of its time limit: a runnable process that gets less of a processor is starved."""
NOT_SLEEPING = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP, psutil.STATUS_STOPPED)


class ProcessTimeout(PacelineError):
    """No answer within the time limit. The process is killed."""

    starved = False
    """True when it was runnable all the time and hardly got a processor (or its disk), which is no fault of the function."""


class ProcessDied(PacelineError):
    """The process ended instead of answering. The message says how, `died with signal SIGKILL`."""

    by_signal = False
    """True when a signal that this side did not send ended it: by the kernel out of memory, a crash, a person."""


class RewardProcess:
    """One child process with all functions of a run loaded. Used by one caller at a time."""

    def __init__(
        self, functions: Sequence[RewardFunctionSection], start_timeout_s: float, num_processes: int = 1
    ) -> None:
        """Set the functions; `start` starts the process. start_timeout_s: limit of the start with the functions' imports.
        num_processes: those of the runner, which share the limits of services."""
        self._load_frame = encode(
            {
                "load": [
                    {
                        "function": f.function,
                        "label": f.label,
                        "kwargs": f.kwargs,
                        "memory_bytes": f.memory_mb << 20,
                        "timeout_s": f.timeout_s,
                    }
                    for f in functions
                ],
                "num_processes": num_processes,
            }
        )
        self._start_timeout_s = start_timeout_s
        self._process: Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int | None:
        """Process id, from the start to the kill; None else."""
        return self._process.pid if self._process else None

    @property
    def usable(self) -> bool:
        """Return whether the process is started and not known to have ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start a new process, after ending the one before, and load the functions.

        Raises InvalidInput when a function cannot be loaded (Unreadable: not now), ProcessTimeout, ProcessDied (also while
        importing).
        """
        await self.close()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-c", BOOT, ROOT, str(theirs.fileno()), str(os.getpid())),
                    stdin=DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        self._watch = asyncio.create_task(self._wait_for_end(self._process), name="reward process")
        try:
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            self.kill()
            raise
        reply = await self.ask(self._load_frame, timeout_s=self._start_timeout_s)
        if "refused" in reply:
            await self.close()
            kind = Unreadable if reply.get("passing") else InvalidInput
            raise kind(str(reply["refused"]))

    async def ask(self, *frames: bytes, timeout_s: float) -> dict[str, Any]:
        """Send `frames` and return the reply. Raises ProcessTimeout or ProcessDied; the process is gone then.

        A cancelled call ends the process too, because one in the middle of a call cannot serve the next caller.
        """
        if self._reader is None or self._writer is None or self._process is None or self._watch is None:
            raise ProcessDied("was not running")
        process, watch = self._process, self._watch
        used_s: list[
            float
        ] = []  # at half of the time, because the measurement reads all processes of the machine
        half = asyncio.get_running_loop().call_later(
            timeout_s / 2, lambda: used_s.append(processor_seconds(process.pid))
        )
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.writelines(frames)
                await self._writer.drain()
                return await receive_async(self._reader)
        except TimeoutError:
            timeout = ProcessTimeout(f"timed out after {timeout_s:g} s")
            since_s = processor_seconds(process.pid) - sum(used_s)
            if since_s < STARVED_SHARE * timeout_s / 2 and is_runnable(process.pid):
                timeout = ProcessTimeout(
                    f"timed out after {timeout_s:g} s, with {since_s:.2f} s of a processor in the second half"
                )
                timeout.starved = True
            self.kill()
            raise timeout from None
        except (EOFError, OSError):
            if process.returncode is None:  # it closed the socket, or is ending
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(watch), timeout=1.0)
            died = ProcessDied(describe_end(process.returncode))
            # Another caller of `kill` may have dropped the process meanwhile.
            died.by_signal = (process.returncode or 0) < 0 and process is self._process
            self.kill()
            raise died from None
        except WireError as error:
            self.kill()
            raise ProcessDied(f"broke the protocol: {error}") from None
        except BaseException:
            self.kill()
            raise
        finally:
            half.cancel()

    def kill(self) -> None:
        """Kill the process and its children; `close` or `start` waits until they are gone."""
        if self._process is not None and self._process.returncode is None:
            kill_group(self._process.pid)
        self._process = None
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None

    async def close(self) -> None:
        """Kill the process, and wait for its end."""
        self.kill()
        watch, self._watch = self._watch, None
        if watch is not None:
            await watch  # no deadline: after SIGKILL only the kernel's waits can delay the end

    async def _wait_for_end(self, process: Process) -> None:
        await process.wait()
        kill_group(process.pid)


def processor_seconds(pid: int) -> float:
    """Return the processor seconds of a process and its children, ended ones included; 0 for a process that is gone."""
    used_s = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for member in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                used_s += sum(member.cpu_times()[:4])  # user and system, with those of its ended children
    return used_s


def is_runnable(pid: int) -> bool:
    """Return whether a process or one of its children is runnable: it waits for a processor or the disk, or was stopped. A
    sleeping process waits by its choice."""
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
        return f"died with signal {signal.Signals(-returncode).name}, a crash in native code, perhaps beyond its memory_mb"
    if returncode < 0:
        return f"died with signal {signal.strsignal(-returncode) or -returncode}"
    return f"ended its process with exit code {returncode}"


def kill_group(pid: int) -> None:
    """Kill a process that leads its group, and the others of the group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
