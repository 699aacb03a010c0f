"""Parts of an encrypted segment open only at their own position, in their own segment, with their own key."""

from __future__ import annotations

import pytest
from ledger_files import KEY_TEXT, OTHER_KEY_TEXT

from paceline.encryption.encrypted_file import WrongKey
from paceline.encryption.storage_key import StorageKey
from paceline.services.coordinator.ledger.segment_cipher import START_BYTES, SegmentCipher

KEY = StorageKey(bytes.fromhex(KEY_TEXT))


def test_a_segments_first_bytes_give_its_cipher_back() -> None:
    cipher = SegmentCipher.new(KEY)
    assert len(cipher.start) == START_BYTES
    sealed = cipher.seal(memoryview(b"arrays"), 4096)
    assert len(sealed) == len(b"arrays") + cipher.overhead_bytes
    again = SegmentCipher.of_start(cipher.start, KEY)
    assert again.open(memoryview(sealed), 4096) == b"arrays"


def test_parts_that_were_moved_or_changed_are_refused() -> None:
    cipher, other = SegmentCipher.new(KEY), SegmentCipher.new(KEY)
    sealed = cipher.seal(b"arrays", 4096)
    changed = sealed[:-1] + bytes([sealed[-1] ^ 1])
    for opener, part, position in ((cipher, sealed, 8192), (other, sealed, 4096), (cipher, changed, 4096)):
        with pytest.raises(WrongKey):
            opener.open(part, position)
    with pytest.raises(WrongKey, match="cut off"):
        cipher.open(sealed[:20], 4096)


def test_what_is_no_segment_of_the_key_is_refused() -> None:
    start = SegmentCipher.new(KEY).start
    other = StorageKey(bytes.fromhex(OTHER_KEY_TEXT))
    for begin, key in ((start, other), (b"", KEY), (start[:-1], KEY), (bytes(START_BYTES), KEY)):
        with pytest.raises(WrongKey, match=f"encrypted with the key {key.name.hex()}"):
            SegmentCipher.of_start(begin, key)
