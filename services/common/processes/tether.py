"""Launcher that replaces itself by another program, which then cannot outlive its starter, however the starter ends.

It runs as a file by a bare interpreter (`tethered` gives the command line), so it costs some 20 ms and imports no
module of Paceline; that is why it repeats the call of `paceline.host.process.die_with_parent`. The kernel sends the
signal when the *thread* that started the process ends: start tethered processes from a thread that waits for them.
Linux only; elsewhere the program simply runs.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def tethered(command: list[str]) -> list[str]:
    """Return the command line that runs `command`. The command is killed if this process ends, or if the thread ends
    that starts the command."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def _become(starter_pid: int, command: list[str]) -> None:
    """Tie this process to its starter, then replace it by `command`."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != starter_pid:  # the starter ended before the call
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
