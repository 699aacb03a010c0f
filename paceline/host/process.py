"""Ends a process by itself or with its parent, limits what others may read of it, and refuses systems other than
Linux."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from paceline.errors import InvalidInput

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4


def require_linux(what: str) -> None:
    """Raise InvalidInput on another platform: the services call memfd_create, prctl and abstract sockets, and read /proc."""
    if not sys.platform.startswith("linux"):
        raise InvalidInput(
            f"{what} needs Linux, and this is {sys.platform}; on macOS paceline.Client, `paceline submit` to a coordinator on "
            "Linux, and the commands that read records work"
        )


def die_with_parent(parent_pid: int, number: signal.Signals) -> None:
    """Ask the kernel to send signal `number` to this process when its parent ends, or at once if the parent has ended
    already. The parent is the *thread* that started this process. Linux only; elsewhere nothing happens."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent ended before the call
        os.kill(os.getpid(), number)


def keep_no_core() -> None:
    """Disable core dumps of this process and its later children, because its memory has secrets."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def keep_private() -> None:
    """Hide this process's environment, memory and descriptors from the user's other processes (not root's). Children
    must call it too. Linux only."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def end_with(command: Callable[[], object]) -> NoReturn:
    """Run a console command and its exit handlers, and end the process with its status. Nothing waits for threads of
    libraries: threads of gRPC have kept a process for minutes after the interpreter's end."""
    status: object = 0
    try:
        command()
    except SystemExit as end:
        status = end.code
    except BaseException:
        with contextlib.suppress(OSError, ValueError):  # a closed stream
            traceback.print_exc()
        status = 1
    if isinstance(status, str):
        with contextlib.suppress(OSError, ValueError):
            print(status, file=sys.stderr)
    atexit._run_exitfuncs()
    end_process(status if isinstance(status, int) else int(status is not None))


def end_process(status: int = 0) -> NoReturn:
    """End a process after all its work is done and saved, without the interpreter's finalisation. Exit handlers do not
    run; `end_with` runs them first.

    A thread of gloo drops the last operation's tensors after that operation was reported complete, and takes the GIL for it. During finalisation this unwinds the thread and aborts the process (`std::terminate` in `ProcessGroupGloo::runLoop`; seen in torch 2.13, on a busy machine in every second exit). `destroy_process_group` does not join the thread while any DTensor keeps the group. A thread that reads weights and is not joined aborts in the same way when it drops a tensor over shared memory.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a reader that has gone, or a closed stream
            if stream is not None:  # None: its descriptor was closed at the start
                stream.flush()
    os._exit(status)
