"""An encrypted file can be read from any position; every change, cut and other key is detected."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.encryption.encrypted_file import (
    CHUNK_BYTES,
    HEADER_BYTES,
    SEALED_BYTES,
    EncryptingWriter,
    WrongKey,
    decrypt,
    decrypting,
    encrypt,
    encrypted_size,
    encrypting,
    is_encrypted,
    plain_size,
    plaintext,
)
from paceline.encryption.storage_key import StorageKey

KEY = StorageKey(bytes(range(32)))
SIZES = [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES, 3 * CHUNK_BYTES + 17]


@pytest.mark.parametrize("size", SIZES)
def test_plaintext_is_read_back(size: int) -> None:
    data = os.urandom(size)
    sealed = encrypt(data, KEY)
    assert is_encrypted(sealed)
    assert len(sealed) == encrypted_size(size)
    assert plain_size(len(sealed)) == size
    assert decrypt(sealed, KEY, "f") == data


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, CHUNK_BYTES + 9), max_size=5), st.data())
def test_pieces_are_written_in_any_size_and_read_from_any_position(pieces: list[int], draw: st.DataObject) -> None:
    data = os.urandom(sum(pieces))
    target = io.BytesIO()
    with EncryptingWriter(target, KEY) as writer:
        start = 0
        for size in pieces:
            writer.write(memoryview(data)[start : start + size])
            start += size
    with decrypting(target, KEY, "f") as reader:
        for _ in range(4):
            at = draw.draw(st.integers(0, len(data) + 3))
            size = draw.draw(st.integers(0, 2 * CHUNK_BYTES))
            assert reader.seek(at) == at
            assert reader.read(size) == data[at : at + size]


def test_two_files_of_the_same_text_share_nothing() -> None:
    first, second = encrypt(b"the same prompt" * 99, KEY), encrypt(b"the same prompt" * 99, KEY)
    assert first[16:48] != second[16:48]
    assert first[HEADER_BYTES:] != second[HEADER_BYTES:]
    assert b"prompt" not in first


@pytest.mark.parametrize("size", [0, 5, CHUNK_BYTES + 5])
def test_each_changed_byte_is_found(size: int) -> None:
    sealed = encrypt(os.urandom(size), KEY)
    for at in {0, 9, 17, HEADER_BYTES - 1, HEADER_BYTES, len(sealed) // 2, len(sealed) - 1}:
        changed = bytearray(sealed)
        changed[at] ^= 1
        with pytest.raises(WrongKey):
            decrypt(bytes(changed), KEY, "f")


@pytest.mark.parametrize(
    "left",
    [0, 7, HEADER_BYTES, HEADER_BYTES + 8, HEADER_BYTES + SEALED_BYTES, HEADER_BYTES + 2 * SEALED_BYTES],
)
def test_a_file_that_was_cut_off_is_found(left: int) -> None:
    sealed = encrypt(os.urandom(3 * CHUNK_BYTES), KEY)
    with pytest.raises(WrongKey, match="cut off"):
        decrypt(sealed[:left], KEY, "f")


def test_chunks_that_changed_places_are_found() -> None:
    sealed = encrypt(bytes(3 * CHUNK_BYTES), KEY)
    first, second = HEADER_BYTES, HEADER_BYTES + SEALED_BYTES
    swapped = (
        sealed[:first] + sealed[second : second + SEALED_BYTES] + sealed[first:second] + sealed[second + SEALED_BYTES :]
    )
    with pytest.raises(WrongKey, match="chunk 0"):
        decrypt(swapped, KEY, "f")


def test_another_key_and_no_key_are_refused_by_name() -> None:
    sealed, other = encrypt(b"x", KEY), StorageKey(os.urandom(32))
    with pytest.raises(
        WrongKey, match=f"file-a is encrypted with the key {KEY.name.hex()}, not with {other.name.hex()}"
    ):
        decrypt(sealed, other, "file-a")
    with pytest.raises(
        WrongKey,
        match="no key is given; give the key with which the file was written, by PACELINE_STORAGE_KEY_FILE",
    ):
        decrypt(sealed, None, "file-a")
    with pytest.raises(WrongKey, match="is not an encrypted file"):
        decrypt(b"plain text of some length, which is no file of ours", KEY, "file-a")


def test_the_position_of_a_writer_is_that_of_the_plaintext() -> None:
    target = io.BytesIO()
    with EncryptingWriter(target, KEY) as writer:
        for size in (5, CHUNK_BYTES, 3 * CHUNK_BYTES, 0):
            before = writer.tell()
            writer.write(bytes(size))
            assert writer.tell() == before + size
    assert not target.closed


def test_a_file_is_read_whether_it_is_encrypted_or_not(tmp_path: Path, given_key: StorageKey) -> None:
    path = tmp_path / "f"
    for content in (b"plain", b"", b"x" * CHUNK_BYTES):
        path.write_bytes(content)
        with plaintext(path.open("rb"), str(path)) as file:
            assert file.read() == content
        with encrypting(path, given_key) as target:
            target.write(content)
        assert content == b"" or content not in path.read_bytes()
        with plaintext(path.open("rb"), str(path)) as file:
            assert file.read() == content


def test_a_file_of_another_key_is_closed_and_named(
    tmp_path: Path, given_key: StorageKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_bytes(encrypt(b"text", KEY))
    source = path.open("rb")
    with pytest.raises(
        WrongKey, match=f"{path} is encrypted with the key {KEY.name.hex()}, not with {given_key.name.hex()}"
    ):
        plaintext(source, str(path))
    assert source.closed
    monkeypatch.delenv("PACELINE_STORAGE_KEY")
    with pytest.raises(WrongKey, match="no key is given"):
        plaintext(path.open("rb"), str(path))
