"""Reads a file that somebody has named, if it is a regular file. Promise: any other kind of file is refused at once,
because opening a FIFO would wait for its writer, and a device may never end. Not in paceline/files, because that
package imports specs and encryption, which open their files with this module."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: str | Path) -> BinaryIO:
    """Return the file opened for reading. Raises OSError as `open` does, and for a FIFO, a socket or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "the path is a pipe, a socket or a device, not a file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: str | Path) -> bytes:
    """Return the whole content of the file. Raises OSError as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()
