"""How a process of Paceline ends."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def end_process(status: int = 0) -> NoReturn:
    """Ends a rank once all its work is done and saved, without the interpreter's finalisation.

    A thread of gloo drops the last operation's tensors after that operation was reported complete, and takes the GIL for
    it. When that meets the finalisation, the thread is unwound and the process aborts (`std::terminate` in
    `ProcessGroupGloo::runLoop`; seen in torch 2.13, on a busy machine in every second exit). `destroy_process_group`
    does not join the thread while any DTensor keeps the group. Exit handlers do not run.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
