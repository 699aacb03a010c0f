"""A version of the weights in anonymous shared memory: written by one process, read and verified by an engine's workers.

The memory is a memfd, so it has no name in /dev/shm that could be left behind, and no container's /dev/shm is too small
for it; it is freed with the last process that holds it. A reader computes the checksum of every tensor, and writes the
hash of all at its offset at the end of the memory, its *receipt*. The writer compares the receipts: only when every reader
has seen the writer's bytes, a model is changed.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from paceline.errors import Unavailable
from paceline.weights.manifest import WeightManifest
from paceline.weights.packing import checksums, plan, views

RECEIPT_BYTES = 32
FAILED = b"\xff" * RECEIPT_BYTES
log = logging.getLogger(__name__)


class SharedWeights:
    """The writer's side. A reader of the same user needs `path` and `manifest`, while this is open."""

    def __init__(self, weights: Mapping[str, Tensor], num_readers: int) -> None:
        layout = plan(weights, bucket_bytes=1 << 30)
        self.num_readers = num_readers
        self._fd = os.memfd_create("paceline-weights", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, layout.total_bytes + num_readers * RECEIPT_BYTES)
        self._memory = mmap.mmap(self._fd, 0)
        flat = torch.frombuffer(self._memory, dtype=torch.uint8)[: layout.total_bytes]
        for name, view in views(flat, layout).items():
            view.copy_(weights[name])
        manifest = layout.with_checksums(checksums(flat, layout))
        self._expected = bytes.fromhex(manifest.content_hash)
        self._receipts = layout.total_bytes
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.manifest = manifest.to_bytes()

    async def verified(self, timeout_s: float) -> None:
        """Wait for the receipts of all readers. Raises Unavailable: one is missing after `timeout_s`, or differs."""
        deadline_s = time.monotonic() + timeout_s
        missing = set(range(self.num_readers))
        while missing:
            for reader in list(missing):
                receipt = self._receipt(reader)
                if receipt == self._expected:
                    missing.remove(reader)
                elif any(receipt):
                    raise Unavailable(
                        f"worker {reader} of the engine could not read the new weights or saw other bytes "
                        f"(receipt {receipt.hex()[:16]}, expected {self._expected.hex()[:16]}); its log says more"
                    )
            if missing and time.monotonic() > deadline_s:
                raise Unavailable(
                    f"workers {sorted(missing)} of the engine have not read the new weights within {timeout_s} s"
                )
            # Receipts appear in shared memory, which has no event to wait for.
            await asyncio.sleep(0.002 if missing else 0)

    def _receipt(self, reader: int) -> bytes:
        start = self._receipts + reader * RECEIPT_BYTES
        return self._memory[start : start + RECEIPT_BYTES]

    def close(self) -> None:
        """Release the memory; it is freed when the readers have released it too."""
        os.close(self._fd)


def read_shared(path: str, manifest: bytes, reader: int, take: Callable[[dict[str, Tensor]], None]) -> None:
    """Give the tensors to `take` as verified views of the shared memory, and then write the receipt of reader number `reader`:
    who sees the receipt can rely on `take` having returned.
    """
    layout = WeightManifest.from_bytes(manifest)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(fd, 0)
    finally:
        os.close(fd)
    start = layout.total_bytes + reader * RECEIPT_BYTES
    try:
        flat = torch.frombuffer(memory, dtype=torch.uint8)[: layout.total_bytes]
        seen = layout.with_checksums(checksums(flat, layout))
        take(views(flat, layout))
        memory[start : start + RECEIPT_BYTES] = bytes.fromhex(seen.content_hash)
    except BaseException:
        memory[start : start + RECEIPT_BYTES] = FAILED
        raise
