"""The folder of an export: it appears whole under its name or not at all, and replaces only an earlier export.

An export to an object store is written to this machine's spool first. Its manifest is uploaded last, and is deleted
first when another export replaces it: without a manifest the export is not whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

from paceline.errors import Conflict, PacelineError
from paceline.files.bounded_cache import spool_folder
from paceline.files.names import EXPORT_MANIFEST
from paceline.files.storage import Folder, unavailable

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LEFT_OVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>partial|replaced)-(?P<pid>\d{1,9})")
SIGNS = (EXPORT_MANIFEST, "config.json", "adapter_config.json")
"""Files that mark an export: every export has one."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2


@contextlib.contextmanager
def written_beside(place: str | os.PathLike[str], *, replace: bool = False) -> Iterator[Path]:
    """Yield a folder to write into. It becomes `place` (a path or an fsspec URL) if the block ends without an error,
    and is removed otherwise. Raises Conflict if `place` exists (with `replace`: only if it is not an export),
    Unavailable for an object store that cannot be written now."""
    folder = Folder(place)
    directory, present = folder.local, set[str]()
    if directory is None:
        present = _present(folder, replace)
        partial = spool_folder() / "exports" / f".{uuid.uuid4().hex}.partial-{os.getpid()}"
    else:
        _check(directory, replace)
        partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    remove_left_overs(partial.parent)
    partial.mkdir(parents=True)
    try:
        yield partial
        if directory is None:
            _upload(partial, folder, present)
        else:
            _check(directory, replace)
            _put(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _present(folder: Folder, replace: bool) -> set[str]:
    try:
        present = set(folder.files())
    except FileNotFoundError:
        return set()
    except Exception as error:  # the clients of object stores raise errors without a common base
        raise unavailable(f"{folder} cannot be read", error) from error
    if present and not replace:
        raise Conflict(f"{folder} exists, and an export never overwrites; name another folder")
    if present and not present.intersection(SIGNS):
        raise Conflict(f"{folder} exists and is not an export; give the export another name")
    return present


def _upload(local: Path, folder: Folder, present: set[str]) -> None:
    """Replace the `present` files by the files in `local`. SIGNS are deleted first and written last. Raises
    Unavailable."""
    names = sorted(path.relative_to(local).as_posix() for path in local.rglob("*") if path.is_file())
    try:
        for sign in present.intersection(SIGNS):
            folder.delete(sign)
        for name in sorted(names, key=lambda name: (name == EXPORT_MANIFEST, name in SIGNS, name)):
            if name == EXPORT_MANIFEST:
                for stale in sorted(present.difference(names)):
                    folder.delete(stale)
            folder.put(name, local / name)
    except PacelineError:
        raise
    except Exception as error:
        raise unavailable(f"{folder} cannot be written", error) from error


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
        raise Conflict(f"{directory} exists, and an export never overwrites; name another folder")
    if directory.is_symlink() or not any((directory / sign).is_file() for sign in SIGNS):
        raise Conflict(f"{directory} exists and is not an export; give the export another name")


def _put(partial: Path, directory: Path) -> None:
    try:
        partial.rename(directory)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if _exchange(partial, directory):
            return  # the earlier export now has the partial name, and the caller removes it
        replaced = directory.with_name(f".{directory.name}.replaced-{os.getpid()}")
        directory.rename(replaced)
        partial.rename(directory)
        shutil.rmtree(replaced, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names atomically; return False if the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return renameat2 is not None and (
        renameat2(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0
    )


def _lives(pid: int) -> bool:
    """Return whether another process with this id exists; this process has no export in progress during the call."""
    return pid != os.getpid() and psutil.pid_exists(pid)
