"""Writes files that appear whole or not at all, and computes stamps that show changes of files without reading them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path


@contextlib.contextmanager
def written_whole(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write to. The file there becomes `path` if the `with` block succeeds, and is removed
    otherwise. A `durable` file is on the disk under its name after the `with` block, even if the machine then loses
    power."""
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
    """Return a value that changes if a file is changed or replaced; None if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


MAX_FILES = 1000
Stamp = tuple[tuple[str, int, int], ...]


def stamp(folder: Path, patterns: Iterable[str]) -> Stamp:
    """Return name, mtime in ns and size in bytes of up to MAX_FILES matching files; none if `folder` is unreadable."""
    stamps: list[tuple[str, int, int]] = []
    try:
        for path in sorted({path for pattern in patterns for path in folder.glob(pattern)})[:MAX_FILES]:
            status = path.stat()
            stamps.append((path.name, status.st_mtime_ns, status.st_size))
    except OSError:
        return ()
    return tuple(stamps)
