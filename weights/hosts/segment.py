"""Segments of host memory that weights are received into, and that every engine of the host maps.

A segment lives for many versions: it is made once with the exact size, mapped once by each process and, if the process
has a GPU, page-locked once. One writer begins a *generation*, publishes each bucket of bytes with its digest as soon as
the bucket is verified, and completes the generation. The promise: while a reader reads a generation, the writer cannot
begin the next one in that segment, and a reader that comes too late gets an error, never mixed bytes. Readers hold file
locks of the kernel, so the death of a reader, for whatever reason, ends its reading.

The memory is a memfd: it has no name in a file system, so it leaves nothing behind and no limit on /dev/shm applies. It
is sealed against a change of its size, because reading memory that its owner truncates kills the reading process. A
reader gets it by its path in /proc (same user and process namespace) or as a descriptor over a Unix socket.

Layout: `size_bytes` of weights from byte 0 on; from the next page on a table with generation and digest of each bucket;
in the last 64 bytes of the file the footer. Numbers are little-endian.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import struct
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from paceline.errors import Unavailable, WireError
from paceline.host.page_lock import PageLocks

if TYPE_CHECKING:
    import torch

MAGIC = b"pacelnHS"
FORMAT = 1
FOOTER = struct.Struct("<8sIIQQQQ16x")
"""Fields of the footer: magic, format, buckets, bytes of weights and of a bucket, generation, last complete generation.
"""
GENERATION_AT, COMPLETE_AT = 32, 40
"""Offsets in the footer at which the generation and the last complete generation are."""
ENTRY = struct.Struct("<QB7x32s")
"""Fields of a bucket's entry: generation in which it was published, length of its digest in bytes, the digest."""
MAX_DIGEST_BYTES = 32
MAX_BUCKETS = 1 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
PATH = re.compile(r"/proc/[0-9]+/fd/[0-9]+")


class HostSegment:
    """A mapped segment. The writer uses `begin`, `publish` and `complete`, one thread at a time; readers use `reading`."""

    def __init__(self, fd: int, size_bytes: int, bucket_bytes: int) -> None:
        """Called by `create`, `attach` and `open`; `fd` then belongs to the object."""
        self.fd = fd
        self.size_bytes = size_bytes
        self.bucket_bytes = bucket_bytes
        self.num_buckets = -(-size_bytes // bucket_bytes)
        self._table = _page_end(size_bytes)
        self._memory = mmap.mmap(fd, 0)
        self._footer = len(self._memory) - FOOTER.size
        self._locks = PageLocks()
        with contextlib.suppress(OSError):  # a kernel without huge pages for shared memory
            self._memory.madvise(mmap.MADV_HUGEPAGE)

    @classmethod
    def create(cls, size_bytes: int, bucket_bytes: int) -> HostSegment:
        """Make a segment, and be its writer. Its pages take memory when they are first written. Raises ValueError."""
        num_buckets = -(-size_bytes // bucket_bytes) if bucket_bytes > 0 else 0
        if size_bytes <= 0 or not 0 < num_buckets <= MAX_BUCKETS:
            raise ValueError(
                f"a segment cannot have {size_bytes} bytes in buckets of {bucket_bytes}; both must be positive, with "
                f"at most {MAX_BUCKETS} buckets"
            )
        fd = os.memfd_create("paceline-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, _file_bytes(size_bytes, num_buckets))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            segment = cls(fd, size_bytes, bucket_bytes)
        except BaseException:
            os.close(fd)
            raise
        FOOTER.pack_into(segment._memory, segment._footer, MAGIC, FORMAT, num_buckets, size_bytes, bucket_bytes, 0, 0)
        return segment

    @classmethod
    def attach(cls, fd: int) -> HostSegment:
        """Map a segment of another process; `fd` stays the caller's. Raises Unavailable if `fd` is not a segment."""
        # Opened again, because a lock belongs to an opening of the file, and a passed descriptor shares its sender's.
        return cls._map(f"/proc/self/fd/{fd}")

    @classmethod
    def open(cls, path: str) -> HostSegment:
        """Map the segment at `path`, the writer's `HostSegment.path`. Raises Unavailable."""
        if not PATH.fullmatch(path):
            raise Unavailable(f"{path[:64]!r} is offered as a segment of memory, but is not one")
        return cls._map(path)

    @classmethod
    def _map(cls, path: str) -> HostSegment:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise Unavailable(
                f"the segment {path} cannot be opened ({error.strerror}); only processes of one host, one user and one "
                "process namespace can open it"
            ) from error
        try:
            return cls(fd, *_sizes(fd, path))
        except BaseException:
            os.close(fd)
            raise

    @property
    def path(self) -> str:
        """Path at which other processes of this user can open the segment while this process has it open."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode: equal for two mappings of one segment. A path may name another segment later."""
        return identity_of(self.fd)

    @property
    def generation(self) -> int:
        """The generation that was begun last; 0 before the first."""
        return self._number(GENERATION_AT)

    @property
    def complete_generation(self) -> int:
        """The generation that was completed last; 0 before the first."""
        return self._number(COMPLETE_AT)

    def flat(self) -> torch.Tensor:
        """Return [size_bytes] uint8, a view of the memory; it keeps the mapping, not the descriptor."""
        import torch

        return torch.frombuffer(self._memory, dtype=torch.uint8)[: self.size_bytes]

    def memory(self) -> memoryview:
        """Return all bytes of weights, to receive into or to send from; the view keeps the mapping."""
        return memoryview(self._memory)[: self.size_bytes]

    def page_lock(self, ranges: Iterable[tuple[int, int]] | None = None) -> int:
        """Lock the pages of byte ranges [start, end) of the weights (default: all) until `close`, so that this
        process's GPU copies them at bus speed. Return the locked bytes."""
        address = self.flat().data_ptr()
        locked = ranges if ranges is not None else [(0, self.size_bytes)]
        self._locks.lock((address + start, address + end) for start, end in locked)
        return self._locks.num_bytes

    def begin(self) -> int:
        """Begin a generation, without buckets yet; return its number. Raises Unavailable while the last one is read."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(
                f"the segment's generation {self.generation} is still read; nothing was overwritten"
            ) from None
        try:
            generation = self.generation + 1
            self._set_number(GENERATION_AT, generation)
        finally:
            fcntl.flock(self.fd, fcntl.LOCK_UN)
        return generation

    def publish(self, bucket: int, digest: bytes) -> None:
        """Tell readers that the bytes of `bucket` are complete and have this digest (1 to 32 bytes)."""
        if not 0 <= bucket < self.num_buckets or not 0 < len(digest) <= MAX_DIGEST_BYTES:
            raise ValueError(f"bucket {bucket} of {self.num_buckets} cannot have a digest of {len(digest)} bytes")
        at = self._table + bucket * ENTRY.size
        # The generation comes last, because it makes the entry valid.
        self._memory[at + 8 : at + ENTRY.size] = ENTRY.pack(0, len(digest), digest)[8:]
        self._memory[at : at + 8] = self.generation.to_bytes(8, "little")

    def complete(self) -> None:
        self._set_number(COMPLETE_AT, self.generation)

    @contextlib.contextmanager
    def reading(self, generation: int) -> Iterator[None]:
        """Keep the writer from beginning the next generation. Raises Unavailable if `generation` is no longer the
        current one. Any process and thread may call it, any number of times."""
        # The lock belongs to this opening: it ends with it, even if the process is killed.
        fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            # The writer holds its lock for microseconds.
            fcntl.flock(fd, fcntl.LOCK_SH)
            if self.generation != generation:
                raise Unavailable(
                    f"generation {generation} of the segment was overwritten: the segment has {self.generation} now"
                )
            yield
        finally:
            os.close(fd)

    def digest(self, bucket: int, generation: int) -> bytes | None:
        """Return the digest of a bucket that was published in `generation`, else None."""
        published, length, digest = ENTRY.unpack_from(self._memory, self._table + bucket * ENTRY.size)
        return bytes(digest[: min(length, MAX_DIGEST_BYTES)]) if published == generation else None

    def close(self) -> None:
        """Close the descriptor. The memory lives on in tensors of `flat` and in other processes."""
        self._locks.unlock()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self.close()

    def _number(self, at: int) -> int:
        at += self._footer
        return int.from_bytes(self._memory[at : at + 8], "little")

    def _set_number(self, at: int, value: int) -> None:
        at += self._footer
        self._memory[at : at + 8] = value.to_bytes(8, "little")


def identity_of(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _sizes(fd: int, path: str) -> tuple[int, int]:
    """Return the bytes of weights and of a bucket. Raises Unavailable unless `fd` is a segment."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # not a memfd
        seals = 0
    if seals & SEALS != SEALS:
        raise Unavailable(f"{path} is not a segment of memory: it can be truncated while it is read")
    file_bytes = os.fstat(fd).st_size
    if file_bytes < FOOTER.size:
        raise Unavailable(f"{path} is not a segment of memory: it has {file_bytes} bytes")
    magic, version, num_buckets, size_bytes, bucket_bytes, _, _ = FOOTER.unpack(
        os.pread(fd, FOOTER.size, file_bytes - FOOTER.size)
    )
    if magic != MAGIC:
        raise Unavailable(f"{path} is not a segment of memory: its last bytes are {magic!r}")
    if version != FORMAT:
        raise WireError(f"the segment {path} has format {version}, but this Paceline reads {FORMAT}")
    consistent = (
        0 < num_buckets <= MAX_BUCKETS
        and bucket_bytes > 0
        and size_bytes > 0
        and num_buckets == -(-size_bytes // bucket_bytes)
        and file_bytes == _file_bytes(size_bytes, num_buckets)
    )
    if not consistent:
        raise Unavailable(
            f"{path} has {file_bytes} bytes, but its footer has {size_bytes} in {num_buckets} buckets of {bucket_bytes}"
        )
    return size_bytes, bucket_bytes


def _file_bytes(size_bytes: int, num_buckets: int) -> int:
    return _page_end(_page_end(size_bytes) + num_buckets * ENTRY.size + FOOTER.size)


def _page_end(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
