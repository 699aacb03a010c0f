"""`BundleCache`: unpacked bundles in a bounded cache of this machine. Files are verified whenever a bundle is opened,
and a damaged bundle is fetched again. With a storage key, data files are encrypted; code stays plain for Python."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from paceline.bundle.manifest import BundledFile, Manifest
from paceline.encryption.encrypted_file import MAGIC, WrongKey, encrypting, is_encrypted, plaintext
from paceline.encryption.storage_key import StorageKey, storage_key
from paceline.errors import Unreadable
from paceline.files.bounded_cache import BoundedCache, CacheKind, HeldFolder

KIND = CacheKind("bundle", default_mb=16_384, wait_s=900.0)
Fetch = Callable[[BundledFile], Iterable[bytes]]


class BundleCache:
    def __init__(self, cache: BoundedCache):
        self._cache = cache

    @classmethod
    def of_user(cls) -> BundleCache:
        """Return the cache at PACELINE_BUNDLE_CACHE, default ~/.cache/paceline/bundles. Raises InvalidInput."""
        return cls(KIND.of_user("bundles"))

    def open(self, manifest: Manifest, fetch: Fetch) -> HeldFolder:
        """Return the files of `manifest` in a folder; `fetch` yields a file's content if the cache lacks the bundle.
        Raises the errors of `fetch` and `BoundedCache.open`; Unreadable also for a file with the wrong digest."""

        key = storage_key()

        def fill(folder: Path) -> None:
            for file in manifest.files:
                _write(folder / file.path, file, fetch(file), key)

        return self._cache.open(manifest.digest, manifest.size, lambda root: _is_whole(root, manifest, key), fill)


def _is_whole(root: Path, manifest: Manifest, key: StorageKey | None) -> bool:
    """Return whether every file has the manifest's digest and, if there is a key, every data file is encrypted."""
    return root.is_dir() and all(
        _digest_of(root / file.path, key is not None and file.kind == "data") == file.sha256 for file in manifest.files
    )


def _digest_of(path: Path, encrypted: bool) -> str:
    """Return the SHA-256 of a file's content; empty if it is unreadable, a link, or not `encrypted` as required."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as stored:
            if encrypted != is_encrypted(stored.peek(len(MAGIC))):
                return ""
            with plaintext(stored, str(path)) as file:
                return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    except (OSError, WrongKey):
        return ""


def _write(path: Path, file: BundledFile, chunks: Iterable[bytes], key: StorageKey | None) -> None:
    """Write `chunks` to a file. Raises Unreadable if the content's digest differs from the manifest's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    with path.open("xb") if key is None or file.kind != "data" else encrypting(path, key) as out:
        for chunk in chunks:
            size += len(chunk)
            if size > file.size:
                break
            digest.update(chunk)
            out.write(chunk)
    if size != file.size or digest.hexdigest() != file.sha256:
        raise Unreadable(
            f"the file {file.path!r} of the run's bundle arrived with {size} bytes and SHA-256 {digest.hexdigest()[:12]}…, not "
            f"{file.size} and {file.sha256[:12]}…; `paceline resume` on the submitter's machine sends it again"
        )
    path.chmod(0o444)
