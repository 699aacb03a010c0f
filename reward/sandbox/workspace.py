"""The folder of one sandboxed program: written before it starts, measured while it runs, removed at its end.

The program may do anything inside: deep trees, folders without permissions, links to anywhere, entries that it swaps
during reading. So nothing here follows a link, and the kernel never gets a path longer than one name.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Mapping, Sequence

from paceline.reward.sandbox.launching import unlinked_bytes

MAX_DEPTH = 48
"""Number of levels of nested folders that are measured. A deeper folder counts as exceeding the limit."""
ENTRY_BYTES = 4096
"""An entry counts as at least this many bytes, so that the number of empty files is bounded too."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Workspace:
    """A new folder with `files`; a context manager that removes it."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """Create the folder in TMPDIR. Raises OSError."""
        self.path = tempfile.mkdtemp(prefix="paceline-sandbox-")
        try:
            for name, content in files.items():
                path = os.path.join(self.path, name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as file:
                    file.write(content)
        except BaseException:
            self.remove()
            raise

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def used_bytes(self, most_bytes: int, pids: Sequence[int]) -> int:
        """Return the bytes on disk of the folder and deleted files that `pids` hold open, or a number above
        `most_bytes`."""
        try:
            folder = os.open(self.path, FOLDER)
        except OSError:
            return 0
        return sum(map(unlinked_bytes, pids)) + _used_bytes(folder, most_bytes, MAX_DEPTH)

    def remove(self) -> None:
        """Remove the folder with its content. No process of the program may be alive."""
        try:
            folder = os.open(self.path, FOLDER)
        except OSError:
            return
        try:
            _empty(folder)
        finally:
            os.close(folder)
        os.rmdir(self.path)


def _used_bytes(folder: int, most_bytes: int, depth: int) -> int:
    used = 0
    try:
        if depth == 0:
            return most_bytes + 1
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    state = entry.stat(follow_symlinks=False)
                    used += max(ENTRY_BYTES, state.st_blocks * 512)
                    if stat.S_ISDIR(state.st_mode):
                        below = os.open(entry.name, FOLDER, dir_fd=folder)
                        used += _used_bytes(below, most_bytes - used, depth - 1)
                except OSError:
                    continue  # removed or swapped meanwhile, or without permissions
                if used > most_bytes:
                    return used
        return used
    finally:
        os.close(folder)


def _empty(top: int) -> None:
    """Remove everything in the open folder `top`. Nested folders move up first, so that no path and no stack grows."""
    number, unused = 0, secrets.token_hex(8)
    while names := os.listdir(top):
        for name in names:
            try:
                os.unlink(name, dir_fd=top)
            except (IsADirectoryError, PermissionError):
                number = _flatten(top, name, unused, number)


def _flatten(top: int, name: str, unused: str, number: int) -> int:
    """Move the folders in `name` to `top`, where their names are `unused` with numbers from `number` on, and remove the
    other entries and `name`. Return the next number."""
    # Only modes can keep the owner out; nothing runs any more that could put a link in its place.
    os.chmod(name, 0o700, dir_fd=top)
    below = os.open(name, FOLDER, dir_fd=top)
    try:
        for entry in os.listdir(below):
            if stat.S_ISDIR(os.stat(entry, dir_fd=below, follow_symlinks=False).st_mode):
                os.chmod(entry, 0o700, dir_fd=below)  # because moving a folder writes its `..`
                os.rename(entry, f"{unused}-{number}", src_dir_fd=below, dst_dir_fd=top)
                number += 1
            else:
                os.unlink(entry, dir_fd=below)
    finally:
        os.close(below)
    os.rmdir(name, dir_fd=top)
    return number
