"""Copies of a store's files on this machine, in a bounded cache: one folder for each version of a set of files.

Promise: a copy has the size that the store gives for the file, and is checked whenever its folder is opened: by content up to
HASHED_BYTES, by size and time of the last change beyond, because hashing the weights of a large model takes minutes. A copy
that is damaged is fetched again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem

from paceline.encryption.encrypted_file import encrypting, plain_size
from paceline.encryption.storage_key import StorageKey
from paceline.errors import Unavailable, Unreadable
from paceline.files.bounded_cache import BoundedCache, HeldFolder

HASHED_BYTES = 64 << 20
CHUNK_BYTES = 8 << 20
OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}
RECORD = ".copies.json"
"""File of a folder with the mark of each copy."""
_TAGS = ("version", "ETag", "etag", "md5Hash", "LastModified", "mtime", "created")

Entries = Mapping[str, Mapping[str, Any]]
"""Files by the name of their copy, each as the store's `ls` or `info` describes it: `name`, `size` and a tag or time."""


def open_copies(
    cache: BoundedCache,
    store: AbstractFileSystem,
    url: str,
    entries: Entries,
    key: StorageKey | None = None,
) -> HeldFolder:
    """Return the folder with the copies of `entries`, which are files of `url`, as they are in the store now; encrypted
    with `key`, in a folder of that key. Raises Unavailable for a file that changes while it is copied, Unreadable for
    one that cannot be fetched, errors of the store's client that are no OSError, and as `BoundedCache.open`."""
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
                    f"{copied} bytes of {name} came, and the store said {expected}; somebody writes there now, or the "
                    "connection broke: trying again may help"
                )
        (folder / RECORD).write_text(json.dumps({name: _mark(folder / name) for name in entries}))

    return cache.open(digest, size, lambda folder: _is_whole(folder, set(entries)), fill)


def _fetch(store: AbstractFileSystem, path: str, copy: Path, key: StorageKey | None) -> None:
    """Copy a file. Raises OSError where this machine's disk refuses, Unreadable for the store's errors, which are OSErrors too."""
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
    """Return what changes when a file does: its size and whatever the store gives of tag and time."""
    marks = (entry.get(key) for key in _TAGS)
    return entry.get("size"), next((str(mark) for mark in marks if mark is not None), "")


def _mark(path: Path) -> list[int | str]:
    """Return what shows that a copy is as it was made."""
    status = path.stat()
    if status.st_size > HASHED_BYTES:
        return [status.st_size, status.st_mtime_ns]
    with path.open("rb") as file:
        return [status.st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _is_whole(folder: Path, names: set[str]) -> bool:
    try:
        record = json.loads((folder / RECORD).read_bytes())
        return record.keys() == names and all(record[name] == _mark(folder / name) for name in names)
    except (OSError, ValueError, AttributeError):
        return False
