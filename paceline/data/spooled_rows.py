"""Rows that were read once and are kept as JSON lines in an unnamed file.

Memory holds the offsets alone, and a change of the file that they came from changes nothing. Where this process has a storage key, each
row is encrypted, with a key that the process keeps for itself.
"""

from __future__ import annotations

import json
import os
import tempfile
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from paceline.encryption.encrypted_file import RecordCipher, WrongKey
from paceline.encryption.storage_key import KEY_BYTES, StorageKey, storage_key
from paceline.errors import Unreadable


class SpooledRows:
    """Rows of the file `path`: `add` all of them, then call `finished`."""

    def __init__(self, path: Path, columns: tuple[str, ...] = ()) -> None:
        self._path, self.columns, self.fingerprint = path, columns, ""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - rows are read from it later
        self._digest, self._growing = xxhash.xxh3_64(), array("q", [0])
        self._offsets = np.zeros(1, np.int64)
        own_key = None if storage_key() is None else StorageKey(os.urandom(KEY_BYTES))
        self._cipher = None if own_key is None else RecordCipher(own_key, "rows")

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row."""
        line = json.dumps(row).encode()
        self._digest.update(line)
        if self._cipher is not None:
            line = self._cipher.seal(line)
        self._file.write(line)
        self._growing.append(self._growing[-1] + len(line))

    def finished(self) -> SpooledRows:
        """Return these rows, now readable."""
        self._file.flush()
        self._offsets = np.array(self._growing, np.int64)
        self.fingerprint = f"{len(self)} rows, XXH3 {self._digest.hexdigest()}"
        return self

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return row `index`. Raises Unreadable when the disk cannot be read."""
        start, end = int(self._offsets[index]), int(self._offsets[index + 1])
        try:
            line = os.pread(self._file.fileno(), end - start, start)
            row: dict[str, Any] = json.loads(line if self._cipher is None else self._cipher.open(line))
        except (OSError, ValueError, WrongKey) as error:
            raise Unreadable(f"row {index} of {self._path} cannot be read again: {error}") from None
        return row
