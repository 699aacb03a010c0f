"""The folder of an export: it appears whole under its name or not at all, and replaces only an earlier export."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import Conflict
from paceline.files.names import EXPORT_MANIFEST

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LEFT_OVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>partial|replaced)-(?P<pid>\d{1,9})")
SIGNS = (EXPORT_MANIFEST, "config.json", "adapter_config.json")
"""Every export has one of these files."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2


@contextlib.contextmanager
def written_beside(directory: Path, *, replace: bool = False) -> Iterator[Path]:
    """Give a folder to write into, which becomes `directory` when the block ends without an error, and is removed otherwise.

    Raises Conflict when `directory` exists; with `replace` only when it is no export.
    """
    _check(directory, replace)
    remove_left_overs(directory.parent)
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        _check(directory, replace)
        _put(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_left_overs(folder: Path) -> None:
    """Remove the unfinished exports of dead processes from `folder`."""
    for path in folder.glob(".*"):
        match = LEFT_OVER.fullmatch(path.name)
        if match is None or not path.is_dir() or _lives(int(match["pid"])):
            continue
        whole = folder / match["name"]
        if match["kind"] == "replaced" and not whole.exists():
            path.rename(whole)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _check(directory: Path, replace: bool) -> None:
    if not (directory.exists() or directory.is_symlink()):
        return
    if not replace:
        raise Conflict(f"{directory} exists; an export never overwrites")
    if directory.is_symlink() or not any((directory / sign).is_file() for sign in SIGNS):
        raise Conflict(f"{directory} exists and is no export; give the export another name")


def _put(partial: Path, directory: Path) -> None:
    try:
        partial.rename(directory)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if _exchange(partial, directory):
            return  # the earlier export has the partial name now, and its caller removes it
        replaced = directory.with_name(f".{directory.name}.replaced-{os.getpid()}")
        directory.rename(replaced)
        partial.rename(directory)
        shutil.rmtree(replaced, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names at once; return False where the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return renameat2 is not None and (
        renameat2(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0
    )


def _lives(pid: int) -> bool:
    """Return whether another process of this number exists; this process never calls it during an export."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
