"""`BundleCache`: unpacked bundles in a folder of this machine, whose size is bounded, for all processes of its user.

Each bundle has a folder and beside it a lock: a process that uses the folder holds the lock shared, one that makes or removes
it holds it alone. A bundle that nobody uses may be removed, the one that was used longest ago first. Files are checked
whenever a bundle is opened, and a damaged one is fetched again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from paceline.bundle.manifest import BundledFile, Manifest
from paceline.errors import InvalidInput, Unavailable, Unreadable

FOLDER_VARIABLE = "PACELINE_BUNDLE_CACHE"
SIZE_VARIABLE = "PACELINE_BUNDLE_CACHE_MB"
DEFAULT_MB = 16_384
LOCK_WAIT_S = 900.0
"""Seconds to wait for another process that unpacks the same bundle."""
Fetch = Callable[[BundledFile], Iterable[bytes]]


class Unpacked:
    """A bundle in a folder that stays until `close`."""

    def __init__(self, root: Path, lock: int):
        self.root = root
        self._lock: int | None = lock

    def close(self) -> None:
        """Allow the folder's removal."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Unpacked:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BundleCache:
    """Bundles in `folder`, `max_bytes` together."""

    def __init__(self, folder: Path, max_bytes: int):
        self._folder, self._max_bytes = folder, max_bytes

    @classmethod
    def of_user(cls) -> BundleCache:
        """Return the cache that the environment names, else `paceline/bundles` in the user's cache. Raises InvalidInput."""
        given = os.environ.get(FOLDER_VARIABLE)
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / "bundles"
        text = os.environ.get(SIZE_VARIABLE) or str(DEFAULT_MB)
        if not text.isdecimal() or not int(text):
            raise InvalidInput(f"{SIZE_VARIABLE} is {text!r}; set it to a number of MB")
        return cls(Path(given) if given else base, int(text) << 20)

    def open(self, manifest: Manifest, fetch: Fetch) -> Unpacked:
        """Return the files of `manifest` in a folder; `fetch` yields the content of those that are not there.

        Raises Unreadable: a file that does not have its digest, more than the cache may hold; Unavailable when bundles in use
        leave no room; errors of `fetch`.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            return self._open(manifest, fetch)
        except OSError as error:
            raise Unreadable(
                f"the bundle cannot be unpacked in {self._folder}: {error.strerror or error}; set {FOLDER_VARIABLE} to a folder "
                "with room in which you can write"
            ) from error

    def _open(self, manifest: Manifest, fetch: Fetch) -> Unpacked:
        root = self._folder / manifest.digest
        lock = os.open(self._lock_path(manifest.digest), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _wait_for(lock, fcntl.LOCK_SH)
            if not _is_whole(root, manifest):
                _wait_for(lock, fcntl.LOCK_EX)
                if not _is_whole(root, manifest):  # no other process was faster
                    self._make_room(manifest)
                    self._unpack(root, manifest, fetch)
                    os.ftruncate(lock, 0)
                    os.pwrite(lock, str(manifest.size).encode(), 0)
                _wait_for(lock, fcntl.LOCK_SH)
                if not root.is_dir():  # the change of a lock has a gap
                    raise Unavailable(
                        "another process has removed the unpacked bundle; trying again may help"
                    )
            os.utime(lock)
            return Unpacked(root, lock)
        except BaseException:
            os.close(lock)
            raise

    def _unpack(self, root: Path, manifest: Manifest, fetch: Fetch) -> None:
        partial = root.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(root, ignore_errors=True)
        partial.mkdir()
        try:
            for file in manifest.files:
                _write(partial / file.path, file, fetch(file))
            partial.replace(root)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _make_room(self, manifest: Manifest) -> None:
        """Remove bundles that nobody uses until this one has room. Raises Unreadable, Unavailable."""
        if manifest.size > self._max_bytes:
            raise Unreadable(
                f"the bundle's files are {manifest.size >> 20} MB, and {self._folder} may hold {self._max_bytes >> 20} MB; raise "
                f"{SIZE_VARIABLE}"
            )
        used: list[tuple[float, str, int]] = []
        for path in self._folder.glob("*.lock"):
            with contextlib.suppress(OSError, ValueError):
                used.append((path.stat().st_mtime, path.stem, int(path.read_text() or 0)))
        total = sum(size for _, digest, size in used if digest != manifest.digest)
        for _, digest, size in sorted(used):
            if total + manifest.size <= self._max_bytes:
                return
            if digest != manifest.digest and size and self._remove(digest):
                total -= size
        if total + manifest.size > self._max_bytes:
            raise Unavailable(
                f"the bundle's files are {manifest.size >> 20} MB, and bundles in use take {total >> 20} of the "
                f"{self._max_bytes >> 20} MB of {self._folder}; raise {SIZE_VARIABLE}"
            )

    def _remove(self, digest: str) -> bool:
        """Remove a bundle; return False when a process uses it."""
        lock = os.open(self._lock_path(digest), os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self._folder / digest, ignore_errors=True)
            os.ftruncate(lock, 0)
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(lock)

    def _lock_path(self, digest: str) -> Path:
        return self._folder / f"{digest}.lock"


def _wait_for(lock: int, kind: int) -> None:
    """Take a lock. Polls, because a wait in the kernel has no deadline. Raises Unavailable."""
    deadline_s, pause_s = time.monotonic() + LOCK_WAIT_S, 0.005
    while True:
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise Unavailable(f"another process has unpacked the bundle for {LOCK_WAIT_S:g} s") from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.25)


def _is_whole(root: Path, manifest: Manifest) -> bool:
    """Return whether every file is there with its digest."""
    return root.is_dir() and all(_digest_of(root / file.path) == file.sha256 for file in manifest.files)


def _digest_of(path: Path) -> str:
    """Return the SHA-256 of a file; empty for what cannot be read, and for a link."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _write(path: Path, file: BundledFile, chunks: Iterable[bytes]) -> None:
    """Write a file. Raises Unreadable when its content does not have its digest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as out:
        for chunk in chunks:
            size += len(chunk)
            if size > file.size:
                break
            digest.update(chunk)
            out.write(chunk)
    if size != file.size or digest.hexdigest() != file.sha256:
        raise Unreadable(
            f"the file {file.path!r} of the run's bundle came with {size} bytes and SHA-256 {digest.hexdigest()[:12]}…, not "
            f"{file.size} and {file.sha256[:12]}…; `paceline resume` on the submitter's machine sends it again"
        )
    path.chmod(0o444)
