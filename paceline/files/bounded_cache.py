"""`BoundedCache`: folders of this machine whose size together is bounded, for all processes of its user.

Each entry is a folder with two locks beside it. A process that uses the folder holds the first one shared, so that nobody
removes it; the process that fills the folder holds the second one alone. An entry that nobody uses may be removed, the one that
was used longest ago first. An entry is made beside its place and moved there whole; so it is, while others still read the
damaged one that it replaces.

Beside the caches is the spool: a folder of this machine for files on their way to a store. It needs no backup.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import InvalidInput, Unavailable, Unreadable


class HeldFolder:
    """An entry's folder, which stays until `close`."""

    def __init__(self, root: Path, lock: int):
        self.root = root
        self._lock: int | None = lock

    def close(self) -> None:
        """Allow the folder's removal."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> HeldFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class CacheKind:
    """What a cache holds, and where its user says so: `PACELINE_<NAME>_CACHE` (folder), `…_CACHE_MB` (size)."""

    name: str
    """One entry's, in messages and variables: `bundle`."""
    default_mb: int
    wait_s: float
    """Seconds to wait for another process that fills the same entry."""

    @property
    def folder_variable(self) -> str:
        return f"PACELINE_{self.name.upper()}_CACHE"

    @property
    def size_variable(self) -> str:
        return f"{self.folder_variable}_MB"

    def of_user(self, folder_name: str) -> BoundedCache:
        """Return the cache that the environment names, else `paceline/<folder_name>` in the user's cache. Raises InvalidInput."""
        given = os.environ.get(self.folder_variable)
        folder = Path(given) if given else _in_user_cache(folder_name)
        return BoundedCache(folder, _bytes_by(self.size_variable, self.default_mb), self)


class BoundedCache:
    """Entries in `folder`, `max_bytes` together and never more than its disk has room for."""

    def __init__(self, folder: Path, max_bytes: int, kind: CacheKind):
        self._folder, self._max_bytes, self._kind = folder, max_bytes, kind

    @property
    def folder(self) -> Path:
        return self._folder

    def open(
        self, name: str, size: int, is_whole: Callable[[Path], bool], fill: Callable[[Path], None]
    ) -> HeldFolder:
        """Return the entry `name`, which takes `size` bytes; `fill` makes it in an empty folder unless it `is_whole`.
        Raises Unreadable: more than the cache may hold, a disk that cannot be written; Unavailable when entries in use
        leave no room; errors of `fill`."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            return self._open(name, size, is_whole, fill)
        except OSError as error:
            raise Unreadable(
                f"the {self._kind.name} cannot be kept in {self._folder}: {error.strerror or error}; set "
                f"{self._kind.folder_variable} to a folder with room in which you can write"
            ) from error

    def _open(
        self, name: str, size: int, is_whole: Callable[[Path], bool], fill: Callable[[Path], None]
    ) -> HeldFolder:
        root = self._folder / name
        lock = self._lock_file(name)
        try:
            self._wait_for(lock, fcntl.LOCK_SH)
            if not is_whole(root):
                with self._alone(name):
                    if not is_whole(root):  # no other process was faster
                        with self._alone("room"):
                            self._make_room(name, size, lock)
                        self._fill(root, fill, lock)
            os.utime(lock)
            return HeldFolder(root, lock)
        except BaseException:
            os.close(lock)
            raise

    def _fill(self, root: Path, fill: Callable[[Path], None], lock: int) -> None:
        partial, damaged = root.with_suffix(".partial"), root.with_suffix(".damaged")
        for left in (partial, damaged):  # by a process that has ended in the middle
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir()
        try:
            fill(partial)
            with contextlib.suppress(FileNotFoundError):
                root.rename(damaged)
            partial.replace(root)
        except BaseException:
            if not root.is_dir():
                os.ftruncate(lock, 0)
            raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(damaged, ignore_errors=True)

    def _make_room(self, name: str, size: int, lock: int) -> None:
        """Remove entries that nobody uses until this one has room, and take it. Raises Unreadable, Unavailable."""
        kind = self._kind
        what = f"the {kind.name}'s files are {size >> 20} MB, and "
        if size > self._max_bytes:
            raise Unreadable(
                f"{what}{self._folder} may hold {self._max_bytes >> 20} MB; raise {kind.size_variable}"
            )
        used: list[tuple[float, str, int]] = []
        for path in self._folder.glob("*.lock"):
            with contextlib.suppress(OSError, ValueError):
                used.append((path.stat().st_mtime, path.stem, int(path.read_text() or 0)))
        total = sum(entry_size for _, entry, entry_size in used if entry != name)
        for _, entry, entry_size in sorted(used):
            if self._has_room(total, size):
                break
            if entry != name and entry_size and self._remove(entry):
                total -= entry_size
        if total + size > self._max_bytes:
            raise Unavailable(
                f"{what}{kind.name}s in use take {total >> 20} of the {self._max_bytes >> 20} MB of {self._folder}; raise "
                f"{kind.size_variable}"
            )
        if not self._has_room(total, size):
            free = shutil.disk_usage(self._folder).free
            raise Unavailable(
                f"{what}the disk of {self._folder} has {free >> 20} MB free; set {kind.folder_variable} to a folder with room"
            )
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(size).encode(), 0)

    def _has_room(self, total: int, size: int) -> bool:
        return total + size <= self._max_bytes and size <= shutil.disk_usage(self._folder).free

    def _remove(self, name: str) -> bool:
        """Remove an entry; return False when a process uses it."""
        lock = self._lock_file(name)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for suffix in ("", ".partial", ".damaged"):  # of a process that has ended in the middle too
                shutil.rmtree(self._folder / f"{name}{suffix}", ignore_errors=True)
            os.ftruncate(lock, 0)
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(lock)

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        lock = self._lock_file(name, ".filling")
        try:
            self._wait_for(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _lock_file(self, name: str, suffix: str = ".lock") -> int:
        return os.open(self._folder / f"{name}{suffix}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _wait_for(self, lock: int, operation: int) -> None:
        """Take a lock. Polls, because a wait in the kernel has no deadline. Raises Unavailable."""
        deadline_s, pause_s = time.monotonic() + self._kind.wait_s, 0.005
        while True:
            try:
                fcntl.flock(lock, operation | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise Unavailable(
                        f"another process has been filling the {self._kind.name}'s folder for {self._kind.wait_s:g} s"
                    ) from None
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.25)


FOLDER_VARIABLE = "PACELINE_SPOOL"
SIZE_VARIABLE = "PACELINE_SPOOL_MB"
DEFAULT_MB = 65_536


def spool_folder() -> Path:
    """Return the folder that PACELINE_SPOOL names, else `paceline/spool` in the user's cache."""
    given = os.environ.get(FOLDER_VARIABLE)
    return Path(given) if given else _in_user_cache("spool")


def quota_bytes() -> int:
    """Return the bytes of checkpoints that may wait for a store, by PACELINE_SPOOL_MB. Raises InvalidInput."""
    return _bytes_by(SIZE_VARIABLE, DEFAULT_MB)


def _in_user_cache(name: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / name


def _bytes_by(variable: str, default_mb: int) -> int:
    text = os.environ.get(variable) or str(default_mb)
    if not text.isdecimal() or not int(text):
        raise InvalidInput(f"{variable} is {text!r}; set it to a number of MB")
    return int(text) << 20
