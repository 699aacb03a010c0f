"""A folder of objects at any fsspec URL, where the delta channel keeps weights.

Completeness depends neither on listing nor on renaming, so any object store suffices: readers get an object's name and
digest over the control plane, and never mistake a half-written object for a whole one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from paceline.errors import NotFound
from paceline.files.storage import is_local, open_url, unavailable

WHOLE_BYTES = 64 << 20
"""Bytes that one request writes or reads at most; a larger object is transferred in pieces of this size."""

Buffer = bytes | memoryview


class WeightStore:
    """The objects below `url`, a directory or any fsspec URL. Raises what `paceline.files.storage.open_url` raises."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, root = open_url(url, "weights.store")
        self._root = root.rstrip("/")
        self.is_local = is_local(self._fs)

    def write(self, name: str, chunks: Sequence[Buffer]) -> None:
        """Write an object, replacing one of the same name. Raises Unavailable."""
        path = f"{self._root}/{name}"
        try:
            if self.is_local:
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            if sum(len(chunk) for chunk in chunks) <= WHOLE_BYTES:
                self._fs.pipe_file(path, b"".join(chunks))
                return
            with self._fs.open(path, "wb", block_size=WHOLE_BYTES) as file:
                for chunk in chunks:
                    file.write(chunk)
        except Exception as error:  # file systems raise errors of various types
            raise unavailable(f"{self.url}: {name} cannot be written", error) from error

    def read(self, name: str, size_bytes: int | None = None) -> Buffer:
        """Return the object's bytes, which should be `size_bytes` long. Raises NotFound and Unavailable."""
        path = f"{self._root}/{name}"
        try:
            if size_bytes is None or size_bytes <= WHOLE_BYTES:
                return bytes(self._fs.cat_file(path))
            data = bytearray(size_bytes)
            for start in range(0, size_bytes, WHOLE_BYTES):
                end = min(start + WHOLE_BYTES, size_bytes)
                piece = self._fs.cat_file(path, start=start, end=end)  # s3fs has another order of arguments
                data[start : start + len(piece)] = piece
                if len(data) != size_bytes or len(piece) < min(WHOLE_BYTES, size_bytes - start):
                    return memoryview(data)[: start + len(piece)]
            return memoryview(data)
        except FileNotFoundError as error:
            raise NotFound(f"{self.url} has no {name}") from error
        except Exception as error:
            raise unavailable(f"{self.url}: {name} cannot be read", error) from error

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects, and folders that become empty. Missing objects are ignored. Raises Unavailable."""
        for name in names:
            try:
                self._fs.rm_file(f"{self._root}/{name}")
            except (FileNotFoundError, NotImplementedError):
                continue
            except Exception as error:
                raise unavailable(f"{self.url}: {name} cannot be removed", error) from error
        if self.is_local:
            for folder in {name.rpartition("/")[0] for name in names} - {""}:
                with contextlib.suppress(OSError):
                    self._fs.rmdir(f"{self._root}/{folder}")

    def names(self) -> list[str]:
        """Return the names of all objects; an empty list if the file system cannot list them. Raises Unavailable."""
        try:
            return [path.removeprefix(f"{self._root}/") for path in self._fs.find(self._root)]
        except (FileNotFoundError, NotImplementedError):
            return []
        except Exception as error:
            raise unavailable(f"{self.url} cannot be listed", error) from error
