"""`BlobStore` keeps complete files in `blobs/ab/cdef…`, named by their SHA-256, and incomplete ones in
`blobs/partial/`.

A file gets its name only after its digest was checked and it was synced. With a storage key all files are encrypted,
incomplete ones too; an encrypted transfer that breaks begins anew. Methods that read or write much block, so call them
on threads. One task at a time adds to a file; `bundle_servicer.py` ensures that.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

from paceline.bundle.manifest import MAX_BYTES, Manifest, is_digest
from paceline.encryption.encrypted_file import WrongKey, encrypting, plaintext
from paceline.encryption.storage_key import storage_key
from paceline.errors import Busy, Conflict, InvalidInput, NotFound
from paceline.files.whole_file import sync_folder
from paceline.host.regular_file import open_regular

CHUNK_BYTES = 1 << 20
QUOTA_BYTES = 64 << 30
MAX_BLOB_BYTES = 8 << 30
FULL_S = 60.0
"""Seconds after which a client may retry an upload that did not fit."""
VERIFIED_BYTES = 2 << 30
"""A request for missing files reads at most this many bytes to verify files of the right size. After that, it reads
only files of `_suspects`."""
UNUSED_S = 3600.0
"""Seconds for which a file that no run refers to is kept, because the submission of its run may still arrive."""


class BlobStore:
    """Files below `folder`: `max_blob_bytes` each, `quota_bytes` together at most; `min_free_bytes` stay free on
    disk."""

    def __init__(
        self,
        folder: Path,
        *,
        quota_bytes: int = QUOTA_BYTES,
        max_blob_bytes: int = MAX_BLOB_BYTES,
        min_free_bytes: int = 0,
    ):
        self._folder, self._partial = folder, folder / "partial"
        self._quota_bytes, self._max_blob_bytes = quota_bytes, max_blob_bytes
        self._min_free_bytes = min_free_bytes
        self._key = storage_key()
        self._lock = threading.Lock()
        """Guards `_used` and `_sent`."""
        self._used: int | None = None
        """Bytes of all files. A file in transfer counts with its full size. None until the files are counted."""
        self._sent: dict[str, int] = {}
        """Full size in bytes of each file in transfer, by SHA-256."""
        self._verified: dict[str, int] = {}
        """Bytes of each file whose content was verified, by SHA-256; emptied when damage is found."""
        self._suspects: set[str] = set()
        """Files that the store had when another file was found damaged, and that were not verified since then."""

    def has(self, sha256: str) -> bool:
        """Return whether the store has a complete file, and set its time of use to now, so that it is not removed
        soon."""
        path = self._path(sha256)
        if not path.is_file():
            return False
        with contextlib.suppress(OSError):  # a store that is only read
            os.utime(path)
        return True

    def missing(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the files that the store lacks, each with the offset at which its transfer continues. `sizes` has the
        bytes of the requested files by SHA-256. Files are read first, and damaged ones are removed, so that one
        request names all files that have to be sent again. Raises InvalidInput for a wrong size of an undamaged file.
        Call it from one task at a time, so that no two requests read the same files."""
        left = VERIFIED_BYTES
        for sha256 in sorted(filter(self.has, sizes), key=lambda each: sizes[each]):
            try:
                with self._open(sha256) as file:
                    size = file.seek(0, os.SEEK_END)
                if self._verified.get(sha256) != size:
                    if size == sizes[sha256] and sha256 not in self._suspects:
                        left -= size
                        if left < 0:
                            continue
                    for _ in self.read(sha256):
                        pass
                if size != sizes[sha256]:
                    raise InvalidInput(
                        f"the file {sha256[:12]}… has {size} bytes, but the request says {sizes[sha256]}; submit again"
                    )
            except NotFound:
                continue
            except WrongKey:
                if self._key is None:
                    raise
                _remove(self._path(sha256))  # its first bytes are damaged, because the ledger has this key
        return {
            sha256: received if (received := self.received(sha256)) <= size else 0
            for sha256, size in sizes.items()
            if not self.has(sha256)
        }

    def received(self, sha256: str) -> int:
        """Return the number of bytes that arrived before a transfer broke off; the next transfer continues from
        there."""
        _check_digest(sha256)
        if self._key is not None:
            return 0
        try:
            status = (self._partial / sha256).lstat()
        except OSError:  # also one that another task has completed or removed
            return 0
        return status.st_size if stat.S_ISREG(status.st_mode) else 0

    def begin(self, sha256: str, size: int, offset: int) -> None:
        """Reserve the bytes of a partial file until `end`. Raises InvalidInput for a file that is too large; Busy if
        the quota or the free space is too small for it; Conflict if another client sends the file, or if the file
        does not continue at `offset`."""
        _check_digest(sha256)
        if size > self._max_blob_bytes:
            raise InvalidInput(
                f"a file of {size / 2**20:.1f} MB is larger than the {self._max_blob_bytes / 2**20:.0f} MB that this coordinator "
                "accepts for one file; give the data as a URL"
            )
        with self._lock:
            if sha256 in self._sent:
                raise Conflict(
                    f"another client is sending the file {sha256[:12]}…; request the list of missing files again"
                )
            self._partial.mkdir(parents=True, exist_ok=True)
            if not 0 < self.received(sha256) <= size:
                _remove(self._partial / sha256)
            received = self.received(sha256)
            if offset != received:
                raise Conflict(
                    f"the file {sha256[:12]}… continues at byte {received}, not {offset}; request the list of missing files again"
                )
            self._refuse_beyond_quota(size, received)
            free, needed = shutil.disk_usage(self._partial).free, size - received
            if free - needed < self._min_free_bytes:
                raise Busy(
                    f"the coordinator's disk has {free >> 20} MB free, of which --min-free-mb keeps {self._min_free_bytes >> 20}: "
                    f"{needed / 2**20:.1f} MB of the run's files do not fit; free some space, and submit again",
                    FULL_S,
                )
            self._used = (self._used or 0) + needed
            self._sent[sha256] = size

    def open_partial(self, sha256: str) -> IO[bytes]:
        """Open a partial file, whose bytes `begin` has reserved, to append to it."""
        if self._key is None:
            return (self._partial / sha256).open("ab")
        return encrypting(self._partial / sha256, self._key)

    def _refuse_beyond_quota(self, size: int, received: int) -> None:
        if self._used is None:
            self._used = sum(found for _, found, _ in self._entries())
        if self._used + size - received > self._quota_bytes:
            raise Busy(
                f"the files of runs take {self._used / 2**20:.1f} MB of this coordinator's {self._quota_bytes / 2**20:.0f} MB, "
                f"and {size / 2**20:.1f} MB more do not fit; give large data as a URL, or start the coordinator "
                "with a larger --bundle-quota-mb",
                FULL_S,
            )

    def end(self, sha256: str) -> None:
        """Release the bytes that `begin` reserved; an incomplete file stays."""
        with self._lock:
            size = self._sent.pop(sha256, None)
            if size is not None and self._used is not None and not self._path(sha256).exists():
                self._used -= size - self.received(sha256)
            if self._key is not None:
                (self._partial / sha256).unlink(missing_ok=True)

    def complete(self, sha256: str, size: int) -> None:
        """Sync a partial file and give it its name. Raises InvalidInput, and removes it, if size or digest differ."""
        partial, path = self._partial / sha256, self._path(sha256)
        with partial.open("rb") as stored, plaintext(stored, str(partial)) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
            found_size = file.tell()
            if found == sha256 and found_size == size:
                os.fsync(stored.fileno())
        if found != sha256 or found_size != size:
            partial.unlink(missing_ok=True)
            raise InvalidInput(
                f"the file that was sent as {sha256[:12]}… ({size} bytes) has SHA-256 {found[:12]}… ({found_size} bytes): it "
                "was changed during the transfer, or damaged; submit again"
            )
        if not path.parent.is_dir():
            _remove(path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            _remove(path)
        partial.replace(path)
        sync_folder(path.parent)
        sync_folder(self._folder)
        self._verified[sha256] = size

    def read(self, sha256: str, offset: int = 0, length: int = 0) -> Iterator[bytes]:
        """Yield a range of a file in chunks; `length` 0 means up to the end. If the whole file is read, it is checked:
        a damaged file is removed, and the reader gets NotFound. Raises NotFound, WrongKey."""
        digest = hashlib.sha256() if offset == 0 and length == 0 else None
        is_damaged = False
        with self._open(sha256) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(min(offset, size))
            left = length or -1
            try:
                while left and (chunk := file.read(min(CHUNK_BYTES, left) if left > 0 else CHUNK_BYTES)):
                    left -= len(chunk) if left > 0 else 0
                    if digest is not None:
                        digest.update(chunk)
                    yield chunk
            except (WrongKey, OSError):  # the file could be opened, so the key is the right one
                is_damaged = True
        if is_damaged or (digest is not None and digest.hexdigest() != sha256):
            _remove(self._path(sha256))
            if sha256 not in self._suspects:  # the cause of the damage may have damaged other files too
                self._verified, self._suspects = {}, {path.parent.name + path.name for path, _, _ in self._entries()}
            self._suspects.discard(sha256)
            raise NotFound(_gone(sha256))
        if digest is not None:
            self._verified[sha256] = size
            self._suspects.discard(sha256)

    def _open(self, sha256: str) -> IO[bytes]:
        path = self._path(sha256)
        try:
            return plaintext(open_regular(path), str(path))
        except OSError:
            raise NotFound(_gone(sha256)) from None

    def manifest(self, sha256: str) -> Manifest:
        """Return the manifest that names a bundle. Raises NotFound, InvalidInput."""
        if not self.has(sha256):
            raise NotFound(_gone(sha256))
        with self._open(sha256) as file:
            size = file.seek(0, os.SEEK_END)
        if size > MAX_BYTES:
            raise InvalidInput(f"the file {sha256[:12]}… is not the manifest of a bundle; submit again")
        return Manifest.read(b"".join(self.read(sha256)))

    def remove_unused(self, bundles: Iterable[str], unused_s: float = UNUSED_S) -> int:
        """Remove the files that no bundle needs and that were not used for `unused_s` seconds; return their number. If
        the manifest of a bundle cannot be read, nothing is removed, because the bundle's files are then unknown."""
        needed = set(bundles)
        try:
            for digest in sorted(needed):
                needed |= {file.sha256 for file in self.manifest(digest).files}
        except (NotFound, InvalidInput, OSError):
            return 0
        removed, before_s = 0, time.time() - unused_s
        for path, _, used_s in self._entries():
            name = path.name if path.parent == self._partial else path.parent.name + path.name
            if name not in needed and name not in self._sent and used_s < before_s:
                path.unlink(missing_ok=True)
                removed += 1
        with self._lock:
            self._used = None if removed and not self._sent else self._used
        return removed

    def _entries(self) -> Iterator[tuple[Path, int, float]]:
        """Yield path, bytes and time of the last use of all files, partial ones included."""
        for folder in self._folder.iterdir() if self._folder.is_dir() else ():
            for path in folder.iterdir() if folder.is_dir() else ():
                with contextlib.suppress(OSError):  # removed by another task
                    status = path.stat()
                    yield path, status.st_size, status.st_mtime

    def _path(self, sha256: str) -> Path:
        _check_digest(sha256)
        return self._folder / sha256[:2] / sha256[2:]


def _remove(path: Path) -> None:
    """Remove a file, a folder or a link, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _check_digest(sha256: str) -> None:
    if not is_digest(sha256):
        raise InvalidInput(f"{sha256[:80]!r} is not a SHA-256 in hexadecimal")


def _gone(sha256: str) -> str:
    return f"the coordinator lacks the complete file {sha256[:12]}…; `paceline resume` on the submitter's machine sends it again"
