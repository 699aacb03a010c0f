"""Encrypted records: short pieces that are appended to a file, or kept in a place of their own.

A record is 12 bytes of a random nonce, then the ciphertext of AES-256-GCM with its tag of 16 bytes. Its context, such as the name of its file and
its position, is authenticated with it, so a record that was moved elsewhere is refused. At most 2^32 records may be
sealed with one key (NIST SP 800-38D, section 8.3), so each long-lived file derives one from a salt of its own.
"""

from __future__ import annotations

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from paceline.encryption.encrypted_file import TAG_BYTES, WrongKey
from paceline.encryption.storage_key import StorageKey

NONCE_BYTES = 12
OVERHEAD_BYTES = NONCE_BYTES + TAG_BYTES


class RecordCipher:
    """Seals and opens the records of one purpose and salt."""

    def __init__(self, key: StorageKey, purpose: str, salt: bytes = b""):
        self._cipher = AESGCM(key.derive(f"record {purpose}", salt))
        self._purpose = purpose

    def seal(self, data: bytes | memoryview, context: bytes = b"") -> bytes:
        """Return the record of `data`, which has 28 bytes more."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, data, context)

    def open(self, record: bytes | memoryview, context: bytes = b"") -> bytes:
        """Return the data of a record. Raises WrongKey for another key or context, and for a damaged record."""
        if len(record) < OVERHEAD_BYTES:
            raise WrongKey(f"a record of {self._purpose} has {len(record)} bytes; it was cut off")
        try:
            return self._cipher.decrypt(bytes(record[:NONCE_BYTES]), record[NONCE_BYTES:], context)
        except InvalidTag:
            raise WrongKey(f"a record of {self._purpose} is damaged, moved, or of another key") from None
