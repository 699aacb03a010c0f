"""Start of a process of user code: a fresh interpreter with this project's code, and one end of a socket pair."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, Process

from paceline.user_code.ends import ProcessNotStarted
from paceline.user_code.surroundings import ROOT, Place, Surroundings

BOOT = (
    "import sys, importlib; sys.path.insert(0, sys.argv[1]); import paceline; sys.path.pop(0); "
    "importlib.import_module(sys.argv[4]).main()"
)
"""Code of the child. It has to import the same code as this process."""


async def spawn(
    module: str, surroundings: Surroundings | None
) -> tuple[Process, socket.socket, Place | None]:
    """Start a process that runs `main()` of a module, in a session of its own, and return it with this side's socket, and with its
    place, whose files the caller removes after its end.

    `paceline.user_code.child.connect` is the process' side. -P keeps the working directory off its import path. Without
    `surroundings`, for code of this project, it has this process' environment and no box. Raises ProcessNotStarted.
    """
    try:
        place = None if surroundings is None else surroundings.place()
    except OSError as error:
        raise ProcessNotStarted(f"could not be started: {error}") from error
    try:
        return *await _spawn(module, place), place
    except BaseException as error:
        if place is not None:
            await asyncio.to_thread(place.remove)
        if isinstance(error, OSError):
            raise ProcessNotStarted(f"could not be started: {error}") from error
        raise


async def _spawn(module: str, place: Place | None) -> tuple[Process, socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-P",
                    "-c",
                    BOOT,
                    ROOT,
                    str(theirs.fileno()),
                    str(os.getpid()),
                    module,
                    *([] if place is None else [place.box.text()]),
                ),
                stdin=DEVNULL,
                env=None if place is None else place.environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
    return process, ours
