"""Opens the folders of caches and spools as strictly as ssh opens its own, because this process executes or sends their
content.

Promise: only this process's user and root can change what a returned folder holds, or put another folder in its place.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import Unreadable

VARIABLE = "PACELINE_OWN_FOLDERS"
"""Folders, separated by `:`. Owner and mode of these folders, and of the folders above them, are not judged."""


def own_folder(folder: Path, variable: str) -> Path:
    """Return the folder, made with mode 0700 if it is missing. `variable` is the environment variable that names
    another folder. Raises OSError; Unreadable for a folder that somebody else could change."""
    folder = Path(os.path.abspath(folder))
    missing = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    for place in reversed(missing):
        place.mkdir(mode=0o700, exist_ok=True)
    real = folder.resolve(strict=True)
    if not real.is_dir():
        raise NotADirectoryError(20, "it is not a folder", str(folder))
    for place in _way_to(folder, real):
        is_parent = place.resolve() != real
        if why := _why_open(place, is_parent=is_parent):
            trust = f"; if you trust whoever may write there, name {place} in {VARIABLE} instead" if is_parent else ""
            raise Unreadable(
                f"{folder} is not used: {why}, so another user could change what this process reads there; make a "
                f"folder with `mkdir -m 700` inside a folder of your own, and set {variable} to it{trust}"
            )
    return folder


def _way_to(folder: Path, real: Path) -> Iterator[Path]:
    """Yield the folders and links through which a path leads to its folder `real`, up to those that VARIABLE names."""
    named = [Path(name) for name in os.environ.get(VARIABLE, "").split(":") if name]
    trusted = {*named, *(place.resolve() for place in named)}
    ways = [real, folder]
    for way in ways:
        for place in (way, *way.parents):
            if place in trusted:
                break
            if place.is_symlink():
                yield place  # checked before the link is followed
                ways.append(place.parent / place.readlink())  # also with "..", which is no parent of a link's target
            elif place.resolve() not in trusted:
                yield place


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
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    return f"{whom} may write in {place} (mode {mode}; `chmod go-w` it if nobody has written there)"


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
    """Return whether `user` is the id by which this user namespace shows all users that it does not have, such as the
    host's root."""
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        mapped = [int(number) for number in Path("/proc/self/uid_map").read_text().split()]
    except (OSError, ValueError):
        return False
    return user == overflow and not any(
        first <= user < first + count for first, count in zip(mapped[::3], mapped[2::3], strict=True)
    )
