"""The limit on open files: raised at start, and what it lets a coordinator serve.

A usual soft limit is 1,024, and a process at its limit can neither take a connection nor list a folder. The hard limit,
which needs no right to be used, is mostly far higher.
"""

from __future__ import annotations

import logging
import resource

FILES_PER_MEMBER = 2
"""A control stream and a connection to the exchange."""

RESERVED_FILES = 160
"""For the ledger, its segments, what a run writes, libraries, and for clients that watch."""

RESERVED_FOR_CLIENTS = 64
"""Connections to the control plane beyond those of members; part of the reserve."""

TIGHT = 0.9
"""Share of the members that fit from which on it is said."""

log = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Raises the soft limit of open files to the hard one, logs both, and returns the limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:  # a system may not allow what it calls its hard limit
            log.warning("the limit of open files stays %d, %d cannot be set: %s", soft, hard, error)
            return soft
    log.info("limit of open files: %d (soft limit at start: %d)", hard, soft)
    return hard


class Capacity:
    """How many members a coordinator with a limit of open files can serve."""

    def __init__(self, max_files: int):
        self._max_files = max_files
        self.max_members = max(1, (max_files - RESERVED_FILES) // FILES_PER_MEMBER)
        self.max_connections = self.max_members + RESERVED_FOR_CLIENTS
        """To the control plane."""
        self._said = False

    def refusal(self, members: int) -> str:
        """Why a further member cannot be taken beside so many, in a sentence; empty when it can. Warns once when few fit."""
        if members >= self.max_members:
            return self._sentence()
        if members + 1 >= TIGHT * self.max_members:
            if not self._said:
                log.warning("%d members: %s", members + 1, self._sentence())
            self._said = True
        return ""

    def _sentence(self) -> str:
        return (
            f"this coordinator can serve about {self.max_members} members with its limit of {self._max_files} open files; "
            "raise ulimit -n"
        )
