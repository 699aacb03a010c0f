"""`Upload`: takes the parts of a client's stream of files into the store, one file after the other."""

from __future__ import annotations

import contextlib
from typing import IO

from paceline.errors import Conflict, InvalidInput
from paceline.services.coordinator.blobs.store import CHUNK_BYTES, BlobStore


class Upload:
    """One client's stream; `close` ends it, complete or not. The methods block: they are for a thread."""

    def __init__(self, store: BlobStore):
        self._store = store
        self._file: IO[bytes] | None = None
        self._sha256, self._size, self._position = "", 0, 0
        self.num_blobs = 0
        """Files that were completed."""

    def take(self, sha256: str, size: int, offset: int, data: bytes) -> None:
        """Add a part, and complete the file with its last one. A part of a file that is there already is ignored.

        Raises InvalidInput for parts that do not follow each other, for a wrong digest and for a file that is too large; Busy
        beyond the quota; Conflict where the client has to ask again.
        """
        if len(data) > CHUNK_BYTES:
            raise InvalidInput(f"a part has {len(data)} bytes, not {CHUNK_BYTES} at most")
        if sha256 != self._sha256:
            self._check_ended()
            if self._store.has(sha256):  # another client has sent it since this one asked
                return
            self._begin(sha256, size, offset)
        if size != self._size or offset != self._position or offset + len(data) > size:
            raise InvalidInput(
                f"the part at byte {offset} of {size} of the file {sha256[:12]}… does not follow byte {self._position} of "
                f"{self._size}"
            )
        assert self._file is not None
        self._file.write(data)
        self._position += len(data)
        if self._position == self._size:
            self._file.close()
            try:
                self._store.complete(sha256, size)
            finally:
                self._release()
            self.num_blobs += 1

    def finish(self) -> None:
        """Check that the last file is complete. Raises Conflict."""
        self._check_ended()

    def close(self) -> None:
        """Keep what has come of an incomplete file, from where a later stream goes on."""
        self._release()

    def _begin(self, sha256: str, size: int, offset: int) -> None:
        self._store.begin(sha256, size, offset)
        self._sha256, self._size, self._position = sha256, size, offset
        try:
            self._file = self._store.open_partial(sha256)
        except BaseException:
            self._release()
            raise

    def _check_ended(self) -> None:
        if self._file is not None:
            raise Conflict(
                f"the file {self._sha256[:12]}… ended at byte {self._position} of {self._size}; ask again which are missing"
            )

    def _release(self) -> None:
        if self._sha256:
            with contextlib.suppress(
                OSError
            ):  # a disk that refuses the last bytes: the file goes on before them
                if self._file is not None:
                    self._file.close()
            self._store.end(self._sha256)
        self._file, self._sha256 = None, ""
