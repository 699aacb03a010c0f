"""Writing a file so that it appears under its name whole or not at all; and stamps of files, which show that one was changed without
reading it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path


@contextlib.contextmanager
def written_whole(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a path to write the file at; it becomes `path` when the block ends well and vanishes otherwise. A `durable`
    file is on the disk under its name when the block has ended, also if the machine then loses power."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        yield partial
        if durable:
            with partial.open("rb") as file:
                os.fsync(file.fileno())
        partial.replace(path)
        if durable:
            sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes | str, *, durable: bool = False) -> None:
    """Write `data` (text as UTF-8) as the whole of `path`; see `written_whole`."""
    with written_whole(path, durable=durable) as partial:
        partial.write_bytes(data.encode() if isinstance(data, str) else data)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, which syncing the files alone does not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file does, or is replaced; None for one that is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


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
