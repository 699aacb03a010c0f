"""Encrypts files in chunks, written in one pass and read from any position, and records (short appended pieces).

Layout of a file: 8 bytes of magic, 8 bytes of the key's name, a salt of 16 bytes, then chunks of 65,536 bytes of
plaintext (the last has fewer), each followed by a tag of 16 bytes. The file's key is derived from the storage key and
the salt. A chunk is sealed with AES-256-GCM; its nonce has the chunk's index and says whether the chunk is the last,
and the header is authenticated with each chunk. A chunk that was changed, moved, repeated or cut off is therefore
detected on reading (the STREAM construction of Hoang, Reyhanitabar, Rogaway and Vizár, "Online Authenticated-Encryption
and its Nonce-Reuse Misuse-Resistance", 2015).

A record is 12 bytes of a random nonce, then the ciphertext of AES-256-GCM with its tag of 16 bytes. Its context, such
as the file's name and the position, is authenticated with it, so a moved record is refused. At most 2^32 records may be
sealed with one key (NIST SP 800-38D, section 8.3), so each long-lived file derives a separate key from its salt.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import IO, cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from paceline.encryption.storage_key import FILE_VARIABLE, KEY_VARIABLE, NAME_BYTES, StorageKey, storage_key
from paceline.errors import InvalidInput
from paceline.host.regular_file import open_named, open_regular

MAGIC = b"PLCENC\x001"
SALT_BYTES = 16
HEADER_BYTES = len(MAGIC) + NAME_BYTES + SALT_BYTES
CHUNK_BYTES = 65_536
TAG_BYTES = 16
SEALED_BYTES = CHUNK_BYTES + TAG_BYTES
REMEDY = f"give the key with which the file was written, by {FILE_VARIABLE} or {KEY_VARIABLE}"


class WrongKey(InvalidInput):
    """A file that was encrypted with another key, is encrypted although no key is given, or is damaged."""


def is_encrypted(start: bytes) -> bool:
    """Return whether `start` (8 bytes or more) is the beginning of an encrypted file."""
    return start.startswith(MAGIC)


def is_encrypted_file(path: Path) -> bool:
    """Return whether the file at a path is encrypted. Raises OSError."""
    with open_named(path) as file:
        return is_encrypted(file.read(len(MAGIC)))


def encrypted_size(plain_bytes: int) -> int:
    """Return the bytes on disk of a file with `plain_bytes` of plaintext."""
    return HEADER_BYTES + plain_bytes + TAG_BYTES * max(1, -(-plain_bytes // CHUNK_BYTES))


def plain_size(encrypted_bytes: int) -> int:
    """Return the bytes of plaintext in a file that has `encrypted_bytes` on disk. Raises WrongKey for an impossible size."""
    body = encrypted_bytes - HEADER_BYTES
    chunks = max(1, -(-body // SEALED_BYTES))
    size = body - TAG_BYTES * chunks
    if size < 0 or (size == 0 and chunks > 1) or encrypted_size(size) != encrypted_bytes:
        raise WrongKey(f"an encrypted file has {encrypted_bytes} bytes, an impossible size; it was cut off")
    return size


class EncryptingWriter(io.RawIOBase):
    """Encrypts written bytes into `target`. `close` writes the last chunk, and leaves `target` open unless `closes`."""

    def __init__(self, target: IO[bytes], key: StorageKey, *, closes: bool = False):
        super().__init__()
        self._closes = closes
        salt = os.urandom(SALT_BYTES)
        self._target = target
        self._header = MAGIC + key.name + salt
        self._cipher = AESGCM(key.derive("file", salt))
        self._waiting = b""
        """Up to one chunk, held until more follows, because the last chunk is sealed differently."""
        self._index = 0
        target.write(self._header)

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        view, start = memoryview(data).cast("B"), 0
        while len(self._waiting) + len(view) - start > CHUNK_BYTES:
            end = start + CHUNK_BYTES - len(self._waiting)
            self._seal(self._waiting + view[start:end] if self._waiting else view[start:end], last=False)
            self._waiting, start = b"", end
        self._waiting += view[start:]
        return len(view)

    def tell(self) -> int:
        return self._index * CHUNK_BYTES + len(self._waiting)

    def close(self) -> None:
        if self.closed:
            return
        try:
            self._seal(self._waiting, last=True)
        finally:
            super().close()
            if self._closes:
                self._target.close()

    def _seal(self, plain: bytes | memoryview, *, last: bool) -> None:
        self._target.write(self._cipher.encrypt(_nonce(self._index, last), plain, self._header))
        self._index += 1


class DecryptingReader(io.RawIOBase):
    """Reads an encrypted file's plaintext from any position, and owns `source`. Raises WrongKey for a file of another
    key, and on reading a chunk that is damaged, moved or cut off."""

    def __init__(self, source: IO[bytes], key: StorageKey | None, name: str):
        """`source` must be seekable; `name` is the file's name in errors."""
        super().__init__()
        self._source, self._name = source, name
        encrypted_bytes = source.seek(0, os.SEEK_END)
        source.seek(0)
        self._header = source.read(HEADER_BYTES)
        self._cipher = AESGCM(_file_key(self._header, key, name))
        self.size = plain_size(encrypted_bytes)
        self._last = max(0, -(-self.size // CHUNK_BYTES) - 1)
        self._position = 0
        self._chunk, self._chunk_index = b"", -1

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        if start + offset < 0:
            raise OSError(f"{self._name}: a position of {start + offset} bytes is below 0")
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        index, offset = divmod(self._position, CHUNK_BYTES)
        if index > self._last:
            return 0
        piece = self._opened(index)[offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()

    def _opened(self, index: int) -> bytes:
        if index != self._chunk_index:
            self._source.seek(HEADER_BYTES + index * SEALED_BYTES)
            sealed = self._source.read(SEALED_BYTES)
            try:
                self._chunk = self._cipher.decrypt(_nonce(index, index == self._last), sealed, self._header)
            except InvalidTag:
                raise WrongKey(
                    f"{self._name} is damaged or cut off: its chunk {index} is not what was encrypted"
                ) from None
            self._chunk_index = index
        return self._chunk


def encrypting(path: Path, key: StorageKey) -> IO[bytes]:
    """Return a writer that replaces the file at `path` with an encrypted one."""
    return cast(IO[bytes], EncryptingWriter(path.open("wb"), key, closes=True))


def decrypting(source: IO[bytes], key: StorageKey | None, name: str) -> IO[bytes]:
    """Return a buffered reader of the plaintext of an encrypted file. Raises WrongKey."""
    return io.BufferedReader(DecryptingReader(source, key, name), CHUNK_BYTES)


def plaintext(source: IO[bytes], name: str) -> IO[bytes]:
    """Return a reader of the plaintext of a file that may be encrypted: `source` from its beginning, or a reader that
    decrypts it with this process's key. Raises WrongKey, or InvalidInput for an unreadable key, after closing
    `source`."""
    try:
        source.seek(0)
        start = source.read(len(MAGIC))
        source.seek(0)
        return decrypting(source, storage_key(), name) if is_encrypted(start) else source
    except BaseException:
        source.close()
        raise


def open_data(path: Path, *, is_named: bool = True) -> IO[bytes]:
    """Return a reader of a data file's plaintext. The file may be encrypted, and a cache may have encrypted its copy
    again. Raises WrongKey, InvalidInput as `plaintext` does, and OSError."""
    return plaintext(plaintext((open_named if is_named else open_regular)(path), str(path)), str(path))


def encrypt(data: bytes, key: StorageKey) -> bytes:
    """Return the bytes of an encrypted file with the plaintext `data`."""
    target = io.BytesIO()
    with EncryptingWriter(target, key) as writer:
        writer.write(data)
    return target.getvalue()


def decrypt(data: bytes, key: StorageKey | None, name: str) -> bytes:
    """Return the plaintext of an encrypted file's bytes. Raises WrongKey, with `name` as the file's."""
    with decrypting(io.BytesIO(data), key, name) as reader:
        return reader.read()


def wrong_key(name: str, encrypted_with: bytes, key: StorageKey | None, remedy: str = REMEDY) -> WrongKey:
    """Return the error for the file `name`, which is encrypted with another key than the given key."""
    if key is None:
        return WrongKey(f"{name} is encrypted with the key {encrypted_with.hex()}, and no key is given; {remedy}")
    return WrongKey(f"{name} is encrypted with the key {encrypted_with.hex()}, not with {key.name.hex()}; {remedy}")


def _file_key(header: bytes, key: StorageKey | None, name: str) -> bytes:
    if len(header) < HEADER_BYTES or not is_encrypted(header):
        raise WrongKey(f"{name} is not an encrypted file, or it was cut off")
    encrypted_with = header[len(MAGIC) : len(MAGIC) + NAME_BYTES]
    if key is None or key.name != encrypted_with:
        raise wrong_key(name, encrypted_with, key)
    return key.derive("file", header[-SALT_BYTES:])


def _nonce(index: int, last: bool) -> bytes:
    return bytes([last]) + index.to_bytes(11, "big")


NONCE_BYTES = 12
OVERHEAD_BYTES = NONCE_BYTES + TAG_BYTES


class RecordCipher:
    """Seals and opens records with the key of one purpose and salt."""

    def __init__(self, key: StorageKey, purpose: str, salt: bytes = b""):
        self._cipher = AESGCM(key.derive(f"record {purpose}", salt))
        self._purpose = purpose

    def seal(self, data: bytes | memoryview, context: bytes = b"") -> bytes:
        """Return the record of `data`, which is 28 bytes longer."""
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
