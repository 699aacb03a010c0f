"""Launcher that replaces itself by another program, which then cannot outlive its starter, however the starter ends. A
bare interpreter runs this file (`tethered`) in some 20 ms, without Paceline's modules; so the file repeats the call of
`paceline.host.process.die_with_parent`. The kernel sends the signal when the *thread* that started the process ends:
start tethered processes from a thread that waits for them. On other systems than Linux the program simply runs."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def tethered(command: list[str]) -> list[str]:
    """Return the command line that runs `command` and kills it if this process, or the thread that starts it, ends."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def _become(starter_pid: int, command: list[str]) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != starter_pid:  # the starter ended before the call
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])
