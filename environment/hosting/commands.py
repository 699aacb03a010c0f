"""Runs a command line as an agent. Its environment variables have the address of its conversation.

Promises: the program and its children end with the episode and with this process. Its output is bounded. Its reward is
the last line that it prints, if that is a number.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import re
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.environment.protocols import EnvironmentFailed, EnvironmentLost
from paceline.errors import InvalidInput
from paceline.user_code import left_over
from paceline.user_code.box import Box
from paceline.user_code.ends import describe_end, kill_group
from paceline.user_code.surroundings import ROOT, Surroundings

COLUMN = re.compile(r"\{(\w+)\}")
KEPT_BYTES = 64 << 10
"""Bytes that are kept from the end of an output."""
BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); import paceline; sys.path.pop(0); "
    "from paceline.environment.hosting.launching import main; main()"
)


async def run_command(
    command: Sequence[str], row: Mapping[str, Any], base_url: str, api_key: str, memory_mb: int, folder: str = ""
) -> float | None:
    """Return the reward that a command in `folder` printed as its last line; None if that is not a number. The command
    ends if this call is cancelled. Raises EnvironmentFailed; EnvironmentLost if this host lacks the resources to start
    the command; InvalidInput if the command names a column that the row does not have."""
    argv = [_filled(argument, row) for argument in command]
    is_folder = bool(folder) and await asyncio.to_thread(os.path.isdir, folder)
    try:
        surroundings = Surroundings((folder,)).prepare()
    except OSError as error:
        raise EnvironmentLost(f"the command {argv[0]!r} could not be started: {error}") from error
    try:
        output, errors, returncode = await _output_of(
            argv,
            surroundings.box,
            {**surroundings.environment, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key},
            memory_mb,
            folder if is_folder else None,
        )
    except OSError as error:
        raise EnvironmentLost(f"the command {argv[0]!r} could not be started: {error}") from error
    finally:
        await asyncio.to_thread(surroundings.remove)
    if returncode != 0:
        why = errors.strip().rpartition("\n")[2][-500:] or "no output"
        if os.strerror(errno.EACCES) in errors and (sentence := surroundings.box.sentence()):
            why = f"{why}; {sentence}"
        raise EnvironmentFailed(f"the command {argv[0]!r} {describe_end(returncode)}: {why}")
    return _reward_in(output)


async def _output_of(
    argv: Sequence[str], box: Box, environment: Mapping[str, str], memory_mb: int, cwd: str | None
) -> tuple[str, str, int | None]:
    launcher = (sys.executable, "-P", "-c", BOOT, ROOT, str(os.getpid()), str(memory_mb), box.text())
    async with _Output() as output, _Output() as errors:
        with left_over.starting() as started:
            process = await asyncio.create_subprocess_exec(
                *(*launcher, *argv),
                stdin=DEVNULL,
                stdout=output.write_fd,
                stderr=errors.write_fd,
                env=environment,
                cwd=cwd,
                start_new_session=True,
            )
            started(process.pid)
        output.started()
        errors.started()
        try:
            await process.wait()  # no deadline: the caller has one
        finally:
            kill_group(process.pid)  # also its children, which hold the pipes
            await process.wait()
            await left_over.ended(process.pid)
        return await output.text(), await errors.text(), process.returncode


class _Output:
    """Reads one pipe of a command and keeps the last bytes. The pipe is not asyncio's: asyncio's `wait` would also wait
    for every other process that holds the pipe."""

    def __init__(self) -> None:
        self._kept = b""
        read_fd, self.write_fd = os.pipe()
        self._file = os.fdopen(read_fd, "rb", 0)

    async def __aenter__(self) -> _Output:
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, self._file)
        self._reading = asyncio.create_task(self._read(reader), name="output")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.started()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._transport.close()

    def started(self) -> None:
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    async def text(self) -> str:
        """Return what was written, after all writers have closed the pipe. A process that has left the command's group
        may keep the pipe open, so the wait is short."""
        await asyncio.wait((self._reading,), timeout=left_over.HELD_S)
        return self._kept.decode(errors="replace")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while piece := await reader.read(KEPT_BYTES):
            self._kept = (self._kept + piece)[-KEPT_BYTES:]


def _filled(argument: str, row: Mapping[str, Any]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in row:
            raise InvalidInput(
                f"environment.command names {{{name}}}, but the data set has no such column; it has {', '.join(row)}"
            )
        return str(row[name])

    return COLUMN.sub(value, argument)


def _reward_in(output: str) -> float | None:
    try:
        reward = float(output.strip().rpartition("\n")[2])
    except ValueError:
        return None
    if not math.isfinite(reward):
        raise EnvironmentFailed(f"the command printed the reward {reward}; it must be finite")
    return reward
