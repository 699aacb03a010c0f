"""A lock on a folder: one process at a time works in it, and the error for the next process names the holder. The lock
ends with its holder's process. Its file stays, with the holder's process id for people."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from paceline.errors import Conflict
from paceline.services.common.options import make_directory


class FolderLock:
    """A lock that one object at a time holds, from `take` to `release`."""

    def __init__(self, path: Path, who: str, option: str = "--directory"):
        """`path` is the lock's file, `who` describes the holder, `option` is the command-line option for the folder."""
        self._path = path
        self._who = who
        self._option = option
        self._file: IO[str] | None = None

    def take(self) -> None:
        """Take the lock at once, and create a missing folder. Raises Conflict if another process holds the lock."""
        make_directory(self._path.parent)
        file = self._path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            raise Conflict(
                f"another {self._who} (process {holder}) works in {self._path.parent}; stop it, or use another "
                f"{self._option}"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        self._file = file

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
