"""Start-up of services: tie the process to its starter, set up libraries, raise the limit on open files, and write the
address to the ready file, because the starter does not know which free port was taken. At the soft limit, usually
1,024 files, a process can neither accept a connection nor list a folder; the hard limit bounds the members of a
coordinator (`Capacity`)."""

from __future__ import annotations

import logging
import os
import resource
import signal
from pathlib import Path

from paceline.files.whole_file import write_whole
from paceline.host.process import die_with_parent

STARTER_VARIABLE = "PACELINE_STARTER"


def die_with_starter() -> None:
    """Let SIGTERM end this process when the starter named in the environment dies. On other systems than Linux, do
    nothing."""
    starter = os.environ.get(STARTER_VARIABLE)
    if starter:
        die_with_parent(int(starter), signal.SIGTERM)


LIBRARY_VARIABLES = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "GOMP_SPINCOUNT": "1000",
}
"""Environment variables to set before torch and huggingface_hub are imported. They prevent a warning with C++ frames
whenever a peer of a TCP store closes its connection, and progress bars, which are long lines in a file. The last
variable bounds the busy wait of torch's threads: by default these threads take for milliseconds, at the end of each
operation, the cores that the threads of a neighbouring service need (docs/operate/performance.md, "Threads")."""


def set_library_variables() -> None:
    """Set those variables of LIBRARY_VARIABLES that are not set yet, for this process and its later children."""
    os.environ.update(library_variables())


def library_variables() -> dict[str, str]:
    """Return those variables of LIBRARY_VARIABLES that are not set yet. A user's OMP_WAIT_POLICY bounds the busy wait."""
    missing = {name: value for name, value in LIBRARY_VARIABLES.items() if name not in os.environ}
    if "OMP_WAIT_POLICY" in os.environ:
        missing.pop("GOMP_SPINCOUNT", None)
    return missing


def announce(ready_file: Path | None, address: str) -> None:
    if ready_file is not None:
        write_whole(ready_file, address + "\n")


FILES_PER_MEMBER = 2
"""Open files of a coordinator for each member: control stream and exchange. A second port for people adds one."""
RESERVED_FILES = 160
"""Open files that are reserved for the ledger, its segments, run files, libraries and watching clients."""
RESERVED_FOR_CLIENTS = 64
"""Connections to the control plane that are reserved for clients other than members; part of RESERVED_FILES."""
MAX_MEMBERS = 8192
"""Largest number of members of a coordinator, whatever the file limit is: each connection takes memory."""
TIGHT = 0.9
"""A warning is logged once the members are at least this share of the possible members."""

log = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit, log both, and return the limit in effect."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:  # a system may refuse its own hard limit
            log.warning("the limit of open files stays %d, because %d cannot be set: %s", soft, hard, error)
            return soft
    log.info("limit of open files: %d (soft limit at start: %d)", hard, soft)
    return hard


class Capacity:
    """Number of members that a coordinator with a limit of open files can serve."""

    def __init__(self, max_files: int, *, has_people_port: bool = False):
        self._max_files = max_files
        files = FILES_PER_MEMBER + has_people_port
        spare = max_files - RESERVED_FILES - has_people_port * RESERVED_FOR_CLIENTS
        self.max_members = min(MAX_MEMBERS, max(1, spare // files))
        self.max_connections = self.max_members + RESERVED_FOR_CLIENTS
        """Largest number of connections to each port of the control plane."""
        self._has_warned = False

    def refusal(self, members: int) -> str:
        """Return the reason why no further member is accepted, else "". Warns once when the capacity is nearly used."""
        if members >= self.max_members:
            return self._sentence()
        if members + 1 >= TIGHT * self.max_members:
            if not self._has_warned:
                log.warning("%d members: %s", members + 1, self._sentence())
            self._has_warned = True
        return ""

    def _sentence(self) -> str:
        if self.max_members == MAX_MEMBERS:
            return f"a coordinator serves {MAX_MEMBERS} members at most; start another coordinator for other runs"
        return (
            f"this coordinator can serve about {self.max_members} members with its limit of {self._max_files} open files; "
            "raise ulimit -n"
        )
