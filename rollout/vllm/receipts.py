"""Receipts of an engine's workers for weights that they have mapped and verified, in a page of memory that all of them share.

A worker verifies on a thread while it decodes, so it cannot answer a call; it writes its receipt instead. The promise: a
receipt is for one order and for the reader's own part of these contents, so an old one or another's counts for nothing, and
with all receipts every byte of a version was verified. Orders are numbered for the engine's life, because nothing else tells
two versions apart: two segments count their generations alike, and a manifest that came by hosts has no checksums.

The page is a memfd without a name: it ends with the processes.
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import os
import struct
import time
from dataclasses import dataclass

from paceline.errors import InvalidInput, PacelineError, Unavailable, WireError

SLOT = struct.Struct("<32sQQBxH204s")
"""The receipt, the order's number, the bytes that the reader has verified; of an error its kind, length and text."""
ERROR_BYTES = 204
FAILED = b"\xff" * 32
KINDS: tuple[type[PacelineError], ...] = (Unavailable, WireError, InvalidInput)
"""What an error means to whoever waits, by the number that stands for it."""
POLL_S = 0.002


@dataclass(frozen=True)
class ReadOrder:
    """What a worker is asked to map and verify; it travels as keyword arguments of a call."""

    number: int
    """Number of the order, from `Receipts.next_order`."""
    segment: str
    """Path of the segment, see `HostSegment.open`."""
    generation: int
    manifest: bytes
    digests: bool
    """Whether checksums are to be compared, or were already."""
    receipts: str
    """Path of the page with the receipts."""
    num_readers: int


def receipt_of(content_hash: str, order: int, reader: int) -> bytes:
    """Return the receipt of reader number `reader` for its part of contents with this hash, in order number `order`."""
    return hashlib.sha256(f"{content_hash}/{order}/{reader}".encode()).digest()


class Receipts:
    """The engine's side: a page for `num_readers` workers, for the engine's life."""

    def __init__(self, num_readers: int) -> None:
        self.num_readers = num_readers
        self._fd = os.memfd_create("paceline-receipts", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, num_readers * SLOT.size)
        self._memory = mmap.mmap(self._fd, 0)
        self._orders = 0

    @property
    def path(self) -> str:
        """Path at which the workers, processes of the same user, open the page."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def next_order(self) -> int:
        """Return the number of a new order."""
        self._orders += 1
        return self._orders

    async def verified(self, content_hash: str, order: int, timeout_s: float) -> list[int]:
        """Wait for all receipts of an order, and return the bytes that each reader has verified. Raises the error of a
        reader that failed: WireError for other bytes than the sender's, InvalidInput for numbers that are not finite,
        Unavailable for memory that it could not read; and Unavailable when a receipt is missing after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        missing = set(range(self.num_readers))
        num_bytes = [0] * self.num_readers
        while True:
            for reader in list(missing):
                receipt, of, verified, kind, length, error = SLOT.unpack_from(
                    self._memory, reader * SLOT.size
                )
                if of != order:
                    continue
                if receipt == FAILED:
                    reason = error[: min(length, ERROR_BYTES)].decode(errors="replace")
                    raise KINDS[kind if kind < len(KINDS) else 0](f"worker {reader} of the engine: {reason}")
                if receipt == receipt_of(content_hash, order, reader):
                    missing.remove(reader)
                    num_bytes[reader] = verified
            if not missing:
                return num_bytes
            if time.monotonic() > deadline_s:
                raise Unavailable(
                    f"workers {sorted(missing)} of the engine have not read the new weights within {timeout_s} s"
                )
            # Receipts appear in shared memory, which has no event to wait for.
            await asyncio.sleep(POLL_S)

    def __del__(self) -> None:
        os.close(self._fd)


def write_receipt(path: str, reader: int, receipt: bytes, order: int, num_bytes: int) -> None:
    """Write a reader's receipt: whoever sees it can rely on everything that this thread did before."""
    _write(path, reader, SLOT.pack(receipt, order, num_bytes, 0, 0, b""))


def write_failure(path: str, reader: int, order: int, error: BaseException) -> None:
    """Write the reason why a reader has no receipt."""
    text = (str(error) or repr(error)).encode()[:ERROR_BYTES]
    kind = next((number for number, known in enumerate(KINDS) if isinstance(error, known)), 0)
    _write(path, reader, SLOT.pack(FAILED, order, 0, kind, len(text), text))


def _write(path: str, reader: int, slot: bytes) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        # The receipt comes last, because it makes the rest valid.
        os.pwrite(fd, bytes(32), reader * SLOT.size)
        os.pwrite(fd, slot[32:], reader * SLOT.size + 32)
        os.pwrite(fd, slot[:32], reader * SLOT.size)
    finally:
        os.close(fd)
