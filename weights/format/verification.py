"""Comparison of a version's bytes with the sender's checksums: once, on threads beside the one that receives.

The promise: `finish` returns only when every piece has the sender's checksum and every number in it is finite. Each byte is
read from memory once: a chunk that was hashed is looked at for NaN while it is in the processor's cache. Several processes
can share the work, each with its own pieces; then all of them have to succeed.

Threads: the caller reports what has arrived; a piece is hashed by one thread, in order; `finish` waits for all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from paceline.errors import InvalidInput, WireError
from paceline.weights.format.manifest import DTYPE_BYTES, Algorithm, WeightManifest, hasher

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 4 << 20
"""Bytes that are hashed at a time: they stay in the cache, and few enough calls compete for the interpreter."""
THREADS = max(1, min(8, (os.cpu_count() or 1) // 4))
"""Threads of one comparison; one xxh3 thread keeps up with memory, eight SHA-256 threads with a fast network."""


class Piece(NamedTuple):
    """Bytes [start, end) of the flat run with one checksum: a tensor, under the first of its names."""

    start: int
    end: int
    checksum: str
    name: str
    dtype: str


def pieces_of(manifest: WeightManifest) -> list[Piece]:
    """Return a piece for every tensor, by offset; tied names share one. Raises WireError where those have two checksums."""
    pieces: dict[tuple[int, int], Piece] = {}
    for entry in manifest.entries:
        place = (entry.offset, entry.offset + entry.num_bytes)
        piece = pieces.setdefault(place, Piece(*place, entry.checksum, entry.name, entry.dtype))
        if piece.checksum != entry.checksum:
            raise WireError(
                f"tensors {piece.name!r} and {entry.name!r} share their bytes but have the checksums {piece.checksum!r} and "
                f"{entry.checksum!r}"
            )
    return sorted(pieces.values())


def share_of(pieces: Sequence[Piece], index: int, count: int) -> list[Piece]:
    """Return the pieces that process `index` of `count` compares: every piece belongs to one, and the largest share is at most
    one piece larger than the smallest."""
    filled = [0] * count
    share = []
    for piece in sorted(pieces, key=lambda piece: (piece.start - piece.end, piece.start)):
        least = filled.index(min(filled))
        filled[least] += piece.end - piece.start
        if least == index:
            share.append(piece)
    return sorted(share)


class Check:
    """Compares `pieces` (default: all) of `flat` ([total_bytes] uint8 in host memory) while they arrive: `arrived` after every
    bucket, `finish` at the end; as a context manager, it leaves no thread behind.

    Both raise WireError that names the first tensor whose bytes are not the sender's, and InvalidInput for one with NaN or
    infinite elements. With `digests` False the checksums were compared already, and only the numbers are looked at.
    """

    def __init__(
        self,
        flat: torch.Tensor,
        manifest: WeightManifest,
        pieces: Sequence[Piece] | None = None,
        *,
        digests: bool = True,
        threads: int = THREADS,
    ) -> None:
        self._flat = flat
        self._total_bytes = manifest.total_bytes
        chosen = pieces_of(manifest) if pieces is None else pieces
        self._running = [_Running(flat, piece, manifest.algorithm, digests) for piece in chosen]
        self._next = 0
        self._executors = [
            ThreadPoolExecutor(1, "paceline-checksums") for _ in range(max(1, min(threads, len(chosen))))
        ]
        self._futures: list[Future[None]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that are compared."""
        return sum(running.piece.end - running.piece.start for running in self._running)

    def arrived(self, num_bytes: int) -> None:
        """Note that bytes [0, `num_bytes`) have arrived, and begin to compare them."""
        while self._next < len(self._running):
            running = self._running[self._next]
            end = min(running.piece.end, num_bytes)
            if end > running.given or running.piece.start == end:
                running.given = end
                executor = self._executors[self._next % len(self._executors)]
                self._futures.append(executor.submit(running.advance, end))
            if running.piece.end > num_bytes:
                break
            self._next += 1
        while self._futures and self._futures[0].done():
            self._futures.pop(0).result()

    def finish(self) -> None:
        """Return when everything was compared; all bytes have arrived."""
        self.arrived(self._total_bytes)
        while self._futures:
            # No deadline: it hashes memory.
            self._futures.pop(0).result()

    def __enter__(self) -> Check:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for executor in self._executors:
            executor.shutdown(wait=True, cancel_futures=True)


class _Running:
    """The comparison of one piece, advanced by one thread."""

    def __init__(self, flat: torch.Tensor, piece: Piece, algorithm: Algorithm, digests: bool) -> None:
        self.piece = piece
        self.given = piece.start
        """End of the bytes that a thread was asked to hash."""
        self._flat = flat
        self._algorithm = algorithm
        self._hash = hasher(algorithm) if digests else None
        self._hashed = self._inspected = piece.start
        self._finite = True

    def advance(self, end: int) -> None:
        """Hash and inspect up to byte `end` of the flat run; at the piece's end, compare."""
        while self._hashed < end:
            stop = min(self._hashed + CHUNK_BYTES, end)
            if self._hash is not None:
                self._hash.update(self._flat[self._hashed : stop].numpy())
            self._hashed = stop
            whole = stop - (stop - self.piece.start) % DTYPE_BYTES[self.piece.dtype]
            self._finite = self._finite and _is_finite(self._flat[self._inspected : whole], self.piece.dtype)
            self._inspected = whole
        if end == self.piece.end:
            self._compare()

    def _compare(self) -> None:
        # The checksum first: bytes that are not the sender's may look like anything.
        found = self.piece.checksum if self._hash is None else str(self._hash.hexdigest())
        if found != self.piece.checksum:
            raise WireError(
                f"tensor {self.piece.name!r} arrived with {self._algorithm} {found!r}, "
                f"the sender has {self.piece.checksum!r}"
            )
        if not self._finite:
            raise InvalidInput(
                f"weight {self.piece.name!r} has NaN or infinite elements; the old weights go on serving"
            )


def _is_finite(raw: torch.Tensor, dtype: str) -> bool:
    """Return whether all elements are finite. A sum shows it at the speed of memory; only a sum that is not finite needs a
    look at each element."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    if not kind.is_floating_point:
        return True
    elements = raw.view(kind)
    if kind.itemsize == 1:
        elements = elements.float()
    return bool(torch.isfinite(elements.sum())) or bool(torch.isfinite(elements).all())
