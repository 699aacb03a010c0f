"""Copies of an object store's files: complete, verified, one folder for each version."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from paceline.encryption.encrypted_file import decrypt
from paceline.encryption.storage_key import StorageKey
from paceline.errors import Unavailable, Unreadable
from paceline.files.bounded_cache import HASHED_BYTES, BoundedCache, CacheKind, open_copies


class Copies:
    """Copies of two files in memory, in a cache of the test's folder."""

    def __init__(self, folder: Path) -> None:
        self.store = fsspec.filesystem("memory")
        self.folder = f"/{uuid4().hex}"
        self.cache = BoundedCache(folder, 1 << 20, CacheKind("data", 1, 1))
        self.put("a", b"first")
        self.put("b", b"second")

    def put(self, name: str, data: bytes) -> None:
        self.store.pipe_file(f"{self.folder}/{name}", data)

    def open(self, key: StorageKey | None = None, hashed_bytes: int = HASHED_BYTES, **wrong: Any) -> Path:
        entries = {name: self.store.info(f"{self.folder}/{name}") | wrong for name in ("a", "b")}
        with open_copies(self.cache, self.store, f"memory:/{self.folder}", entries, key, hashed_bytes) as held:
            return held.root


@pytest.fixture
def copies(tmp_path: Path) -> Copies:
    return Copies(tmp_path)


def test_a_version_is_copied_once(copies: Copies) -> None:
    root = copies.open()
    times = [(root / name).stat().st_ctime_ns for name in ("a", "b")]
    assert copies.open() == root
    assert [(root / name).stat().st_ctime_ns for name in ("a", "b")] == times
    copies.put("b", b"changed")
    assert (copies.open() / "b").read_bytes() == b"changed"
    assert (root / "b").read_bytes() == b"second"


@pytest.mark.parametrize("hashed_bytes", [0, 1 << 20])
def test_a_damaged_copy_is_made_again(copies: Copies, hashed_bytes: int) -> None:
    root = copies.open(hashed_bytes=hashed_bytes)
    (root / "a").write_bytes(b"f1rst")
    assert (copies.open(hashed_bytes=hashed_bytes) / "a").read_bytes() == b"first"
    (root / "b").unlink()
    assert (copies.open(hashed_bytes=hashed_bytes) / "b").read_bytes() == b"second"


def test_a_file_of_another_size_than_the_store_reported_is_refused(copies: Copies, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"5 bytes of a arrived, but the store reported 3 bytes;"):
        copies.open(size=3)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    assert (copies.open(size=None) / "a").read_bytes() == b"first"  # a store that gives no size


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            PermissionError("Access Denied"),
            r"^a cannot be fetched: PermissionError: Access Denied",
        ),
        (TimeoutError("slow"), r"^a cannot be fetched: TimeoutError: slow"),
        (OSError(errno.ENOSPC, "No space left on device"), "cannot be kept in .*No space left on device"),
    ],
)
def test_faults_of_the_store_and_of_the_disk_have_different_errors(
    copies: Copies, error: OSError, message: str
) -> None:
    class Failing(MemoryFileSystem):
        cachable = False

        def get_file(self, *_: object, **__: object) -> None:
            raise error

    copies.store = Failing()
    with pytest.raises(Unreadable, match=message):
        copies.open()


def test_copies_are_encrypted_with_a_key_beside_those_without(copies: Copies, given_key: StorageKey) -> None:
    plain, encrypted = copies.open(), copies.open(given_key)
    assert plain != encrypted
    assert decrypt((encrypted / "b").read_bytes(), given_key, "b") == b"second"
    before = (encrypted / "b").stat().st_ctime_ns
    assert copies.open(given_key) == encrypted
    assert (encrypted / "b").stat().st_ctime_ns == before
    with pytest.raises(Unavailable, match="bytes of a arrived"):
        copies.open(given_key, size=99)
