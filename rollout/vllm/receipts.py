"""Receipts of an engine's workers for weights that they have mapped and verified, in a page of memory that they share.

A worker verifies on a thread while it decodes, so it cannot answer a call; it writes its receipt instead. The promise:
a receipt is valid only for one order and for the reader's part of these contents, so an old receipt or another reader's
receipt does not count. If all receipts are there, every byte of a version was verified. Orders are numbered for the
engine's life, because nothing else distinguishes two versions: two segments count their generations alike, and a
manifest that came by hosts has no checksums. The page is a memfd without a name: it ends with the processes.
"""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import os
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.errors import InvalidInput, PacelineError, Unavailable, WireError
from paceline.weights.format.manifest import WeightManifest
from paceline.weights.format.packing import views
from paceline.weights.format.verification import pieces_of, share_of, verify
from paceline.weights.hosts.host_weights import MAX_SEGMENTS
from paceline.weights.hosts.segment import HostSegment, identity_of

SLOT = struct.Struct("<32sQQBxH204s")
"""Fields of a reader's entry: receipt, order number, number of verified bytes; an error's kind, length and text."""
ERROR_BYTES = 204
FAILED = b"\xff" * 32
KINDS: tuple[type[PacelineError], ...] = (Unavailable, WireError, InvalidInput)
"""Error types that the engine raises. The index of a type is the number of its kind."""
POLL_S = 0.002


@dataclass(frozen=True)
class ReadOrder:
    """An order for a worker to map and verify a version; it is sent as keyword arguments of a call."""

    number: int
    """Number of the order, from `Receipts.next_order`."""
    segment: str
    """Path of the segment, see `HostSegment.open`."""
    generation: int
    manifest: bytes
    digests: bool
    """True to compare checksums; False if they were compared earlier."""
    receipts: str
    """Path of the page with the receipts."""
    num_readers: int


def receipt_of(content_hash: str, order: int, reader: int) -> bytes:
    """Return the receipt of reader number `reader` for its part of the contents with this hash, in order `order`."""
    return hashlib.sha256(f"{content_hash}/{order}/{reader}".encode()).digest()


class Receipts:
    """Page with the receipts of `num_readers` workers. The engine makes one page, for as long as it lives."""

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
        self._orders += 1
        return self._orders

    async def verified(self, content_hash: str, order: int, timeout_s: float) -> list[int]:
        """Wait for all receipts of an order, and return the number of bytes that each reader has verified. Raises a
        failed reader's error: WireError for other bytes than the sender's, InvalidInput for numbers that are not
        finite, Unavailable for memory that it could not read. Also raises Unavailable if a receipt is missing after
        `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        missing = set(range(self.num_readers))
        num_bytes = [0] * self.num_readers
        while True:
            for reader in list(missing):
                receipt, of, verified, kind, length, error = SLOT.unpack_from(self._memory, reader * SLOT.size)
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
    """Write a reader's receipt. It proves that everything that this thread did before has happened."""
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


@dataclass(frozen=True)
class ReadWeights:
    """A version that a worker has mapped and whose part it has verified."""

    tensors: Mapping[str, Tensor]
    layout_hash: str


class SegmentReader:
    """Reader number `reader` of an engine. `load` runs on the worker's main thread, `read` on others. It maps a segment
    once and compares its part of each version's checksums; the other readers compare the rest. The last two segments
    stay mapped for later versions. If the worker has a GPU, the pages that it loads stay locked, so that a later
    version is loaded at bus speed."""

    def __init__(self, reader: int, device: torch.device) -> None:
        self._reader = reader
        self._on_gpu = device.type == "cuda"
        self._lock = threading.Lock()
        self._mapped: OrderedDict[tuple[int, int], HostSegment] = OrderedDict()
        self._layout = ""
        self._part: list[tuple[int, int]] = []
        """Byte ranges that this worker loads from weights laid out as `_layout`."""
        self._record: LoadRecord | None = None
        """Record of the loaded ranges, while the first version of a layout is loaded; else None."""
        self.loaded_bytes = 0
        """Number of bytes that this worker loads of a version; 0 before the first."""

    def read(self, order: ReadOrder, take: Callable[[ReadWeights], None]) -> None:
        """Map and verify a version, call `take`, and write the receipt after `take` has returned. An error is written
        to the page and raised."""
        try:
            manifest = WeightManifest.from_bytes(order.manifest)
            segment = self._segment(order.segment)
            if self._on_gpu and manifest.layout_hash == self._layout and self._part:
                segment.page_lock(self._part)
            flat = segment.flat()[: manifest.total_bytes]
            share = share_of(pieces_of(manifest), self._reader, order.num_readers)
            with segment.reading(order.generation):
                num_bytes = verify(flat, manifest, share, digests=order.digests)
            take(ReadWeights(views(flat, manifest), manifest.layout_hash))
        except BaseException as error:
            write_failure(order.receipts, self._reader, order.number, error)
            raise
        receipt = receipt_of(manifest.content_hash, order.number, self._reader)
        write_receipt(order.receipts, self._reader, receipt, order.number, num_bytes)

    def load(self, model: Any, weights: ReadWeights) -> None:
        """Load this worker's part into `model`. Call `finish` afterwards."""
        if self._layout != weights.layout_hash:
            self._layout, self._record = weights.layout_hash, LoadRecord(next(iter(weights.tensors.values())))
        with self._record or nullcontext():
            model.load_weights(iter(weights.tensors.items()))

    def finish(self, finalize: Callable[[], None]) -> None:
        """Call `finalize`, which loads the tensors that vLLM has deferred. Note the ranges of a first version."""
        with self._record or nullcontext():
            finalize()
        if self._record is not None:
            self._part, self.loaded_bytes, self._record = self._record.ranges, self._record.num_bytes, None

    def _segment(self, path: str) -> HostSegment:
        """Return the segment at `path`, with its earlier mapping if it is the same memory."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            identity = identity_of(fd)
        finally:
            os.close(fd)
        with self._lock:
            if identity not in self._mapped:
                self._mapped[identity] = HostSegment.open(path)
            self._mapped.move_to_end(identity)
            while len(self._mapped) > MAX_SEGMENTS:
                self._mapped.popitem(last=False)[1].close()
            return self._mapped[identity]


class LoadRecord(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which bytes of the memory behind `tensor` are copied into a model's tensors."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storage = tensor.untyped_storage().data_ptr()
        self.ranges: list[tuple[int, int]] = []
        """Byte ranges [start, end); a range reaches from the first to the last byte of a copy."""
        self.num_bytes = 0
        """Number of copied bytes."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation; if it copies from the memory into a real tensor, note the source."""
        if func is torch.ops.aten.copy_.default and not args[0].is_meta:
            self._note(args[1])
        elif func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self._note(args[0])
        return func(*args, **(kwargs or {}))

    def _note(self, source: Tensor) -> None:
        if source.device.type != "cpu" or source.untyped_storage().data_ptr() != self._storage:
            return
        if not source.numel():
            return
        start = int(source.storage_offset()) * source.itemsize
        last = sum((size - 1) * int(stride) for size, stride in zip(source.shape, source.stride(), strict=True))
        self.ranges.append((start, start + (last + 1) * source.itemsize))
        self.num_bytes += source.nbytes
