"""Stores texts and arrays of groups in append-only segment files beside the SQLite file.

Promises: a record whose location `append` has returned is on the disk, with its length and its file's name, so a
transaction may refer to it. A record never changes and never moves; every read from the disk checks its CRC-32. Only
the process that created a segment writes to it, so bytes that a power cut tears off its end are behind every record in
use. With a storage key the parts of records are sealed (`segment_cipher.py`).

The newest records are in memory as well. One thread appends, any thread reads. A removed segment stays readable for
every holder of one of its frames.

Appends bypass the page cache (O_DIRECT) if the file system supports it. Appended bytes are synced at once and mostly
read never or once, so the cache is useless for them, and its pages can cost several times as much processor time as the
write itself (docs/decisions/2026-11-21-direct-writes.md). Such a write begins and ends at a block: each append fills
its last block with zeros, which nothing refers to.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from paceline.array_frames import Buffer
from paceline.encryption.encrypted_file import WrongKey
from paceline.encryption.storage_key import StorageKey
from paceline.errors import LedgerFault
from paceline.files.whole_file import sync_folder
from paceline.host.regular_file import NO_FILE, open_regular
from paceline.services.coordinator.ledger.segment_cipher import START_BYTES, SegmentCipher

try:
    from isal.isal_zlib import crc32
except ImportError:  # not available on this kind of machine
    from zlib import crc32

log = logging.getLogger(__name__)

MAX_SEGMENT_BYTES = 256 << 20
"""Size in bytes at which the next segment is begun; pruning removes whole segments."""

MAX_OPEN_SEGMENTS = 64

MAX_CANDIDATES = 64
"""Largest number of marked segments that one check for unused segments reads."""

IN_TURN = 8
"""Number of unmarked segments that each check also reads, in turn, because a removal may not have been marked."""

MAX_RECENT_BYTES = 256 << 20
"""Largest number of bytes of records in memory: the newest records that were in no served batch."""


class Location(NamedTuple):
    """Location of a record: columns of the table `payloads`, in the table's order."""

    segment: int
    start: int
    header_size: int
    header_crc: int
    arrays_size: int
    arrays_crc: int


class Record(NamedTuple):
    """A header and its arrays, which `append` writes in one piece."""

    header: Buffer
    arrays: Buffer
    header_crc: int
    arrays_crc: int

    @classmethod
    def of(cls, header: Buffer, arrays: Buffer) -> Record:
        return cls(header, arrays, crc32(header), crc32(arrays))

    @property
    def size(self) -> int:
        return len(self.header) + len(self.arrays)


class SegmentFile:
    """A segment that is open for reading while there is a reference to it, also after its removal."""

    def __init__(self, path: Path, key: StorageKey | None):
        """Open the segment. Raises OSError."""
        self.path = path
        with open_regular(path) as file:
            self.fd = os.dup(file.fileno())
        self._key = key
        self._cipher: SegmentCipher | None = None
        """Cipher, created at the first read, because files are opened where nothing may wait for the disk."""

    def read(self, position: int, size: int) -> bytes:
        """Return the `size` bytes of the part at `position`, fewer at the end of the file. Raises OSError; WrongKey if
        the segment or a sealed part is damaged."""
        if self._key is None:
            return os.pread(self.fd, size, position)
        if self._cipher is None:
            self._cipher = SegmentCipher.of_start(os.pread(self.fd, START_BYTES, 0), self._key)
        sealed = os.pread(self.fd, size + self._cipher.overhead_bytes, position)
        return self._cipher.open(sealed, position)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


@dataclass(frozen=True)
class StoredFrame:
    """Bytes in a segment, read on demand."""

    file: SegmentFile
    position: int
    """Position in the file, in bytes."""
    start: int
    """Start of the record, or of the arrays after its header, in bytes. It is the position in the ledger, which does
    not count the bytes that encryption adds."""
    size: int
    crc: int

    def read(self) -> bytes:
        """Return the bytes. Raises DamagedRecord if they are damaged, or the disk cannot read them."""
        try:
            content = self.file.read(self.position, self.size)
        except OSError as error:
            raise self._damaged(f"cannot be read: {error.strerror or error}") from None
        except WrongKey as error:
            raise self._damaged(f"cannot be decrypted: {error}") from None
        if len(content) != self.size or crc32(content) != self.crc:
            raise self._damaged("do not match their checksum")
        return content

    def _damaged(self, what: str) -> DamagedRecord:
        text = f"{self.file.path} is damaged: the {self.size} bytes at {self.position} {what}; restore a backup"
        return DamagedRecord(text, int(self.file.path.stem), self.start)


PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM})
"""Error numbers with which the creation of a segment can fail although the disk has no fault."""

Frame = Buffer | StoredFrame


class DamagedRecord(LedgerFault):
    """A record whose bytes are damaged or missing. It can be generated again unless a session has trained it."""

    def __init__(self, message: str, segment: int, start: int):
        super().__init__(message)
        self.segment = segment
        """Number of the record's segment."""
        self.start = start
        """Start of the record's header or of its arrays, in bytes."""


class UnopenedSegment(LedgerFault):
    """A segment that cannot be opened or created now (no descriptor, permissions). Nothing is lost, so callers
    retry."""


class Payload(NamedTuple):
    header: Frame
    """Message `Texts` or `LeaseReturn`: texts and finish reasons."""
    arrays: Frame
    """The safetensors frame as it arrived."""

    def read(self) -> tuple[Buffer, Buffer]:
        """Return header and arrays, from memory or from the disk. Raises LedgerFault."""
        return read_frame(self.header), read_frame(self.arrays)


def frame_size(frame: Frame) -> int:
    """Return the size of a frame in bytes, in memory or on the disk."""
    return frame.size if isinstance(frame, StoredFrame) else len(frame)


def read_frame(frame: Frame) -> Buffer:
    """Return the bytes of a frame, from memory or from the disk. Raises LedgerFault."""
    return frame.read() if isinstance(frame, StoredFrame) else frame


class RecentRecords:
    """The newest records in memory, the oldest first, with `max_bytes` together. Any thread may call the methods."""

    def __init__(self, max_bytes: int = MAX_RECENT_BYTES) -> None:
        self.max_bytes = max_bytes
        self._bytes = 0
        self._records: dict[tuple[int, int], Record] = {}
        """The key is the record's segment and start."""
        self._lock = threading.RLock()

    def get(self, segment: int, start: int) -> Record | None:
        return self._records.get((segment, start))

    def add(self, location: Location, record: Record) -> None:
        with self._lock:
            self._records[location.segment, location.start] = record
            self._bytes += record.size
            while self._bytes > self.max_bytes:
                self.evict(*next(iter(self._records)))

    def evict(self, segment: int, start: int) -> None:
        with self._lock:
            record = self._records.pop((segment, start), None)
            self._bytes -= 0 if record is None else record.size

    def evict_segments(self, numbers: Set[int]) -> None:
        with self._lock:
            for location in [location for location in self._records if location[0] in numbers]:
                self.evict(*location)

    def clear(self) -> None:
        self._records.clear()


class PayloadStore:
    def __init__(self, ledger: Path, key: StorageKey | None = None):
        """`key` encrypts the segments; None for plain ones."""
        self._key = key
        self.max_segment_bytes, self.max_open = MAX_SEGMENT_BYTES, MAX_OPEN_SEGMENTS
        self._overhead = 0 if key is None else SegmentCipher.overhead_bytes
        """Number of bytes by which a part is longer in an encrypted segment than in the ledger's count."""
        self.folder = ledger.with_name(ledger.name + "-segments")
        self._files: dict[int, SegmentFile] = {}
        """Segments open for reading, the newest opened last. The key is the segment's number."""
        self._end: SegmentWriter | None = None
        """Newest segment, which `append` writes."""
        self._cipher: SegmentCipher | None = None
        """Cipher of the newest segment, which `append` writes."""
        self.recent = RecentRecords()
        self._numbers = set(self._on_disk())
        self._number = max(self._numbers, default=0)
        self._candidates = set(self._numbers)
        """Segments that may be unused: some of their records were removed or possibly never referred to."""
        self._rounds: Iterator[int] = iter(())
        """Iterator over all segments, to find unused ones that were not marked."""
        self._remover: ThreadPoolExecutor | None = None

    def append(self, records: Sequence[Record]) -> list[Location]:
        """Write records one after another and sync once. Raises LedgerFault; UnopenedSegment if nothing was written and
        the same call may succeed later."""
        try:
            end = self._end_with_room()
            locations, start = [], end.size
            for header, arrays, header_crc, arrays_crc in records:
                locations.append(Location(self._number, start, len(header), header_crc, len(arrays), arrays_crc))
                start += len(header) + len(arrays) + 2 * self._overhead
            end.append(self._parts(records, end.size))
        except OSError as error:
            raise LedgerFault(
                f"groups cannot be written to {self.folder}: {error.strerror or error}; make room, or repair the disk, "
                "then start the coordinator again"
            ) from None
        for location, record in zip(locations, records, strict=True):
            self.recent.add(location, record)
        return locations

    def _parts(self, records: Sequence[Record], position: int) -> Iterator[Buffer]:
        """Yield the parts to write from `position` on, sealed one by one, so that memory holds no second copy."""
        for part in (part for record in records for part in (record.header, record.arrays)):
            written = part if self._cipher is None else self._cipher.seal(part, position)
            yield written
            position += len(written)

    def payload(self, row: sqlite3.Row, *, last: bool = False) -> Payload:
        """Return the texts and arrays that a row of the table refers to. With `last`, they are removed from memory.
        Raises DamagedRecord if the segment is missing, UnopenedSegment if it cannot be opened now."""
        if row["segment"] is None:
            return Payload(row["header"], row["arrays"])
        recent = self.recent.get(row["segment"], row["start"])
        if recent is not None:
            if last:
                self.recent.evict(row["segment"], row["start"])
            return Payload(recent.header, recent.arrays)
        start, header_size = row["start"], row["header_size"]
        file = self._open(row["segment"], start)
        arrays = start + header_size
        return Payload(
            StoredFrame(file, start, start, header_size, row["header_crc"]),
            StoredFrame(file, arrays + self._overhead, arrays, row["arrays_size"], row["arrays_crc"]),
        )

    def mark_candidate(self, segment: int) -> None:
        self._candidates.add(segment)

    def removal_candidates(self) -> list[int]:
        """Return segments that may be unused, up to MAX_CANDIDATES and IN_TURN others. The two newest are left out,
        because between `append` and the transaction that refers to a record there are at most MAX_SEGMENT_BYTES."""
        candidates = list(self._candidates)  # atomic copy: the appending thread adds to it
        chosen = sorted(number for number in candidates if number < self._number - 1)[:MAX_CANDIDATES]
        self._candidates.difference_update(chosen)
        round_of_all = list(islice(self._rounds, IN_TURN))
        if len(round_of_all) < IN_TURN:
            self._rounds = iter(sorted(self._numbers))
        return sorted({*chosen, *(number for number in round_of_all if number < self._number - 1)})

    def remove(self, numbers: Iterable[int], after: Callable[[], None] = lambda: None) -> Future[None]:
        """Call `after` on a thread, then remove segments that nothing refers to."""
        numbers = set(numbers)
        self.recent.evict_segments(numbers)  # records that no transaction refers to
        for number in numbers:
            self._files.pop(number, None)
        self._numbers -= numbers
        if self._remover is None:
            self._remover = ThreadPoolExecutor(1, "remove-segments")
        return self._remover.submit(self._unlink, sorted(numbers), after)

    def _unlink(self, numbers: Sequence[int], after: Callable[[], None]) -> None:
        after()
        for number in numbers:
            try:
                self._path(number).unlink(missing_ok=True)
            except OSError as error:  # its space is lost until the next start, which finds it unused
                log.warning("%s cannot be removed: %s", self._path(number), error)

    def close(self) -> None:
        """Close the files; frames that are still referred to keep theirs open."""
        if self._remover is not None:
            self._remover.shutdown()
        self._files.clear()
        self.recent.clear()
        self._close_end()

    def _end_with_room(self) -> SegmentWriter:
        """Return the segment to append to. Raises OSError; UnopenedSegment if it may be created later."""
        if self._end is None or self._end.size >= self.max_segment_bytes:
            try:
                self._end = self._begin_segment()
            except OSError as error:
                if error.errno not in PASSING:
                    raise
                raise UnopenedSegment(
                    f"no segment can be created in {self.folder}: {error.strerror or error}"
                ) from None
        return self._end

    def _begin_segment(self) -> SegmentWriter:
        self._close_end()
        if not self.folder.is_dir():
            self.folder.mkdir()
            sync_folder(self.folder.parent)
        number = self._number + 1
        segment = SegmentWriter(self._path(number))
        try:
            if self._key is not None:
                self._cipher = SegmentCipher.new(self._key)
                segment.append([self._cipher.start])
            sync_folder(self.folder)
        except OSError:
            segment.close()
            self._path(number).unlink()
            raise
        self._number = number
        self._numbers.add(number)
        self._candidates.add(number)
        return segment

    def _close_end(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None

    def _open(self, number: int, start: int) -> SegmentFile:
        file = self._files.get(number)
        if file is None:
            while len(self._files) >= self.max_open:
                self._files.pop(next(iter(self._files)))
            try:
                file = self._files[number] = SegmentFile(self._path(number), self._key)
            except OSError as error:
                if error.errno not in NO_FILE:
                    raise UnopenedSegment(f"{self._path(number)} cannot be opened: {error.strerror or error}") from None
                raise DamagedRecord(
                    f"{self._path(number)} is missing or is not a file, but the ledger refers to it; restore a backup",
                    number,
                    start,
                ) from None
        return file

    def _on_disk(self) -> list[int]:
        return [int(path.stem) for path in self.folder.glob("*.seg") if path.stem.isdigit()]

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}.seg"


BLOCK_BYTES = 4096
O_DIRECT = getattr(os, "O_DIRECT", 0)
"""Flag of a direct write; 0 on systems without it."""

BUFFER_BYTES = 8 << 20
"""Largest number of bytes of a write; writes should be few, because each one waits for the interpreter lock."""


class SegmentWriter:
    """Writes a new segment. Its methods raise OSError."""

    def __init__(self, path: Path):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o644)
        self.size = 0
        """Number of bytes written: start of the next append."""
        self._buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES))  # begins at a page, as direct writes must
        self._set_direct(True)

    def append(self, parts: Iterable[Buffer]) -> None:
        """Write the parts one after another and sync."""
        fill = 0
        for part in parts:
            rest = memoryview(part).cast("B")
            while len(rest):
                piece = rest[: BUFFER_BYTES - fill]
                self._buffer[fill : fill + len(piece)] = piece
                fill, rest = fill + len(piece), rest[len(piece) :]
                if fill == BUFFER_BYTES:
                    self._write(fill)
                    fill = 0
        if fill:
            end = -(-fill // BLOCK_BYTES) * BLOCK_BYTES
            self._buffer[fill:end] = bytes(end - fill)
            self._write(end)
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, size: int) -> None:
        """Write the buffer's first `size` bytes, whole blocks; the system may write fewer at a time."""
        position = 0
        while position < size:
            try:
                written = os.pwrite(self._fd, self._buffer[position:size], self.size)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._set_direct(False):
                    raise
                continue
            if written < BLOCK_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            whole = written - written % BLOCK_BYTES
            position, self.size = position + whole, self.size + whole

    def _set_direct(self, direct: bool) -> bool:
        """Set or clear O_DIRECT; return whether the flag changed. Some file systems refuse the flag, or the first write
        with it."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        new_flags = flags | O_DIRECT if direct else flags & ~O_DIRECT
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, new_flags)
        except OSError:
            return False
        return new_flags != flags
