"""Streams of parts: in order, complete, with the digest; what a broken one has sent stays."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from paceline.encryption.storage_key import StorageKey
from paceline.errors import Conflict, InvalidInput
from paceline.services.coordinator.blobs import CHUNK_BYTES, BlobStore
from paceline.services.coordinator.bundle_servicer import Upload

DATA = b"0123456789"
DIGEST = hashlib.sha256(DATA).hexdigest()


def test_a_broken_stream_goes_on_where_it_ended(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    broken = Upload(store)
    broken.take(DIGEST, 10, 0, DATA[:4])
    with pytest.raises(Conflict, match="ended at byte 4 of 10"):
        broken.finish()
    broken.close()
    broken.close()
    assert (store.has(DIGEST), store.received(DIGEST)) == (False, 4)
    upload = Upload(store)
    upload.take(DIGEST, 10, 4, DATA[4:])
    upload.take(DIGEST, 10, 0, DATA)  # is there already
    upload.finish()
    assert upload.num_blobs == 1
    assert b"".join(store.read(DIGEST)) == DATA


def test_content_without_its_digest_is_removed(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    upload = Upload(store)
    with pytest.raises(InvalidInput, match="changed during the transfer, or damaged"):
        upload.take(DIGEST, 10, 0, b"x" * 10)
    upload.close()
    assert (store.has(DIGEST), store.received(DIGEST)) == (False, 0)
    again = Upload(store)
    again.take(DIGEST, 10, 0, DATA)
    assert store.has(DIGEST)


@pytest.mark.parametrize("rest", [DATA[:3] + b"?", b"?" * 20])
def test_a_damaged_part_of_a_broken_stream_is_sent_again(tmp_path: Path, rest: bytes) -> None:
    store = BlobStore(tmp_path)
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / DIGEST).write_bytes(rest)
    while missing := store.missing({DIGEST: 10}):
        upload, offset = Upload(store), missing[DIGEST]
        if offset:
            with pytest.raises(Conflict, match="request the list of missing files again"):
                upload.take(DIGEST, 10, offset, DATA[offset:])
        else:
            upload.take(DIGEST, 10, 0, DATA)
        upload.close()
    assert b"".join(store.read(DIGEST)) == DATA


def test_parts_that_do_not_follow_each_other_are_refused(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    for offset, size, data in ((5, 10, b"x"), (4, 11, b"x"), (4, 10, b"x" * 7)):
        upload = Upload(store)
        upload.take(DIGEST, 10, store.received(DIGEST), DATA[store.received(DIGEST) : 4])
        with pytest.raises(InvalidInput, match="the next part has to begin at byte 4 of 10"):
            upload.take(DIGEST, size, offset, data)
        upload.close()
    with pytest.raises(InvalidInput, match="at most"):
        Upload(store).take(DIGEST, 1 << 30, 0, b"x" * (CHUNK_BYTES + 1))
    incomplete = Upload(store)
    incomplete.take(DIGEST, 10, 4, b"")
    with pytest.raises(Conflict, match="ended at byte 4"):
        incomplete.take("ab" * 32, 1, 0, b"x")
    incomplete.close()


def test_a_broken_stream_of_an_encrypted_file_begins_anew_and_leaves_nothing(
    tmp_path: Path, given_key: StorageKey
) -> None:
    store = BlobStore(tmp_path)
    broken = Upload(store)
    broken.take(DIGEST, 10, 0, DATA[:4])
    broken.close()
    assert (store.has(DIGEST), store.received(DIGEST)) == (False, 0)
    assert not list((tmp_path / "partial").iterdir())
    (tmp_path / "partial" / DIGEST).write_bytes(b"012")  # of a coordinator that was killed
    upload = Upload(store)
    upload.take(DIGEST, 10, 0, DATA)
    upload.finish()
    assert b"".join(store.read(DIGEST)) == DATA
