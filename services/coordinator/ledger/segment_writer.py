"""Appends to a segment past the page cache (O_DIRECT), where the file system supports it.

Appended bytes are synced at once and mostly read never or once, so the cache does nothing for them, and its pages can
cost several times as much processor time as the write itself (docs/decisions/2026-11-21-direct-writes.md). Such a write
begins and ends at a block: each append fills its last block with zeros, which nothing refers to.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from paceline.array_frames import Buffer

BLOCK_BYTES = 4096
O_DIRECT = getattr(os, "O_DIRECT", 0)
"""Flag of a direct write; 0 on systems without it."""

BUFFER_BYTES = 8 << 20
"""Largest size of a write. Each write releases the interpreter and then waits for it, so writes should be few."""


class SegmentWriter:
    """A new segment. Its methods raise OSError."""

    def __init__(self, path: Path):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o644)
        self.size = 0
        """Bytes so far: start of the next append."""
        self._buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES))  # begins at a page
        self._set_direct(True)

    def append(self, parts: Iterable[Buffer]) -> None:
        """Write the parts one after another and wait until they are on the disk."""
        fill = 0
        for part in parts:
            rest = memoryview(part).cast("B")
            while len(rest):
                piece = rest[: BUFFER_BYTES - fill]
                self._buffer[fill : fill + len(piece)] = piece
                fill, rest = fill + len(piece), rest[len(piece) :]
                if fill == BUFFER_BYTES:
                    self._write(fill)
                    fill = 0
        if fill:
            end = -(-fill // BLOCK_BYTES) * BLOCK_BYTES
            self._buffer[fill:end] = bytes(end - fill)
            self._write(end)
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _write(self, size: int) -> None:
        """Write the buffer's first `size` bytes, whole blocks; the system may take less than it was given."""
        done = 0
        while done < size:
            try:
                written = os.pwrite(self._fd, self._buffer[done:size], self.size)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._set_direct(False):
                    raise
                continue
            if written < BLOCK_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            whole = written - written % BLOCK_BYTES
            done, self.size = done + whole, self.size + whole

    def _set_direct(self, direct: bool) -> bool:
        """Set or clear O_DIRECT; return whether that changed anything. A file system without direct writes refuses the
        flag, or the first write.
        """
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        wanted = flags | O_DIRECT if direct else flags & ~O_DIRECT
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, wanted)
        except OSError:
            return False
        return wanted != flags
