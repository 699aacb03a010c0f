"""Appends lines to a file and reads them by position, plain or encrypted with the storage key. An encrypted file begins
with a line that has the key's name and a salt of 16 bytes. Each further line is a record
(`paceline/encryption/encrypted_file.py`) in base64, with its offset as the context, so a changed or moved line is
refused. A truncated end is not detected, as in a plain file. Without a key, the file is the lines themselves."""

from __future__ import annotations

import binascii
import io
import os
import threading
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from paceline.encryption.encrypted_file import OVERHEAD_BYTES, SALT_BYTES, RecordCipher, WrongKey, open_data, wrong_key
from paceline.encryption.storage_key import NAME_BYTES, StorageKey
from paceline.files.whole_file import written_whole

MARK = b"paceline-encrypted-lines-1 "
HEADER_BYTES = len(MARK) + 2 * NAME_BYTES + 1 + 2 * SALT_BYTES + 1


def stored_size(line_bytes: int, key: StorageKey | None) -> int:
    """Return the bytes that a line of `line_bytes` (with its end) takes in a file."""
    return line_bytes if key is None else 4 * -(-(line_bytes - 1 + OVERHEAD_BYTES) // 3) + 1


class LineWriter:
    """Appends lines to a file, which it makes if it is missing. If there is a key, a plain file is encrypted first."""

    def __init__(self, path: Path, key: StorageKey | None):
        """Raises WrongKey for a file that is encrypted with another key, OSError."""
        self.path = path
        self._cipher: RecordCipher | None = None
        if path.exists():
            with path.open("rb") as file:
                self._cipher = _cipher_of(file, str(path), key)
        if key is not None and self._cipher is None:
            self._cipher = _encrypted(path, key)
        self._file = path.open("ab")
        if key is not None and not _ends_with_line(path):
            self._file.write(b"\n")  # half a line from a process that was killed

    def tell(self) -> int:
        return self._file.tell()

    def write(self, line: bytes) -> int:
        """Append a line, with its end; return its offset. Raises OSError."""
        offset = self._file.tell()
        self._file.write(line if self._cipher is None else _sealed(self._cipher, line, offset))
        self._file.flush()
        return offset

    def close(self) -> None:
        self._file.close()


class LineReader:
    """Reads the lines of a file: plain, encrypted, or in a file that is encrypted as a whole. Several threads may
    `read`. The file stays open, so its lines do not change if another file replaces it."""

    def __init__(self, path: Path, key: StorageKey | None, *, is_named: bool = False):
        """`is_named`: somebody has named the file (`open_named`). Raises OSError; WrongKey for a file that is encrypted
        with another key than this process has."""
        self._name = str(path)
        self._file = open_data(path, is_named=is_named)
        try:
            self._cipher = _cipher_of(self._file, self._name, key)
        except BaseException:
            self._file.close()
            raise
        self._is_stored = isinstance(self._file.raw, io.FileIO)  # type: ignore[attr-defined]
        """True if offsets count the stored bytes, which threads can read without a lock."""
        self._lock = threading.Lock()
        self._first = 0 if self._cipher is None else HEADER_BYTES

    def __iter__(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield each line's start and end offset and the line with its end. Raises WrongKey for a damaged line."""
        for start, end, line in self.stored():
            yield start, end, self.opened(line, start)

    def stored(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield each line's start and end offset, and the line in stored form (see `opened`)."""
        self._file.seek(self._first)
        start = self._first
        for line in self._file:
            yield start, start + len(line), line
            start += len(line)

    def read(self, start: int, end: int) -> bytes:
        """Return the line between two offsets. Raises WrongKey, OSError."""
        if self._is_stored:
            line = os.pread(self._file.fileno(), end - start, start)
        else:
            with self._lock:
                self._file.seek(start)
                line = self._file.read(end - start)
        return self.opened(line, start)

    def read_at(self, start: int) -> bytes:
        """Return the line that begins at an offset. Raises WrongKey, OSError."""
        with self._lock:
            self._file.seek(start)
            return self.opened(self._file.readline(), start)

    def opened(self, line: bytes, start: int) -> bytes:
        """Return the plaintext of a stored line. Raises WrongKey."""
        if self._cipher is None:
            return line
        try:
            return self._cipher.open(b64decode(line), start.to_bytes(8, "big")) + b"\n"
        except (WrongKey, binascii.Error):
            raise WrongKey(f"{self._name}: the line at byte {start} is damaged, cut off or moved") from None

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> LineReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cipher_of(file: IO[bytes], name: str, key: StorageKey | None) -> RecordCipher | None:
    """Return the cipher of a file's lines; None for a plain file. Raises WrongKey."""
    header = file.read(HEADER_BYTES)
    if not header.startswith(MARK):
        return None
    try:
        encrypted_with, salt = (bytes.fromhex(part) for part in header[len(MARK) :].decode("ascii").split())
        if len(header) < HEADER_BYTES:
            raise ValueError(f"{len(header)} bytes")
    except ValueError:
        raise WrongKey(f"{name} is damaged: it begins with {MARK.decode()!r}, and its first line is cut off") from None
    if key is None or key.name != encrypted_with:
        raise wrong_key(name, encrypted_with, key)
    return RecordCipher(key, "lines", salt)


def _encrypted(path: Path, key: StorageKey) -> RecordCipher:
    """Convert a plain or missing file to an encrypted one; return the cipher of its lines."""
    salt = os.urandom(SALT_BYTES)
    cipher = RecordCipher(key, "lines", salt)
    with written_whole(path) as partial, partial.open("wb") as file:
        file.write(MARK + key.name.hex().encode() + b" " + salt.hex().encode() + b"\n")
        if path.exists():
            with path.open("rb") as plain:
                for line in plain:
                    file.write(_sealed(cipher, line, file.tell()))
    return cipher


def _sealed(cipher: RecordCipher, line: bytes, offset: int) -> bytes:
    return b64encode(cipher.seal(line.removesuffix(b"\n"), offset.to_bytes(8, "big"))) + b"\n"


def _ends_with_line(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return size == 0 or file.read() == b"\n"
