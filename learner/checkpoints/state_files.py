"""The files of a checkpoint as torch.distributed.checkpoint opens them: on a local disk or in a store, encrypted with the storage key or
not.

Promise: with a key every file that torch writes is encrypted as a whole, chunk by chunk while it is written, and durable when it is
closed; files are read at any position, whether they are encrypted or not.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as StoreFiles
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemBase,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import Metadata

from paceline.encryption.encrypted_file import EncryptingWriter, plaintext
from paceline.encryption.storage_key import StorageKey
from paceline.files.storage import Folder


def state_writer(folder: Folder, key: StorageKey | None) -> FileSystemWriter:
    """Return torch's writer of a checkpoint's files, encrypted with `key`."""
    if folder.local is not None:
        writer = FileSystemWriter(folder.local, sync_files=True)
    else:
        # An object of a store is durable once it is closed.
        writer = FsspecWriter(folder.url, sync_files=False)
    if key is not None:
        writer.fs = _Encrypting(writer.fs, key)  # type: ignore[assignment]
    return writer


def state_reader(folder: Folder, metadata: Metadata) -> FileSystemReader:
    """Return torch's reader of a checkpoint's files, with metadata that were decoded before."""
    if folder.local is not None:
        return _LocalReader(folder.local, metadata)
    return _StoreReader(folder.url, metadata)


class _Encrypting(FileSystemBase):
    """The files of `files`, encrypted as they are written."""

    def __init__(self, files: FileSystemBase, key: StorageKey):
        self._files, self._key = files, key

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with (
            self._files.create_stream(path, mode) as stream,
            _Stream(cast(IO[bytes], stream), self._key) as encrypted,
        ):
            yield encrypted

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str | os.PathLike[str]:
        return self._files.concat_path(path, suffix)

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        return self._files.init_path(path)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._files.rename(path, new_path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self._files.mkdir(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(FileSystem.validate_checkpoint_id(checkpoint_id))

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return bool(self._files.exists(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._files.rm_file(path)


class _Stream(EncryptingWriter):
    """One file. torch syncs before it closes, and the last chunk comes with the end, so `close` syncs a local file."""

    def fileno(self) -> int:
        return self._target.fileno()

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._target.flush()
            # The objects of a store have no descriptor, and are durable once they are closed.
            with suppress(AttributeError, io.UnsupportedOperation):
                os.fsync(self._target.fileno())


class _Decrypting:
    """Overrides a file system's stream for reading."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:  # type: ignore[misc]
            yield cast(io.IOBase, plaintext(stream, os.fspath(path)))


class _LocalFiles(_Decrypting, FileSystem):
    pass


class _ObjectFiles(_Decrypting, StoreFiles):
    pass


class _LocalReader(FileSystemReader):
    def __init__(self, path: Any, metadata: Metadata):
        super().__init__(path)
        self.fs = _LocalFiles()
        self._decoded = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._decoded


class _StoreReader(FsspecReader):
    def __init__(self, path: str, metadata: Metadata):
        super().__init__(path)
        self.fs = _ObjectFiles()  # type: ignore[assignment]
        self.path = self.fs.init_path(path)
        self._decoded = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._decoded
