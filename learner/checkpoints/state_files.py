"""The files of a checkpoint as torch.distributed.checkpoint opens them, on a local disk or in an object store.

Promise: with a storage key every file that torch writes is encrypted, chunk by chunk while it is written. A file is
durable when it is closed; files are read at any position, whether they are encrypted or not.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from paceline.encryption.encrypted_file import EncryptingWriter, plaintext
from paceline.encryption.storage_key import StorageKey
from paceline.files.storage import Folder


def state_writer(folder: Folder, key: StorageKey | None) -> FileSystemWriter:
    if folder.local is not None:
        writer = FileSystemWriter(folder.local, sync_files=True)
    else:
        # An object in a store is durable once it is closed.
        writer = FsspecWriter(folder.url, sync_files=False)
    if key is not None:
        _pass_through(writer.fs, lambda stream, _: _Stream(stream, key))
    return writer


def state_reader(folder: Folder, metadata: Metadata) -> FileSystemReader:
    """Return torch's reader of a checkpoint's files, with decoded metadata."""
    reader = FileSystemReader(folder.local) if folder.local is not None else FsspecReader(folder.url)
    _pass_through(reader.fs, plaintext)
    reader.read_metadata = lambda *_, **__: metadata  # type: ignore[method-assign]
    return reader


def _pass_through(files: FileSystemBase, coded: Callable[[IO[bytes], str], Any]) -> None:
    """Make `files` pass each stream that it opens through `coded`, which gets the stream and its path."""
    create_plain = files.create_stream

    @contextmanager
    def create_stream(path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with create_plain(path, mode) as plain, coded(cast(IO[bytes], plain), os.fspath(path)) as stream:
            yield stream

    files.create_stream = create_stream  # type: ignore[method-assign]


class _Stream(EncryptingWriter):
    """One encrypted file. `close` writes the last chunk after torch has synced, so it syncs a local file again."""

    def fileno(self) -> int:
        return self._target.fileno()

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._target.flush()
            # Objects in a store have no descriptor, and are durable once they are closed.
            with suppress(AttributeError, io.UnsupportedOperation):
                os.fsync(self._target.fileno())
