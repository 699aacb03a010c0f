"""A record opens only with its key and context."""

from __future__ import annotations

import os

import pytest

from paceline.encryption.encrypted_file import OVERHEAD_BYTES, RecordCipher, WrongKey
from paceline.encryption.storage_key import StorageKey

KEY = StorageKey(bytes(range(32)))


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_a_record_is_read_back(size: int) -> None:
    data = os.urandom(size)
    record = RecordCipher(KEY, "segments", b"s").seal(data, b"7")
    assert len(record) == size + OVERHEAD_BYTES
    assert RecordCipher(KEY, "segments", b"s").open(memoryview(record), b"7") == data


def test_another_key_purpose_salt_context_or_byte_is_refused() -> None:
    record = RecordCipher(KEY, "segments", b"s").seal(b"data", b"7")
    others = [
        (RecordCipher(StorageKey(os.urandom(32)), "segments", b"s"), b"7"),
        (RecordCipher(KEY, "journals", b"s"), b"7"),
        (RecordCipher(KEY, "segments", b"t"), b"7"),
        (RecordCipher(KEY, "segments", b"s"), b"8"),
    ]
    for cipher, context in others:
        with pytest.raises(WrongKey, match="damaged, moved, or of another key"):
            cipher.open(record, context)
    for at in range(len(record)):
        changed = bytearray(record)
        changed[at] ^= 1
        with pytest.raises(WrongKey):
            RecordCipher(KEY, "segments", b"s").open(bytes(changed), b"7")
    with pytest.raises(WrongKey, match="was cut off"):
        RecordCipher(KEY, "segments", b"s").open(record[:20], b"7")
