"""Compares a version's bytes with the sender's checksums, in several threads, each tensor in one thread.

The promise: `verify` returns only if every piece has the sender's checksum and every number in it is finite. Each byte
is read from memory once: a hashed chunk is checked for NaN while it is in the processor's cache. Several processes can
share the work, each with separate pieces; then all of them have to succeed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from paceline.errors import InvalidInput, WireError
from paceline.weights.format.manifest import Algorithm, WeightManifest, hasher

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 4 << 20
"""Bytes that are hashed at a time, a multiple of every dtype's size: they fit the cache, and the calls are too few to
compete for the interpreter."""
THREADS = max(1, min(8, (os.cpu_count() or 1) // 4))
"""Threads of one comparison: one xxh3 thread is as fast as memory, eight SHA-256 threads as a fast network."""


class TensorBytes(NamedTuple):
    """Bytes [start, end) of the flat run with one checksum: a tensor, under the first of its names."""

    start: int
    end: int
    checksum: str
    name: str
    dtype: str


def pieces_of(manifest: WeightManifest) -> list[TensorBytes]:
    """Return a piece for every tensor, by offset; tied names share one. Raises WireError if they have two checksums."""
    pieces: dict[tuple[int, int], TensorBytes] = {}
    for entry in manifest.entries:
        location = (entry.offset, entry.offset + entry.num_bytes)
        piece = pieces.setdefault(location, TensorBytes(*location, entry.checksum, entry.name, entry.dtype))
        if piece.checksum != entry.checksum:
            raise WireError(
                f"tensors {piece.name!r} and {entry.name!r} share their bytes but have the checksums {piece.checksum!r} and "
                f"{entry.checksum!r}"
            )
    return sorted(pieces.values())


def share_of(pieces: Sequence[TensorBytes], index: int, count: int) -> list[TensorBytes]:
    """Return the pieces that process `index` of `count` compares. The shares differ in size by at most one piece."""
    filled = [0] * count
    share = []
    for piece in sorted(pieces, key=lambda piece: (piece.start - piece.end, piece.start)):
        least = filled.index(min(filled))
        filled[least] += piece.end - piece.start
        if least == index:
            share.append(piece)
    return sorted(share)


def verify(
    flat: torch.Tensor,
    manifest: WeightManifest,
    pieces: Sequence[TensorBytes],
    *,
    digests: bool,
    num_threads: int = THREADS,
    chunk_bytes: int = CHUNK_BYTES,
) -> int:
    """Compare `pieces` of `flat` ([total_bytes] uint8 in host memory) with their checksums; return the number of their
    bytes. Raises WireError with the name of the first tensor whose bytes are not the sender's, and InvalidInput for a
    tensor with NaN or infinite elements. `digests` False: check numbers only, because checksums were compared."""
    check = partial(_verify_piece, flat, manifest.algorithm, digests, chunk_bytes)
    with ThreadPoolExecutor(num_threads, "paceline-checksums") as threads:
        for _ in threads.map(check, pieces):
            pass  # no deadline: it hashes memory
    return sum(piece.end - piece.start for piece in pieces)


def _verify_piece(
    flat: torch.Tensor, algorithm: Algorithm, digests: bool, chunk_bytes: int, piece: TensorBytes
) -> None:
    digest, is_finite = hasher(algorithm), True
    for start in range(piece.start, piece.end, chunk_bytes):
        chunk = flat[start : min(start + chunk_bytes, piece.end)]
        if digests:
            digest.update(chunk.numpy())
        is_finite = is_finite and _is_finite(chunk, piece.dtype)
    # The checksum is compared first, because wrong bytes may contain anything.
    digest_hex = str(digest.hexdigest()) if digests else piece.checksum
    if digest_hex != piece.checksum:
        raise WireError(
            f"tensor {piece.name!r} arrived with {algorithm} {digest_hex!r}, but the sender has {piece.checksum!r}"
        )
    if not is_finite:
        raise InvalidInput(f"weight {piece.name!r} has NaN or infinite elements; the old weights stay in use")


def _is_finite(raw: torch.Tensor, dtype: str) -> bool:
    """Return whether all elements are finite. Elements are checked one by one only if their sum is not finite."""
    import torch

    kind: torch.dtype = getattr(torch, dtype)
    if not kind.is_floating_point:
        return True
    elements = raw.view(kind)
    if kind.itemsize == 1:
        elements = elements.float()
    return bool(torch.isfinite(elements.sum())) or bool(torch.isfinite(elements).all())
