"""A child service must not outlive its starter, however that one dies."""

from __future__ import annotations

import os
import signal

from paceline.process import die_with_parent

STARTER_VARIABLE = "PACELINE_STARTER"


def die_with_starter() -> None:
    """Get SIGTERM when the starting process dies; only when that process named itself in the environment.

    Linux only; elsewhere nothing happens, and the starter's own clean-up has to do.
    """
    starter = os.environ.get(STARTER_VARIABLE)
    if starter:
        die_with_parent(int(starter), signal.SIGTERM)
