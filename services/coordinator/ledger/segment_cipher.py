"""Encrypts segments: a first block that shows which key opens them, then the sealed header and arrays of each record.
Each segment has a separate key, derived from the storage key and the salt in its first block. Each part is sealed
with its position in the file, so a part that was moved to another position or segment is refused. Lengths and checksums
in the ledger are those of the plaintext, so values computed from them are the same with and without a key."""

from __future__ import annotations

import os

from paceline.encryption.encrypted_file import OVERHEAD_BYTES, SALT_BYTES, RecordCipher, WrongKey
from paceline.encryption.storage_key import NAME_BYTES, StorageKey

MAGIC = b"PLCSEG\x001"
START_BYTES = len(MAGIC) + NAME_BYTES + SALT_BYTES
"""Number of a segment's first bytes that `SegmentCipher.of_start` needs."""


class SegmentCipher:
    """Seals and opens the parts of one segment."""

    overhead_bytes = OVERHEAD_BYTES
    """Number of bytes that sealing adds to a part."""

    def __init__(self, key: StorageKey, salt: bytes):
        self.start = MAGIC + key.name + salt
        """The segment's first bytes."""
        self._records = RecordCipher(key, "segment", salt)

    @classmethod
    def new(cls, key: StorageKey) -> SegmentCipher:
        return cls(key, os.urandom(SALT_BYTES))

    @classmethod
    def of_start(cls, start: bytes, key: StorageKey) -> SegmentCipher:
        """Return the cipher of the segment with these first bytes. Raises WrongKey if the key is another one."""
        if len(start) != START_BYTES or not start.startswith(MAGIC + key.name):
            raise WrongKey(f"the file's start is not that of a segment encrypted with the key {key.name.hex()}")
        return cls(key, start[-SALT_BYTES:])

    def seal(self, part: bytes | memoryview, position: int) -> bytes:
        return self._records.seal(part, position.to_bytes(8, "big"))

    def open(self, sealed: bytes | memoryview, position: int) -> bytes:
        """Return the plaintext of the part at this position. Raises WrongKey if it is damaged or was moved."""
        return self._records.open(sealed, position.to_bytes(8, "big"))
