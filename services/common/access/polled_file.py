"""A small file that commands replace while a service runs: read anew when it has changed, within CHECK_S."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from paceline.errors import Conflict
from paceline.rate_limited_log import RateLimitedLog

CHECK_S = 0.5
"""Seconds after which the file is looked at again."""

ContentT = TypeVar("ContentT")
seldom = RateLimitedLog(logging.getLogger(__name__))


class PolledFile(Generic[ContentT]):
    """One file. When it is damaged at first, that is an error; later its content stays as it was, with a warning."""

    def __init__(
        self,
        path: Path,
        read: Callable[[Path], ContentT],
        changed: Callable[[ContentT, ContentT], None] = lambda before, after: None,
    ):
        """`read` returns the content, also of a file that is not there; `changed` is called with the contents before and after a
        change. Raises Conflict for a damaged file."""
        self._path, self._read, self._changed = path, read, changed
        self._stamp, self._content = _stamp(path), read(path)
        self._checked_s = float("-inf")

    @property
    def content(self) -> ContentT:
        """Return the content, at most CHECK_S old."""
        now_s = time.monotonic()
        if now_s - self._checked_s < CHECK_S:
            return self._content
        self._checked_s = now_s
        stamp = _stamp(self._path)
        if stamp != self._stamp:
            try:
                before, self._content = self._content, self._read(self._path)
                self._stamp = stamp
                self._changed(before, self._content)
            except Conflict as fault:
                seldom.warning(self._path.name, "%s; what it said before still counts", fault)
        return self._content


def _stamp(path: Path) -> object:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
