"""The folder for temporary files of one process of user code.

Its service holds a lock on it and removes it after the end of the process. Where the service was killed, the lock is gone, and
`remove_left_over` of the next service on this host removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "paceline-user-code-"
MIN_AGE_S = 60.0
"""A younger folder is kept: its service may be about to lock it."""
OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TemporaryFolder:
    """A new folder; of this process until `remove`."""

    def __init__(self, parent: Path):
        """Raises OSError where there is no room."""
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
        try:
            self._lock = os.open(self.path, OPEN)
        except OSError:
            os.rmdir(self.path)
            raise
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def remove(self) -> None:
        """Remove it with its files, after the end of the process. Blocks."""
        _remove(self.path)
        os.close(self._lock)


def remove_left_over(parent: Path | None = None) -> int:
    """Remove the folders of services that are gone, below `parent` (default TMPDIR); return their number. Blocks."""
    number = 0
    with contextlib.suppress(OSError), os.scandir(parent or tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
                with contextlib.suppress(
                    OSError
                ):  # its service lives and has locked it, or it is gone meanwhile
                    number += _remove_if_left(entry)
    return number


def _remove_if_left(entry: os.DirEntry[str]) -> bool:
    state = entry.stat(follow_symlinks=False)
    if state.st_uid != os.getuid() or time.time() - state.st_ctime < MIN_AGE_S:
        return False
    folder = os.open(entry.path, OPEN)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(entry.path)
    finally:
        os.close(folder)
    return True


def _remove(path: str) -> None:
    with contextlib.suppress(RecursionError):  # folders as deep as user code likes; they are left
        shutil.rmtree(path, ignore_errors=True)
