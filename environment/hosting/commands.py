"""A command line as an agent: started with a session's address, limited, and ended with all that it started.

Promises: the program and its children end with the episode, and with this process; its output is bounded; what it prints last
is its reward, if that is a number.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping, Sequence
from typing import Any

from environment.hosting.faults import EnvironmentFailed
from paceline.errors import InvalidInput
from paceline.user_code.ends import describe_end, kill_group
from paceline.user_code.spawning import ROOT

COLUMN = re.compile(r"\{(\w+)\}")
KEPT_BYTES = 64 << 10
"""End of an output that is kept."""
BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from environment.hosting.launching import main; main()"


async def run_command(
    command: Sequence[str],
    row: Mapping[str, Any],
    base_url: str,
    api_key: str,
    memory_mb: int,
    folder: str = "",
) -> float | None:
    """Return the reward that a command printed as its last line; None where that is no number. It runs in `folder`. Cancelling
    ends it. Raises EnvironmentFailed, InvalidInput for a column that the row does not have."""
    argv = [_filled(argument, row) for argument in command]
    is_folder = bool(folder) and await asyncio.to_thread(os.path.isdir, folder)
    environment = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", BOOT, ROOT, str(os.getpid()), str(memory_mb), *argv),
        stdin=DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        env=environment,
        cwd=folder if is_folder else None,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        reading = asyncio.gather(_end_of(process.stdout), _end_of(process.stderr))
        try:
            await process.wait()
            kill_group(process.pid)  # a child that still holds the pipes
            output, errors = await reading
        finally:
            reading.cancel()
    finally:
        kill_group(process.pid)
        await process.wait()
    if process.returncode != 0:
        said = errors.strip().rpartition("\n")[2][-500:]
        raise EnvironmentFailed(
            f"the command {argv[0]!r} {describe_end(process.returncode)}: {said or 'no output'}"
        )
    return _reward_in(output)


async def _end_of(stream: asyncio.StreamReader) -> str:
    kept = b""
    while piece := await stream.read(KEPT_BYTES):
        kept = (kept + piece)[-KEPT_BYTES:]
    return kept.decode(errors="replace")


def _filled(argument: str, row: Mapping[str, Any]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in row:
            raise InvalidInput(
                f"environment.command names {{{name}}}, which is no column of the data set; it has {', '.join(row)}"
            )
        return str(row[name])

    return COLUMN.sub(value, argument)


def _reward_in(output: str) -> float | None:
    try:
        reward = float(output.strip().rpartition("\n")[2])
    except ValueError:
        return None
    if not math.isfinite(reward):
        raise EnvironmentFailed(f"the command printed the reward {reward}, it has to be finite")
    return reward
