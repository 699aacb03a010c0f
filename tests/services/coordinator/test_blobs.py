"""The store of files: complete or absent, within its quota, kept while a run refers to them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.bundle.manifest import BundledFile, Manifest
from paceline.encryption.encrypted_file import WrongKey
from paceline.encryption.storage_key import KEY_VARIABLE, StorageKey
from paceline.errors import Busy, Conflict, InvalidInput, NotFound
from paceline.services.coordinator.blobs import BlobStore
from paceline.services.coordinator.bundle_servicer import Upload


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def put(store: BlobStore, data: bytes) -> str:
    upload = Upload(store)
    upload.take(sha(data), len(data), 0, data)
    upload.finish()
    upload.close()
    return sha(data)


def test_files_are_read_whole_and_by_ranges(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    digest = put(store, b"0123456789")
    assert (tmp_path / digest[:2] / digest[2:]).is_file()
    assert b"".join(store.read(digest)) == b"0123456789"
    assert b"".join(store.read(digest, 3, 4)) == b"3456"
    assert b"".join(store.read(digest, 8)) == b"89"
    assert b"".join(store.read(digest, 99)) == b""
    assert put(store, b"") == sha(b"")
    assert list(store.read(sha(b""))) == []


@pytest.mark.parametrize("digest", ["../../etc/passwd", "AB" * 32, "", "ab" * 31 + "a\n"])
def test_names_that_are_no_digest_are_refused(tmp_path: Path, digest: str) -> None:
    for call in (
        BlobStore(tmp_path).has,
        BlobStore(tmp_path).received,
        lambda d: list(BlobStore(tmp_path).read(d)),
    ):
        with pytest.raises(InvalidInput, match="not a SHA-256"):
            call(digest)


def test_a_damaged_file_is_removed_so_that_it_is_sent_again(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    digest = put(store, b"0123456789")
    (tmp_path / digest[:2] / digest[2:]).write_bytes(b"012345678X")
    with pytest.raises(NotFound, match="paceline resume"):
        list(store.read(digest))
    assert not store.has(digest)


def test_all_damaged_and_missing_files_are_named_at_once(tmp_path: Path) -> None:
    contents = [b"%d" % number * 100 for number in range(9)]
    sizes = {sha(content): len(content) for content in contents}
    digests = list(sizes)
    for content in contents:
        put(BlobStore(tmp_path), content)
    paths = [tmp_path / digest[:2] / digest[2:] for digest in digests]
    paths[0].write_bytes(b"")
    paths[1].write_bytes(b"?" * 100)
    paths[2].write_bytes(contents[2] + b"?")
    paths[3].unlink()
    paths[4].unlink()
    paths[4].mkdir()
    paths[5].unlink()
    paths[5].symlink_to("/dev/zero")
    paths[6].unlink()
    os.mkfifo(paths[6])
    paths[7].unlink()
    paths[7].parent.rmdir()
    paths[7].parent.write_text("no folder")
    store = BlobStore(tmp_path)
    assert store.missing(sizes) == dict.fromkeys(digests[:8], 0)
    for content in contents:
        put(store, content)
    assert store.missing(sizes) == {}
    assert [b"".join(store.read(digest)) for digest in digests] == contents


def test_large_files_are_read_only_after_damage_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.services.coordinator.blobs.VERIFIED_BYTES", 5)
    contents = [b"0123", b"01234567", b"012345678"]
    sizes = {sha(content): len(content) for content in contents}
    paths = [tmp_path / digest[:2] / digest[2:] for digest in sizes]
    for content in contents:
        put(BlobStore(tmp_path), content)
    for path, content in zip(paths[1:], contents[1:], strict=True):
        path.write_bytes(b"?" * len(content))
    store = BlobStore(tmp_path)
    assert store.missing(sizes) == {}
    with pytest.raises(NotFound):
        list(store.read(sha(contents[1])))
    assert store.missing({sha(contents[0]): 4}) == {}  # a request of another run
    assert list(store.missing(sizes)) == [sha(content) for content in contents[1:]]
    for content in contents:
        put(store, content)
    assert store.missing(sizes) == {}  # all are verified now
    for content in contents[1:]:
        store._verified.pop(sha(content))
    paths[2].write_bytes(b"?" * 9)
    assert store.missing(sizes) == {}


def test_a_wrong_size_removes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlobStore(tmp_path)
    digest = put(store, b"0123456789")
    for each in (store, BlobStore(tmp_path)):
        for size in (0, 9, 1 << 40):
            with pytest.raises(InvalidInput, match="has 10 bytes"):
                each.missing({digest: size})
    assert b"".join(store.read(digest)) == b"0123456789"
    monkeypatch.setattr(store, "read", None)
    with pytest.raises(InvalidInput, match="has 10 bytes"):
        store.missing({digest: 9})  # without another reading


def test_damage_makes_every_file_be_read_once_again(tmp_path: Path) -> None:
    class CountingStore(BlobStore):
        def __init__(self, folder: Path):
            super().__init__(folder)
            self.reads = 0

        def read(self, sha256: str, offset: int = 0, length: int = 0) -> Iterator[bytes]:
            self.reads += 1
            return super().read(sha256, offset, length)

    contents = [b"%d" % number * 9 for number in range(8)]
    sizes = {sha(content): len(content) for content in contents}
    for content in contents:
        put(BlobStore(tmp_path), content)
    for content in contents[2:7:2]:
        (tmp_path / sha(content)[:2] / sha(content)[2:]).write_bytes(b"?" * 9)
    store = CountingStore(tmp_path)
    assert list(store.missing(sizes)) == [sha(content) for content in contents[2:7:2]]
    assert store.reads == 8
    for _ in range(2):
        store.missing(sizes)
        assert store.reads == 8 + 2  # the two that were verified before the damage was found


def test_a_partial_file_that_is_none_or_vanishes_has_received_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, digest, other = BlobStore(tmp_path / "blobs"), sha(b"abc"), tmp_path / "other"
    other.write_text("x")
    partial = tmp_path / "blobs" / "partial" / digest
    partial.parent.mkdir(parents=True)
    partial.symlink_to(other)
    assert store.received(digest) == 0
    put(store, b"abc")
    assert other.read_text() == "x"
    monkeypatch.setattr(Path, "is_file", lambda path: True)  # it was there a moment ago
    assert store.received(digest) == 0


def test_with_a_key_a_damaged_beginning_is_sent_again(tmp_path: Path, given_key: StorageKey) -> None:
    store = BlobStore(tmp_path)
    digest = put(store, b"0123456789")
    path = tmp_path / digest[:2] / digest[2:]
    whole = path.read_bytes()
    for index in range(0, len(whole), 3):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
        assert list(BlobStore(tmp_path).missing({digest: 10})) == [digest], index


def test_quota_and_size_are_limits_before_a_byte_is_written(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, quota_bytes=25, max_blob_bytes=20)
    put(store, b"x" * 10)
    with pytest.raises(InvalidInput, match="larger than the 0 MB that this coordinator accepts"):
        put(store, b"y" * 21)
    store.begin(sha(b"z" * 10), 10, 0)
    assert not (tmp_path / "partial" / sha(b"z" * 10)).exists()
    with pytest.raises(Busy, match="--bundle-quota-mb"):
        put(store, b"y" * 6)
    store.end(sha(b"z" * 10))  # nothing of it came
    put(store, b"y" * 15)
    with pytest.raises(Busy, match="--bundle-quota-mb"):
        put(BlobStore(tmp_path, quota_bytes=25), b"z")  # counted anew after a restart
    with pytest.raises(Busy, match="free, of which --min-free-mb keeps"):
        put(BlobStore(tmp_path, min_free_bytes=1 << 60), b"z")


def test_one_client_sends_a_file_at_a_time(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    store.begin(sha(b"abc"), 3, 0)
    with pytest.raises(Conflict, match="another client"):
        store.begin(sha(b"abc"), 3, 0)
    store.end(sha(b"abc"))
    with pytest.raises(Conflict, match="continues at byte 0, not 2"):
        store.begin(sha(b"abc"), 3, 2)


def test_unused_files_are_removed_after_a_while(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    used, unused, fresh = put(store, b"used"), put(store, b"unused"), put(store, b"fresh")
    manifest = Manifest.of([BundledFile("a", "code", 4, used)])
    bundle = put(store, manifest.text)
    for digest in (used, unused, bundle):
        os.utime(tmp_path / digest[:2] / digest[2:], (1, 1))
    (tmp_path / "partial" / ("ab" * 32)).write_bytes(b"abc")
    os.utime(tmp_path / "partial" / ("ab" * 32), (1, 1))
    assert store.remove_unused(["cd" * 32]) == 0  # a bundle whose files are unknown
    assert store.remove_unused([bundle]) == 2
    assert [store.has(digest) for digest in (used, unused, fresh, bundle)] == [True, False, True, True]
    assert store.manifest(bundle) == manifest
    with pytest.raises(InvalidInput, match="manifest"):
        store.manifest(used)
    with pytest.raises(NotFound):
        store.manifest(unused)


def test_encrypted_files_are_read_whole_and_by_ranges(tmp_path: Path, given_key: StorageKey) -> None:
    store = BlobStore(tmp_path)
    data = b"0123456789" * 30_000
    digest = put(store, data)
    assert data[:50] not in (tmp_path / digest[:2] / digest[2:]).read_bytes()
    assert b"".join(store.read(digest)) == data
    assert b"".join(store.read(digest, 65_530, 20)) == data[65_530:65_550]
    bundle = put(store, Manifest.of([BundledFile("a", "data", len(data), digest)]).text)
    assert store.manifest(bundle).files[0].sha256 == digest


def test_a_file_of_another_key_is_named_and_stays(
    tmp_path: Path, given_key: StorageKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = put(BlobStore(tmp_path), b"0123456789")
    monkeypatch.setenv(KEY_VARIABLE, os.urandom(32).hex())
    with pytest.raises(WrongKey, match=f"encrypted with the key {given_key.name.hex()}"):
        list(BlobStore(tmp_path).read(digest))
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(WrongKey, match="no key is given"):
        list(BlobStore(tmp_path).read(digest))
    assert BlobStore(tmp_path).has(digest)


def test_a_damaged_encrypted_file_is_removed_so_that_it_is_sent_again(tmp_path: Path, given_key: StorageKey) -> None:
    store = BlobStore(tmp_path)
    digest = put(store, b"0123456789")
    path = tmp_path / digest[:2] / digest[2:]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(NotFound, match="paceline resume"):
        list(store.read(digest))
    assert not store.has(digest)
