"""`BoundedCache`: folders on this machine with a limit on their total size, for all processes of a user.

Each entry is a folder with two locks beside it. A process that uses the folder holds the first lock shared, so that the
folder is not removed; the process that fills it holds the second lock exclusively. Unused entries are removed, least
recently used first. An entry is made under another name and renamed when complete, also while other processes still
read the damaged entry that it replaces. The spool is a folder beside the caches for files on their way to an object
store, without backup.

`open_copies` copies files of an object store into a cache, one folder for each version of a set of files. Promise: a
copy has the size that the store reports, and is verified whenever its folder is opened: a file of up to HASHED_BYTES by
content, a larger file by size and modification time, because hashing the weights of a large model takes minutes. A
damaged copy is fetched again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.encryption.encrypted_file import encrypting, plain_size
from paceline.encryption.storage_key import StorageKey
from paceline.errors import InvalidInput, Unavailable, Unreadable
from paceline.host.own_folder import own_folder
from paceline.host.regular_file import shown

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


class HeldFolder:
    """An entry's folder, kept until `close`."""

    def __init__(self, root: Path, lock: int):
        self.root = root
        self._lock: int | None = lock
        self._shown = str(root.resolve())
        shown[self._shown] += 1

    def close(self) -> None:
        """Release the folder, so that another process may remove it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            shown.subtract([self._shown])
            if not shown[self._shown]:
                del shown[self._shown]

    def __enter__(self) -> HeldFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class CacheKind:
    """Content of a cache. PACELINE_<NAME>_CACHE sets the cache's folder, PACELINE_<NAME>_CACHE_MB the cache's size."""

    name: str
    """Name of an entry in messages and variables, such as `bundle`."""
    default_mb: int
    wait_s: float
    """Longest wait in seconds for another process that fills the same entry."""

    @property
    def folder_variable(self) -> str:
        return f"PACELINE_{self.name.upper()}_CACHE"

    @property
    def size_variable(self) -> str:
        return f"{self.folder_variable}_MB"

    def of_user(self, folder_name: str) -> BoundedCache:
        """Return the cache that a variable names, or the user's `paceline/<folder_name>`. Raises InvalidInput."""
        named = os.environ.get(self.folder_variable)
        folder = Path(named) if named else _in_user_cache(folder_name)
        return BoundedCache(folder, bytes_by(self.size_variable, self.default_mb), self)


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


class BoundedCache:
    """Entries in `folder`, limited to `max_bytes` in total and to the room on its disk."""

    def __init__(self, folder: Path, max_bytes: int, kind: CacheKind, free_bytes: Callable[[Path], int] = _free_bytes):
        self._folder, self._max_bytes, self._kind, self._free_bytes = folder, max_bytes, kind, free_bytes

    @property
    def folder(self) -> Path:
        return self._folder

    def open(self, name: str, size: int, is_whole: Callable[[Path], bool], fill: Callable[[Path], None]) -> HeldFolder:
        """Return the entry `name` of `size` bytes; unless it `is_whole`, `fill` makes it in an empty folder. Raises
        Unreadable for a size above the limit, a disk that cannot be written and a folder that others could change;
        Unavailable if entries in use leave no room; errors of `fill`."""
        try:
            own_folder(self._folder, self._kind.folder_variable)
            return self._open(name, size, is_whole, fill)
        except OSError as error:
            raise Unreadable(
                f"the {self._kind.name} cannot be kept in {self._folder}: {error.strerror or error}; set "
                f"{self._kind.folder_variable} to a folder with room in which you can write"
            ) from error

    def _open(self, name: str, size: int, is_whole: Callable[[Path], bool], fill: Callable[[Path], None]) -> HeldFolder:
        root = self._folder / name
        lock = self._lock_file(name)
        try:
            self._wait_for(lock, fcntl.LOCK_SH)
            if not is_whole(root):
                with self._alone(name):
                    if not is_whole(root):  # no other process filled it first
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
        for stale in (partial, damaged):  # left by a process that ended while filling
            shutil.rmtree(stale, ignore_errors=True)
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
        """Remove unused entries until the new entry has room, and reserve the room. Raises Unreadable, Unavailable."""
        kind = self._kind
        what = f"the {kind.name}'s files are {size >> 20} MB, and "
        if size > self._max_bytes:
            raise Unreadable(f"{what}{self._folder} may hold {self._max_bytes >> 20} MB; raise {kind.size_variable}")
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
            free = self._free_bytes(self._folder)
            raise Unavailable(
                f"{what}the disk of {self._folder} has {free >> 20} MB free; set {kind.folder_variable} to a folder with room"
            )
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(size).encode(), 0)

    def _has_room(self, total: int, size: int) -> bool:
        return total + size <= self._max_bytes and size <= self._free_bytes(self._folder)

    def _remove(self, name: str) -> bool:
        """Remove an entry; return False when a process uses it."""
        lock = self._lock_file(name)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for suffix in ("", ".partial", ".damaged"):  # also those of a process that ended while filling
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
        """Acquire a lock. Polls, because a wait in the kernel has no deadline. Raises Unavailable."""
        deadline_s, pause_s = time.monotonic() + self._kind.wait_s, 0.005
        while True:
            try:
                fcntl.flock(lock, operation | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise Unavailable(
                        f"another process has been filling the {self._kind.name}'s folder for {self._kind.wait_s:g} s; "
                        "retry later"
                    ) from None
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.25)


FOLDER_VARIABLE = "PACELINE_SPOOL"
SIZE_VARIABLE = "PACELINE_SPOOL_MB"
DEFAULT_MB = 65_536


def spool_folder() -> Path:
    """Return the folder that PACELINE_SPOOL names, else `paceline/spool` in the user's cache. Raises OSError;
    Unreadable for a folder that others could change."""
    named = os.environ.get(FOLDER_VARIABLE)
    return own_folder(Path(named) if named else _in_user_cache("spool"), FOLDER_VARIABLE)


COMPILED_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def use_own_compiled_code() -> None:
    """Make torch keep the compiled code that it loads again in a folder of this user: by default in the user's cache,
    not in a folder for temporary files with a predictable name. Raises Unreadable, OSError as `spool_folder` does."""
    named = os.environ.get(COMPILED_VARIABLE)
    os.environ[COMPILED_VARIABLE] = str(
        own_folder(Path(named) if named else _in_user_cache("inductor"), COMPILED_VARIABLE)
    )


def quota_bytes() -> int:
    """Return the bytes of checkpoints that may wait for upload, from PACELINE_SPOOL_MB. Raises InvalidInput."""
    return bytes_by(SIZE_VARIABLE, DEFAULT_MB)


def _in_user_cache(name: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / name


MAX_DIGITS = 12


def bytes_by(variable: str, default_mb: int, *, least_mb: int = 1) -> int:
    """Return the bytes that a variable sets as a number of MB. Raises InvalidInput."""
    text = os.environ.get(variable) or str(default_mb)
    if not text.isdecimal() or len(text) > MAX_DIGITS or int(text) < least_mb:
        raise InvalidInput(f"{variable} is {text[:80]!r}; set it to a number of MB, of {MAX_DIGITS} digits at most")
    return int(text) << 20


HASHED_BYTES = 64 << 20
CHUNK_BYTES = 8 << 20
OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}
RECORD = ".copies.json"
"""Name of the file in a cached folder that has the stamp of each copy."""
_TAGS = ("version", "ETag", "etag", "md5Hash", "LastModified", "mtime", "created")

Entries = Mapping[str, Mapping[str, Any]]
"""Maps the name of a copy to a description of the store's file, as the store's `ls` gives it: `name`, `size` and a tag
or time."""


def open_copies(
    cache: BoundedCache,
    store: AbstractFileSystem,
    url: str,
    entries: Entries,
    key: StorageKey | None = None,
    hashed_bytes: int = HASHED_BYTES,
) -> HeldFolder:
    """Return the folder with current copies of `entries` (files of `url`). With a `key` the copies are encrypted, in a
    separate folder for that key. Raises Unavailable for a file that changes while it is copied, Unreadable for a
    file that cannot be fetched, other errors of the store's client, and the errors of `BoundedCache.open`."""
    version = [url, *((name, *_version(entry)) for name, entry in sorted(entries.items()))]
    version += [] if key is None else [key.name.hex()]
    digest = hashlib.sha256(json.dumps(version).encode()).hexdigest()[:32]
    size = sum(entry.get("size") or 0 for entry in entries.values())

    def fill(folder: Path) -> None:
        for name, entry in sorted(entries.items()):
            _fetch(store, entry["name"], folder / name, key)
            copied, expected = (folder / name).stat().st_size, entry.get("size")
            copied = copied if key is None else plain_size(copied)
            if expected is not None and copied != expected:
                raise Unavailable(
                    f"{copied} bytes of {name} arrived, but the store reported {expected} bytes; another process is "
                    "writing the file, or the connection broke: retry"
                )
        (folder / RECORD).write_text(json.dumps({name: _mark(folder / name, hashed_bytes) for name in entries}))

    return cache.open(digest, size, lambda folder: _is_whole(folder, set(entries), hashed_bytes), fill)


def _fetch(store: AbstractFileSystem, path: str, copy: Path, key: StorageKey | None) -> None:
    """Copy a file. Raises OSError for a fault of this machine's disk, and Unreadable for a fault of the store."""
    try:
        if key is None:
            store.get_file(path, str(copy))
            return
        with store.open(path, "rb") as source, encrypting(copy, key) as target:
            shutil.copyfileobj(source, target, CHUNK_BYTES)
    except OSError as error:
        if error.errno in OF_THE_DISK:
            raise
        raise Unreadable(f"{copy.name} cannot be fetched: {type(error).__name__}: {error}") from error


def _version(entry: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the size and the store's tag or time of a file; they differ when the file has changed."""
    marks = (entry.get(key) for key in _TAGS)
    return entry.get("size"), next((str(mark) for mark in marks if mark is not None), "")


def _mark(path: Path, hashed_bytes: int) -> list[int | str]:
    """Return a copy's stamp: size and content's digest, or for a large copy size and modification time."""
    status = path.stat()
    if status.st_size > hashed_bytes:
        return [status.st_size, status.st_mtime_ns]
    with path.open("rb") as file:
        return [status.st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _is_whole(folder: Path, names: set[str], hashed_bytes: int) -> bool:
    try:
        record = json.loads((folder / RECORD).read_bytes())
        return record.keys() == names and all(record[name] == _mark(folder / name, hashed_bytes) for name in names)
    except (OSError, ValueError, AttributeError):
        return False
