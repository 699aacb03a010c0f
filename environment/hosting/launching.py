"""The process that becomes an agent's command: it applies the limits, then executes the command line."""

from __future__ import annotations

import os
import resource
import signal
import sys

from paceline.host.process import die_with_parent
from paceline.user_code.box import Box
from paceline.user_code.child import MAX_LIMIT_BYTES, be_killed_first

NOT_FOUND = 127


def main() -> None:
    """Become the command argv[5:], with argv[3] MiB of memory, in the box argv[4]; die with process argv[2].

    The limit is on each process's writable private memory (RLIMIT_DATA), not its address space, because runtimes such
    as those of JavaScript and Go reserve far more address space than they use.
    """
    parent, memory_mb, argv = int(sys.argv[2]), int(sys.argv[3]), sys.argv[5:]
    die_with_parent(parent, signal.SIGKILL)
    be_killed_first()
    limit = min(memory_mb << 20, MAX_LIMIT_BYTES)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    Box.read(sys.argv[4]).close()
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr)
        os._exit(NOT_FOUND)
