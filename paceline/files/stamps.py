"""Stamps of files: they show that a file was changed, without reading it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

MAX_FILES = 1000

Stamp = tuple[tuple[str, int, int], ...]


def stamp(folder: Path, patterns: Iterable[str]) -> Stamp:
    """Return name, time of the last change in ns, and size in bytes of the files in `folder` that match a pattern, MAX_FILES
    at most; nothing for a folder that cannot be read."""
    found: list[tuple[str, int, int]] = []
    try:
        for path in sorted({path for pattern in patterns for path in folder.glob(pattern)})[:MAX_FILES]:
            status = path.stat()
            found.append((path.name, status.st_mtime_ns, status.st_size))
    except OSError:
        return ()
    return tuple(found)
