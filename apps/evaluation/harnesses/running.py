"""Start a harness, a program of an environment of its own, and wait for its end.

Promise: it gets the model's URL and nothing of this process' Python; when this process is told to end, so is it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from paceline.apps.evaluation.harnesses import inspect_ai, lm_eval
from paceline.apps.evaluation.harnesses.scored import HarnessRun
from paceline.apps.model_server.serving import ServedModel, endpoint_of
from paceline.errors import InvalidInput
from paceline.files.model_source import tokenizer_source

HARNESSES = {"lm-eval": lm_eval, "inspect": inspect_ai}
FOLDER = Path(".venv-harnesses/bin")
"""Where `make harnesses` puts the programs, below the working directory."""
STDERR = 2
"""File descriptor to which all of a harness' output goes."""
END_S = 10.0
"""Seconds in which a harness that was told to end has to."""


async def run_harness(served: ServedModel, name: str, arguments: Sequence[str]) -> HarnessRun:
    """Serve a model on a free port of loopback, run the harness `name` against it, and return what it scored.

    Its output goes to stderr. Raises InvalidInput: it is not installed, ends with an error, or has left no results.
    """
    harness = HARNESSES[name]
    program = program_of(harness.PROGRAM)
    policy = served.spec.policy
    tokenizer = await asyncio.to_thread(tokenizer_source, policy.tokenizer_name or policy.model_name)
    with tempfile.TemporaryDirectory(prefix="paceline-harness-") as folder:
        async with endpoint_of(served, "127.0.0.1", 0) as url:
            command = harness.command(url, served.run_id, tokenizer, Path(folder), arguments)
            further = inspect_ai.variables(url) if name == "inspect" else {}
            status = await _ended([str(program), *command], further)
        if status != 0:
            raise InvalidInput(f"{harness.PROGRAM} ended with status {status}; its output is above")
        return await asyncio.to_thread(harness.read, Path(folder))


def program_of(name: str) -> Path:
    """Return the path of a harness' program. Raises InvalidInput where it is not installed."""
    beside = FOLDER / name
    found = shutil.which(name) or (str(beside.absolute()) if beside.is_file() else None)
    if found is None:
        raise InvalidInput(
            f"{name} is neither on the path nor in {FOLDER}; `make harnesses` installs it, in an environment of its own"
        )
    return Path(found)


async def _ended(command: Sequence[str], variables: dict[str, str]) -> int:
    """Return the exit status of a command. No deadline: it takes as long as its tasks do, and the caller may interrupt it."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    process = await asyncio.create_subprocess_exec(
        *command, env=environment | variables, stdin=asyncio.subprocess.DEVNULL, stdout=STDERR
    )
    try:
        return await process.wait()
    except asyncio.CancelledError:
        process.terminate()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        raise
