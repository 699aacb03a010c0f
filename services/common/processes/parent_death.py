"""A child service must not outlive its starter, however that one dies."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

STARTER_VARIABLE = "PACELINE_STARTER"
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks the kernel for SIGTERM when the starting process dies; only when that process said so by variable.

    Linux only; elsewhere nothing happens, and the starter's own clean-up has to do.
    """
    starter = os.environ.get(STARTER_VARIABLE)
    if not starter or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(starter):  # it died before the call
        os.kill(os.getpid(), signal.SIGTERM)
