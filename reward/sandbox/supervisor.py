"""Supervises a sandboxed program: feeds its input, reads bounded output, measures it, and ends it at a limit.

Output, disk and time are bounded here, in the caller's process, whatever the sandbox promises. One thread polls the
three pipes, and measures the program every `LOOK_S` from its start on.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Sequence
from signal import SIGXCPU, SIGXFSZ
from typing import Protocol

from paceline.reward.sandbox.launching import (
    PopenChild,
    descendants,
    is_runnable,
    num_threads,
    processor_seconds,
    resident_bytes,
)
from paceline.reward.sandbox.protocol import Ending, Limits, Outcome, SandboxFailed

LOOK_S = 0.02
"""Seconds between two measurements. If a measurement takes more than a tenth of this, the pause is longer."""
FULL_SHARE = 0.25
"""Part of the disk limit above which measurements are ten times as frequent."""
START_S = 30.0
"""Seconds for starting the program on a busy host."""
END_S = 5.0
"""Seconds for all processes to end after the kill."""
STARVED_SHARE = 0.1
"""Share of the time limit. A runnable program that got less processor time than this share counts as starved."""


class Files(Protocol):
    def used_bytes(self, most_bytes: int, pids: Sequence[int]) -> int:
        """Return the bytes in the folder and in deleted files that `pids` hold open, or a number above `most_bytes`."""
        ...


def supervise(
    start: Callable[[], PopenChild],
    limits: Limits,
    files: Files,
    ready: bytes,
    stdin: bytes = b"",
    *,
    start_s: float = START_S,
) -> Outcome:
    """Start a program, supervise it, and return its outcome.

    files: the program's folder. ready: the word that the launcher writes to standard error once everything is applied;
    the limits count from then. start_s: the longest wait for the word. Raises SandboxFailed if the program did not
    start, did not end, or got no processor.
    """
    began_s = time.monotonic()
    try:
        child = start()
    except (OSError, RuntimeError) as error:
        raise SandboxFailed(f"the sandbox could not start a process: {error}") from error
    ends = (child.stdin, child.stdout, child.stderr)
    pipes = Pipes(ends, stdin, limits.output_bytes, len(ready), child.pid)
    code: int | None = None
    ending: Ending | None = None
    starved = False
    try:
        if late := not _started(child, pipes, ready, began_s + start_s):
            child.kill()
        else:
            ending = _watch(child, pipes, limits, files)
            starved = ending == "time" and _is_starved(child.pid, limits.time_s)
            child.kill()
        with contextlib.suppress(TimeoutError):
            code = child.wait(END_S)
        pipes.read_rest()
    finally:
        child.kill()
        pipes.close()
    if code is None:
        raise SandboxFailed(f"process {child.pid} of a sandbox did not end within {END_S:g} s of its kill")
    if starved:
        raise SandboxFailed(f"the program got hardly any processor time in its {limits.time_s:g} s")
    if not pipes.stderr_bytes.startswith(ready):
        text = bytes(pipes.stderr_bytes[:500]).decode(errors="replace").strip()
        how = f"within {start_s:g} s" if late else f"status {code}"
        raise SandboxFailed(f"the sandbox did not start the program ({how}): {text or 'no reason given'}")
    return _outcome(ending or ("output" if pipes.full else None), code, pipes, time.monotonic() - began_s)


def _started(child: PopenChild, pipes: Pipes, ready: bytes, until_s: float) -> bool:
    """Serve the pipes until the program starts or the sandbox ends; return False if neither happened in time. Until
    then the process is the launcher or a copy of this process, whose shared memory would count as the program's."""
    while not pipes.stderr_bytes.startswith(ready) and not child.ended():
        left_s = until_s - time.monotonic()
        if left_s <= 0 or pipes.full:
            return False
        pipes.serve(left_s)
    return True


def _watch(child: PopenChild, pipes: Pipes, limits: Limits, files: Files) -> Ending | None:
    """Serve the pipes until the program ends; return the limit that it exceeded, if any."""
    started_s = time.monotonic()
    look_s = started_s + LOOK_S
    while not child.ended():
        now_s = time.monotonic()
        left_s = started_s + limits.time_s - now_s
        if left_s <= 0:
            return "time"
        if now_s >= look_s:
            pids = descendants(child.pid)
            used_bytes = files.used_bytes(limits.disk_bytes, pids)
            if passed := _passed(child, limits, pids, used_bytes):
                return passed
            took_s = time.monotonic() - now_s
            pause_s = LOOK_S if used_bytes < limits.disk_bytes * FULL_SHARE else LOOK_S / 10
            look_s = now_s + max(pause_s, 10 * took_s)
        pipes.serve(max(0.0, min(left_s, look_s - time.monotonic())))
        if pipes.full:
            return "output"
    return None


def _passed(child: PopenChild, limits: Limits, pids: Sequence[int], used_bytes: int) -> Ending | None:
    if len(pids) > limits.processes + child.helpers:
        return "processes"
    if sum(map(num_threads, pids)) > limits.threads + child.helpers:
        return "processes"
    if limits.processes > 1 and sum(map(resident_bytes, pids)) > limits.memory_bytes:
        return "memory"
    if used_bytes > limits.disk_bytes:
        return "disk"
    return None


def _is_starved(pid: int, time_s: float) -> bool:
    """Return whether the program was runnable but got hardly any processor time; then the host is at fault."""
    pids = descendants(pid)
    used_s = sum(map(processor_seconds, pids))
    return used_s < STARVED_SHARE * time_s and any(map(is_runnable, pids))


def _outcome(ending: Ending | None, code: int, pipes: Pipes, duration_s: float) -> Outcome:
    number = -code if code < 0 else code - 128 if code > 128 else None
    if ending is None:
        by_signal: dict[int, Ending] = {SIGXFSZ: "disk", SIGXCPU: "time"}
        ending = "exited" if number is None else by_signal.get(number, "signal")
    return Outcome(
        ended=ending,
        exit_code=code if ending == "exited" else None,
        signal=number if ending == "signal" else None,
        stdout=pipes.stdout,
        stderr=pipes.stderr,
        duration_s=duration_s,
    )


PIECE_BYTES = 65536


class Pipes:
    """Serves the caller's ends of the three pipes, and closes them."""

    def __init__(self, ends: tuple[int, int, int], data: bytes, output_bytes: int, skip_bytes: int, pid: int) -> None:
        """Take the ends of standard input, output and error. data: the program's input. output_bytes: bound of each
        output; skip_bytes: number of bytes that the sandbox writes to standard error first. pid: process whose end ends
        the waits."""
        stdin, stdout, stderr = ends
        self._rest = memoryview(data)
        self._output_bytes, self._skip_bytes = output_bytes, skip_bytes
        self._stdin = stdin
        self._read: dict[int, tuple[bytearray, int]] = {
            stdout: (bytearray(), output_bytes),
            stderr: (bytearray(), output_bytes + skip_bytes),
        }
        self.stdout_bytes, self.stderr_bytes = (target for target, _ in self._read.values())
        self._poller = select.poll()
        for stream in (stdin, stdout, stderr):
            os.set_blocking(stream, False)
            self._poller.register(stream, select.POLLOUT if stream == stdin else select.POLLIN)
        self._open = {stdin, stdout, stderr}
        with contextlib.suppress(OSError):  # a kernel without it, or a process that has ended
            self._end = os.pidfd_open(pid)
            self._open.add(self._end)
            self._poller.register(self._end, select.POLLIN)

    @property
    def full(self) -> bool:
        return any(len(target) > most for target, most in self._read.values())

    @property
    def stdout(self) -> bytes:
        return bytes(self.stdout_bytes[: self._output_bytes])

    @property
    def stderr(self) -> bytes:
        return bytes(self.stderr_bytes[self._skip_bytes : self._skip_bytes + self._output_bytes])

    def serve(self, timeout_s: float) -> None:
        """Wait for at most `timeout_s`, then write and read what is possible."""
        for stream, _ in self._poller.poll(1000 * timeout_s + 1):
            if stream == self._stdin:
                self._write()
            elif stream in self._read:
                self._read_piece(stream)

    def read_rest(self) -> None:
        """Read what is left in the pipes after the program's end, up to the bound."""
        for stream in list(self._read):
            while stream in self._open and self._read_piece(stream) and not self.full:
                pass

    def close(self) -> None:
        for stream in list(self._open):
            self._close(stream)

    def _write(self) -> None:
        try:
            if self._rest:
                self._rest = self._rest[os.write(self._stdin, self._rest[:PIECE_BYTES]) :]
        except BlockingIOError:
            return
        except OSError:
            self._rest = self._rest[:0]  # nobody reads it
        if not self._rest:
            self._close(self._stdin)

    def _read_piece(self, stream: int) -> bool:
        target, most = self._read[stream]
        try:
            piece = os.read(stream, max(1, min(PIECE_BYTES, most + 1 - len(target))))
        except BlockingIOError:
            return False
        except OSError:
            piece = b""
        target += piece
        if not piece:
            self._close(stream)
        return bool(piece)

    def _close(self, stream: int) -> None:
        self._open.discard(stream)
        with contextlib.suppress(KeyError):
            self._poller.unregister(stream)
        with contextlib.suppress(OSError):
            os.close(stream)
