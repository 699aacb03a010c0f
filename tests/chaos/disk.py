"""A disk that is small enough to be filled: a separate tmpfs, and the file that fills it."""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path

CHUNK = bytes(1 << 20)


class Ballast:
    """A file beside the ledger that takes all that is free."""

    def __init__(self, directory: Path):
        self._path = directory / "ballast"

    def fill(self) -> None:
        """Writes until nothing more can be written. Raises RuntimeError on a disk that others share."""
        if not self._path.parent.is_mount():
            raise RuntimeError(f"{self._path.parent} is no disk of its own; it is not filled")
        size = len(CHUNK)
        with self._path.open("ab", buffering=0) as file:
            while size:
                try:
                    file.write(CHUNK[:size])
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    size //= 2

    def clear(self) -> None:
        """Makes room again."""
        self._path.unlink(missing_ok=True)


def mount(directory: Path, size_mb: int) -> bool:
    """Mounts a disk of that size at `directory`; whether that was allowed."""
    directory.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(directory)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def unmount(directory: Path) -> None:
    """Takes it away again, with what is on it."""
    subprocess.run(["umount", "--lazy", str(directory)], check=True)
