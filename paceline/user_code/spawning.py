"""Start of a process of user code: a fresh interpreter with this project's code, and one end of a socket pair."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
BOOT = "import sys, importlib; sys.path.insert(0, sys.argv[1]); importlib.import_module(sys.argv[4]).main()"
"""Code of the child. It has to import the same code as this process."""


async def spawn(module: str) -> tuple[Process, socket.socket]:
    """Start a process that runs `main()` of a module, in a session of its own, and return it with this side's socket.

    `paceline.user_code.child.connect` is the process' side. -P keeps the working directory off its import path.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-c", BOOT, ROOT, str(theirs.fileno()), str(os.getpid()), module),
                stdin=DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
    return process, ours
