"""The key that encrypts a deployment's files: 32 random bytes, given as 64 hexadecimal digits. Every use derives a
separate key with HKDF-SHA-256 (RFC 5869), so that the given key encrypts nothing directly. The key's name
distinguishes keys without revealing their bytes."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from paceline.errors import InvalidInput
from paceline.host.regular_file import open_regular

FILE_VARIABLE = "PACELINE_STORAGE_KEY_FILE"
KEY_VARIABLE = "PACELINE_STORAGE_KEY"
KEY_BYTES = 32
NAME_BYTES = 8
MAX_FILE_BYTES = 4096
REMEDY = "write 64 hexadecimal digits, such as `openssl rand -hex 32` prints"


class StorageKey:
    """A storage key, whose `repr` has only the key's name."""

    def __init__(self, secret: bytes):
        """`secret` has 32 bytes. Raises InvalidInput for any other length."""
        if len(secret) != KEY_BYTES:
            raise InvalidInput(f"a storage key has {len(secret)} bytes; {REMEDY}")
        self._secret = secret
        self.name = self.derive("name")[:NAME_BYTES]
        """8 bytes that identify this key."""

    def __repr__(self) -> str:
        return f"StorageKey({self.name.hex()})"

    def derive(self, purpose: str, salt: bytes = b"") -> bytes:
        """Return a key of 32 bytes, derived for one purpose and salt."""
        info = f"paceline storage {purpose}".encode()
        return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt or None, info=info).derive(self._secret)


def storage_key(environment: Mapping[str, str] | None = None) -> StorageKey | None:
    """Return the key in PACELINE_STORAGE_KEY_FILE or PACELINE_STORAGE_KEY, or None if neither is set. A file is read
    once in a process. Raises InvalidInput if both are set, the file is unreadable or the text is not a key."""
    variables = os.environ if environment is None else environment
    path, text = variables.get(FILE_VARIABLE, ""), variables.get(KEY_VARIABLE, "")
    if path and text:
        raise InvalidInput(f"{FILE_VARIABLE} and {KEY_VARIABLE} are both set; unset one of them")
    if path:
        return _key_of_file(path)
    return _parsed(text, KEY_VARIABLE) if text else None


@functools.lru_cache(maxsize=8)
def _key_of_file(path: str) -> StorageKey:
    return _parsed(_file_text(Path(path)), f"{FILE_VARIABLE}: {path!r}")


def _file_text(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return file.read(MAX_FILE_BYTES).decode("ascii", errors="replace")
    except OSError as error:
        raise InvalidInput(
            f"{FILE_VARIABLE}: {str(path)!r} cannot be read ({error.strerror}); name a file that has the storage key"
        ) from None


def _parsed(text: str, where: str) -> StorageKey:
    text = text.strip()
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise InvalidInput(f"{where} holds {len(text)} characters that are not a storage key; {REMEDY}")
    return StorageKey(bytes.fromhex(text))
