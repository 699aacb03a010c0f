"""The bulk of the ledger: texts and arrays of groups, in append-only segment files beside the SQLite file.

Promises: what `append` returns a place for is on the disk, with its length and its file's name, so a transaction may
refer to it. A record never changes and never moves; every read checks its CRC-32. A segment is only ever written by the
process that began it, so what a power cut tore off its end is behind everything that was referred to.

One thread appends, any thread reads. A segment that is removed stays readable to whoever has a frame of it.
"""

from __future__ import annotations

import os
import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline.errors import LedgerFault
from paceline.wire import Buffer

MAX_SEGMENT_BYTES = 256 << 20
"""A segment that has reached this size is followed by another one; whole segments are what pruning gives back."""

MAX_OPEN_SEGMENTS = 64
MAX_PARTS_PER_WRITE = 1024
"""IOV_MAX on Linux."""


class Place(NamedTuple):
    """Where a record lies: columns of the table `payloads`, in its order."""

    segment: int
    start: int
    header_size: int
    header_crc: int
    arrays_size: int
    arrays_crc: int


class SegmentFile:
    """A segment that is open for reading, for as long as anybody has it in hand, whether it is removed or not."""

    def __init__(self, path: Path):
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


@dataclass(frozen=True)
class StoredFrame:
    """Bytes in a segment, read when they are needed."""

    file: SegmentFile
    start: int
    size: int
    crc: int

    def read(self) -> bytes:
        """The bytes. Raises LedgerFault when they are not what was written."""
        content = os.pread(self.file.fd, self.size, self.start)
        if len(content) != self.size or zlib.crc32(content) != self.crc:
            raise LedgerFault(
                f"{self.file.path} is damaged: the {self.size} bytes at {self.start} are not those that were written; "
                "restore a backup"
            )
        return content


Frame = bytes | StoredFrame


class Payload(NamedTuple):
    """A group's bulk."""

    header: Frame
    """GroupResult or LeaseReturn: texts and finish reasons."""
    arrays: Frame
    """The safetensors frame as it came."""


def read_frame(frame: Frame) -> bytes:
    """The bytes of a frame, wherever they are. Raises LedgerFault."""
    return frame if isinstance(frame, bytes) else frame.read()


class PayloadStore:
    """The segments of one ledger."""

    def __init__(self, ledger: Path):
        self.folder = ledger.with_name(ledger.name + "-segments")
        self._files: dict[int, SegmentFile] = {}
        """Open for reading; the one that was opened last is at the end."""
        self._end: int | None = None
        """File descriptor of the segment that is appended to."""
        self._number = max((number for number, _ in self._on_disk()), default=0)
        self._size = 0

    def append(self, records: Sequence[tuple[Buffer, Buffer]]) -> list[Place]:
        """Writes (header, arrays) records one after another and waits for the disk once. Raises LedgerFault."""
        try:
            return self._append(records)
        except OSError as error:
            raise LedgerFault(
                f"groups cannot be written to {self.folder}: {error.strerror or error}; make room, or repair the disk, "
                "then start the coordinator again"
            ) from None

    def payload(self, row: sqlite3.Row) -> Payload:
        """What a row of the table refers to. Raises LedgerFault when its segment is gone."""
        if row["segment"] is None:
            return Payload(row["header"], row["arrays"])
        file, start, header_size = self._open(row["segment"]), row["start"], row["header_size"]
        return Payload(
            StoredFrame(file, start, header_size, row["header_crc"]),
            StoredFrame(file, start + header_size, row["arrays_size"], row["arrays_crc"]),
        )

    def old_segments(self) -> list[int]:
        """Segments that everything has been referred to which ever will be: all but the two newest.

        Between `append` and the transaction that refers to the record there are at most MAX_SEGMENT_BYTES.
        """
        return sorted(number for number, _ in self._on_disk() if number < self._number - 1)

    def remove(self, numbers: Iterable[int]) -> None:
        """Gives the space of segments back. Nothing may refer to them any more."""
        for number in numbers:
            self._files.pop(number, None)
            self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the files, but those whose frames are still in somebody's hands."""
        self._files.clear()
        self._close_end()

    def _append(self, records: Sequence[tuple[Buffer, Buffer]]) -> list[Place]:
        if self._end is None or self._size >= MAX_SEGMENT_BYTES:
            self._begin_segment()
        assert self._end is not None
        places, parts = [], []
        for header, arrays in records:
            crcs = zlib.crc32(header), zlib.crc32(arrays)
            places.append(Place(self._number, self._size, len(header), crcs[0], len(arrays), crcs[1]))
            parts += [memoryview(header).cast("B"), memoryview(arrays).cast("B")]
            self._size += len(header) + len(arrays)
        _write_all(self._end, [part for part in parts if len(part)])
        os.fdatasync(self._end)
        return places

    def _begin_segment(self) -> None:
        self._close_end()
        if not self.folder.is_dir():
            self.folder.mkdir()
            sync_folder(self.folder.parent)
        self._number, self._size = self._number + 1, 0
        self._end = os.open(
            self._path(self._number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644
        )
        sync_folder(self.folder)

    def _close_end(self) -> None:
        if self._end is not None:
            os.close(self._end)
            self._end = None

    def _open(self, number: int) -> SegmentFile:
        file = self._files.get(number)
        if file is None:
            while len(self._files) >= MAX_OPEN_SEGMENTS:
                self._files.pop(next(iter(self._files)))
            try:
                file = self._files[number] = SegmentFile(self._path(number))
            except FileNotFoundError:
                raise LedgerFault(
                    f"{self._path(number)} is missing, and the ledger refers to it; restore a backup"
                ) from None
        return file

    def _on_disk(self) -> list[tuple[int, Path]]:
        return [(int(path.stem), path) for path in self.folder.glob("*.seg") if path.stem.isdigit()]

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}.seg"


def _write_all(fd: int, parts: list[memoryview]) -> None:
    """writev until everything is written; the system may take less than it was given."""
    first = 0
    while first < len(parts):
        written = os.writev(fd, parts[first : first + MAX_PARTS_PER_WRITE])
        while first < len(parts) and written >= len(parts[first]):
            written -= len(parts[first])
            first += 1
        if written:
            parts[first] = parts[first][written:]


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
