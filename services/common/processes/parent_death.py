"""Tie of a child service to its starter: the child must not outlive it, however the starter ends."""

from __future__ import annotations

import os
import signal

from paceline.host.process import die_with_parent

STARTER_VARIABLE = "PACELINE_STARTER"


def die_with_starter() -> None:
    """Get SIGTERM when the starting process dies, if that process named itself in the environment.

    Linux only; elsewhere nothing happens, and the starter has to clean up.
    """
    starter = os.environ.get(STARTER_VARIABLE)
    if starter:
        die_with_parent(int(starter), signal.SIGTERM)
