"""Opens the folders of caches and spools, whose content this process executes or sends, as ssh opens its own.

Promise: only this process's user and root can change what a returned folder holds, or put another folder in its place.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from paceline.errors import Unreadable

VARIABLE = "PACELINE_OWN_FOLDERS"
"""Folders, separated by `:`, that belong to this user alone whatever their mode: volumes of a container."""


def own_folder(folder: Path, variable: str) -> Path:
    """Return the folder, made with mode 0700 if it is missing. `variable` is the one that names another. Raises
    Unreadable for a folder that somebody else could change, OSError."""
    folder = Path(os.path.abspath(folder))
    missing = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    for place in reversed(missing):
        place.mkdir(mode=0o700, exist_ok=True)
    if why := why_not_own(folder):
        raise Unreadable(
            f"{folder} is not used, because {why}, and could change what this process reads there; make a folder with "
            f"`mkdir -m 700` in one of your own, and name it in {variable}"
        )
    return folder


def why_not_own(folder: Path) -> str:
    """Return who else could change a folder or replace it, as a clause; empty if nobody could. Raises OSError."""
    folder = Path(os.path.abspath(folder))
    real = folder.resolve(strict=True)
    if not real.is_dir():
        raise NotADirectoryError(20, "it is not a folder", str(folder))
    trusted = {Path(name).resolve() for name in os.environ.get(VARIABLE, "").split(":") if name}
    for start in (real, folder):
        for place in (start, *start.parents):
            if place.resolve() in trusted:
                break
            if why := _why_open(place, is_parent=place not in (real, folder)):
                return why
    return ""


def _why_open(place: Path, *, is_parent: bool) -> str:
    status = place.lstat()
    if status.st_uid not in (os.geteuid(), 0) and not (is_parent and _is_unmapped(status.st_uid)):
        return f"user {status.st_uid} owns {place}"
    if stat.S_ISLNK(status.st_mode) or (is_parent and status.st_mode & stat.S_ISVTX):
        return ""  # in a sticky folder only owners rename
    by_others = status.st_mode & stat.S_IWOTH
    by_group = status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid)
    if not (by_others or by_group):
        return ""
    whom = "every user" if by_others else f"group {status.st_gid}"
    return f"{whom} may write in {place} (mode {stat.S_IMODE(status.st_mode):04o}; `chmod go-w` it if nobody has)"


def _is_private(group: int) -> bool:
    """Return whether a group is that of root, or has no member but this process's user."""
    if group == 0:
        return True
    try:
        own = pwd.getpwuid(os.geteuid())
        found = grp.getgrgid(group)
    except KeyError:
        return False
    return own.pw_gid == group and found.gr_name == own.pw_name and not set(found.gr_mem) - {own.pw_name}


def _is_unmapped(user: int) -> bool:
    """Return whether a user is how this user namespace shows those that it does not have, root of the host too."""
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        mapped = [int(number) for number in Path("/proc/self/uid_map").read_text().split()]
    except (OSError, ValueError):
        return False
    return user == overflow and not any(
        first <= user < first + count for first, count in zip(mapped[::3], mapped[2::3], strict=True)
    )
