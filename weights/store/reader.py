"""Reads weights from the object store: deltas on top of the held version, or a snapshot and the deltas after it.

Promise: the tensors that `fetch` returns are the learner's, bit for bit. Every object has the digest that its manifest
names, the manifests are chained to the one digest that came over the control plane, and the checksum of every changed
chunk is compared before the tensors are returned. An object that is damaged, truncated or of another base is refused,
named in the log, and replaced by reading the snapshot.

One copy of the weights stays in host memory, because a delta needs the bits that it changes. It is changed in place,
chunk by chunk, in several threads, because no two chunks share an element. If an error leaves it half changed, it is
dropped. The next parts are fetched while one part is processed.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline.errors import NotFound, PacelineError, WireError
from paceline.groups import Version
from paceline.host.resources import usable_cores
from paceline.weights.format import delta_codec
from paceline.weights.format.manifest import DTYPE_BYTES, Algorithm, TensorPlan, WeightManifest, checksum
from paceline.weights.format.packing import empty_flat, views
from paceline.weights.store.object_store import Buffer, WeightStore
from paceline.weights.store.store_format import ChunkNote, PartHead, StoredObject, StoredVersion, StoreOffer, read_head
from paceline.weights.store.store_layout import RankLayout, Rows

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

LONGEST_CHAIN = 4096
PARTS_AHEAD = 4
"""Number of parts that are fetched ahead of the part that is processed."""
PARTS_IN_HAND = 4
"""Number of parts whose chunks are decoded at a time."""
MOST_THREADS = 24
NAMES_SHOWN = 3

Bits = npt.NDArray[Any]
Chunk = tuple[ChunkNote, Buffer]


class Damaged(WireError):
    """The store can be read, but its files do not yield the version, so the learner must write a snapshot."""


class StoreReader:
    """Reader of one run, with the last weights that it has read. Used by one thread, which has `threads` helpers."""

    def __init__(self, store: WeightStore, run_id: str, threads: int | None = None) -> None:
        self._store = store
        self._run_id = run_id
        self._held: HeldWeights | None = None
        count = threads or min(MOST_THREADS, max(1, usable_cores() * 3 // 4))
        self._helpers = ThreadPoolExecutor(count, thread_name_prefix="weights-decode")
        self._fetching = ThreadPoolExecutor(PARTS_AHEAD, thread_name_prefix="weights-fetch")
        self._lock = threading.Lock()
        self.read_bytes = 0

    @property
    def held(self) -> Version | None:
        """Version of the held weights, on which a delta can build; None without any."""
        return self._held.version if self._held is not None else None

    def close(self) -> None:
        self._helpers.shutdown(wait=False, cancel_futures=True)
        self._fetching.shutdown(wait=False, cancel_futures=True)

    def fetch(self, offer: StoreOffer) -> dict[str, torch.Tensor]:
        """Return the tensors of the offered version, which belong to this object and are valid until the next call.
        Raises NotFound or Unavailable if the store cannot be read, Damaged if a part in it is damaged."""
        target = self._manifest(offer, offer.manifest, offer.version)
        try:
            deltas = self._deltas_after_held(offer, target)
            if deltas is not None:
                return self._apply(deltas)
        except (WireError, NotFound) as error:
            log.warning("weights %s: %s; reading the snapshot", tuple(offer.version), error)
        # A partly changed copy is dropped.
        self._held = None
        try:
            return self._from_snapshot(offer, target)
        except (WireError, NotFound) as error:
            self._held = None
            raise Damaged(f"{self._store.url}: {error}") from error
        except PacelineError:
            self._held = None
            raise

    def _deltas_after_held(self, offer: StoreOffer, target: StoredVersion) -> list[StoredVersion] | None:
        """Return the deltas from the held version to the target, oldest first; None if a snapshot has fewer bytes."""
        held = self._held
        if held is None:
            return None
        deltas: list[StoredVersion] = []
        size_bytes, manifest = 0, target
        while manifest.version > held.version:
            if manifest.base is None or manifest.base_version is None:
                return None
            deltas.append(manifest)
            size_bytes += manifest.size_bytes
            if size_bytes > offer.snapshot_bytes or len(deltas) > LONGEST_CHAIN:
                return None
            if manifest.base_version == held.version:
                break
            manifest = self._manifest(offer, manifest.base, manifest.base_version)
        if not deltas or deltas[-1].base_version != held.version:
            return None
        if deltas[-1].base_contents != held.contents():
            raise WireError(f"the delta to {tuple(deltas[-1].version)} is for another base than the held version")
        return deltas[::-1]

    def _from_snapshot(self, offer: StoreOffer, target: StoredVersion) -> dict[str, torch.Tensor]:
        snapshot = self._manifest(offer, offer.snapshot, offer.snapshot_version)
        if snapshot.kind != "anchor":
            raise WireError(f"{offer.snapshot.name} is not a snapshot")
        deltas: list[StoredVersion] = []
        manifest = target
        while manifest.version > snapshot.version:
            if manifest.base is None or manifest.base_version is None or len(deltas) > LONGEST_CHAIN:
                raise WireError(f"no deltas lead from {tuple(snapshot.version)} to {tuple(target.version)}")
            deltas.append(manifest)
            if manifest.base_version <= snapshot.version:
                break
            manifest = self._manifest(offer, manifest.base, manifest.base_version)
        if deltas and (deltas[-1].base_version, deltas[-1].base_contents) != (snapshot.version, snapshot.contents):
            raise WireError(f"the delta to {tuple(deltas[-1].version)} is for another base than {offer.snapshot.name}")
        if not deltas and target.contents != snapshot.contents:
            raise WireError(f"{offer.snapshot.name} has other contents than {offer.manifest.name}")
        self._held = held = HeldWeights(snapshot)
        filling = _Chunks(self._helpers)
        for rank, chunks in self._parts(snapshot, held):
            filling.add(self._fill, held, rank, chunks)
        filling.end()
        held.check_complete()
        _check_contents(held, snapshot)
        return self._apply(deltas[::-1])

    def _apply(self, deltas: list[StoredVersion]) -> dict[str, torch.Tensor]:
        """Apply deltas to the held version, oldest first, and compare every changed chunk."""
        held = self._held
        assert held is not None
        unchecked: set[tuple[int, int]] = set()
        try:
            for manifest in deltas:
                held.version = manifest.version
                change = partial(self._change, must_check=manifest is deltas[-1])
                changing = _Chunks(self._helpers)
                for rank, chunks in self._parts(manifest, held):
                    changed = {(rank, note.chunk) for note, _ in chunks}
                    unchecked = unchecked - changed if manifest is deltas[-1] else unchecked | changed
                    changing.add(change, held, rank, chunks)
                changing.end()
            for rank, chunk in sorted(unchecked):
                held.check(rank, chunk, held.read(rank, chunk)[0])
            if deltas:
                _check_contents(held, deltas[-1])
        except BaseException:
            self._held = None
            raise
        return held.tensors

    def _whole(self, stored: StoredObject, algorithm: Algorithm) -> Buffer:
        """Return the bytes of an object. Raises NotFound, Unavailable, and WireError for another size or digest."""
        data = self._store.read(stored.name, stored.size_bytes)
        with self._lock:
            self.read_bytes += len(data)
        if len(data) != stored.size_bytes:
            raise WireError(f"{stored.name} has {len(data)} bytes, not {stored.size_bytes}")
        digest = checksum(data, algorithm)
        if digest != stored.digest:
            raise WireError(f"{stored.name} has {algorithm} {digest}, not {stored.digest}")
        return data

    def _parts(self, manifest: StoredVersion, held: HeldWeights) -> Iterator[tuple[int, list[Chunk]]]:
        """Yield each part's rank and chunks; add checksums and a snapshot's layouts to `held`. Raises as `_whole`."""
        if manifest.kind == "delta" and len(manifest.parts) != len(held.layouts):
            raise WireError(f"a delta has {len(manifest.parts)} parts, but its snapshot has {len(held.layouts)}")
        waiting: deque[Future[tuple[PartHead, Buffer]]] = deque()
        begun = 0
        try:
            for rank in range(len(manifest.parts)):
                while begun < min(len(manifest.parts), rank + PARTS_AHEAD):
                    waiting.append(self._fetching.submit(self._open, manifest, begun))
                    begun += 1
                head, data = waiting.popleft().result()
                yield rank, self._chunks(manifest, held, rank, head, data)
        finally:
            for future in waiting:
                future.cancel()

    def _open(self, manifest: StoredVersion, rank: int) -> tuple[PartHead, Buffer]:
        data = self._whole(manifest.parts[rank], manifest.algorithm)
        return read_head(data, len(data)), data

    def _chunks(
        self, manifest: StoredVersion, held: HeldWeights, rank: int, head: PartHead, data: Buffer
    ) -> list[Chunk]:
        header, stored = head.header, manifest.parts[rank]
        actual = (header.kind, header.run_id, header.version, header.base, header.rank, header.algorithm)
        base, algorithm = manifest.base_version, manifest.algorithm
        expected = (manifest.kind, self._run_id, manifest.version, base, rank, algorithm)
        if actual != expected:
            raise WireError(f"{stored.name} says that it is {actual}, but its manifest says {expected}")
        if manifest.kind == "anchor":
            layout = header.layout(held.plans)
            held.layouts.append(layout)
            held.checksums.append([""] * len(layout.chunks))
        layout = held.layouts[rank]
        notes = header.notes_for(layout)
        for note in notes:
            held.checksums[rank][note.chunk] = note.checksum
        if manifest.kind == "anchor" and len({note.chunk for note in notes}) != len(layout.chunks):
            raise WireError(f"{stored.name} has {len(notes)} of {len(layout.chunks)} chunks")
        view, locations = memoryview(data), header.locations_of(layout, head.locations)
        return [(note, view[start:end]) for note, (start, end) in zip(notes, locations, strict=True)]

    # In the helpers' threads

    def _fill(self, held: HeldWeights, rank: int, note: ChunkNote, data: Buffer) -> None:
        bits_N = np.frombuffer(data, f"u{held.layouts[rank].width(note.chunk)}")
        held.check(rank, note.chunk, bits_N)
        held.write(rank, note.chunk, bits_N)

    def _change(self, held: HeldWeights, rank: int, note: ChunkNote, data: Buffer, *, must_check: bool) -> None:
        bits_N, in_place = held.read(rank, note.chunk)
        positions_K, values_K = delta_codec.decode(data, bits_N)
        bits_N[positions_K] = values_K
        if not in_place:
            held.write(rank, note.chunk, bits_N)
        if must_check:
            held.check(rank, note.chunk, bits_N)

    def _manifest(self, offer: StoreOffer, stored: StoredObject, version: Version) -> StoredVersion:
        data = self._whole(stored, offer.algorithm)
        manifest = StoredVersion.from_bytes(data)
        actual = (manifest.run_id, manifest.version, manifest.algorithm)
        if actual != (offer.run_id, version, offer.algorithm) or offer.run_id != self._run_id:
            raise WireError(
                f"{stored.name} is of {actual}, but the offer is of {(offer.run_id, version, offer.algorithm)}"
            )
        return manifest


class _Chunks:
    """Work on the chunks of several parts at a time."""

    def __init__(self, helpers: ThreadPoolExecutor) -> None:
        self._helpers = helpers
        self._parts: deque[list[Future[None]]] = deque()

    def add(
        self,
        work: Callable[[HeldWeights, int, ChunkNote, Buffer], None],
        held: HeldWeights,
        rank: int,
        chunks: Iterable[tuple[ChunkNote, Buffer]],
    ) -> None:
        """Begin to work on the chunks of a part. Raises the error of earlier work."""
        while len(self._parts) >= PARTS_IN_HAND:
            self._wait()
        self._parts.append([self._helpers.submit(work, held, rank, note, data) for note, data in chunks])

    def end(self) -> None:
        """Wait for all work. Raises the first error."""
        while self._parts:
            self._wait()

    def _wait(self) -> None:
        for future in self._parts.popleft():
            future.result()


def _check_contents(held: HeldWeights, manifest: StoredVersion) -> None:
    if held.contents() != manifest.contents:
        raise WireError(f"version {tuple(manifest.version)} has other contents than its manifest")


class HeldWeights:
    """All weights of one version: at first the version of `snapshot`, later the version of the newest applied delta."""

    def __init__(self, snapshot: StoredVersion) -> None:
        self.version = snapshot.version
        self.algorithm: Algorithm = snapshot.algorithm
        self.plans: dict[str, TensorPlan] = {plan.name: plan for plan in snapshot.tensors}
        try:
            layout = WeightManifest.plan(snapshot.tensors, bucket_bytes=1 << 28)
        except (ValueError, KeyError) as error:
            raise WireError(f"snapshot of {tuple(snapshot.version)}: {error}") from error
        flat = empty_flat(layout)
        self.tensors: dict[str, torch.Tensor] = views(flat, layout)
        raw = flat.numpy()
        self._bits: dict[str, Bits] = {}
        for entry in layout.entries:
            if self.plans[entry.name].same_as is None:
                run = raw[entry.offset : entry.offset + entry.num_bytes]
                self._bits[entry.name] = run.view(f"u{DTYPE_BYTES[entry.dtype]}").reshape(entry.shape or 1)
        self.layouts: list[RankLayout] = []
        self.checksums: list[list[str]] = []

    def read(self, rank: int, chunk: int) -> tuple[Bits, bool]:
        """Return ([N] the bits of a chunk, true if they are the held memory itself, not a copy)."""
        runs = [self._piece(rank, piece) for piece in self.layouts[rank].chunks[chunk]]
        if len(runs) == 1 and runs[0].flags.c_contiguous:
            return runs[0].reshape(-1), True
        return np.concatenate([run.reshape(-1) for run in runs]), False

    def write(self, rank: int, chunk: int, bits_N: Bits) -> None:
        end = 0
        for piece in self.layouts[rank].chunks[chunk]:
            run = self._piece(rank, piece)
            start, end = end, end + run.size
            run[...] = bits_N[start:end].reshape(run.shape)

    def check(self, rank: int, chunk: int, bits_N: Bits) -> None:
        """Raise WireError unless these bits of a chunk have the chunk's checksum."""
        digest = checksum(bits_N.view(np.uint8), self.algorithm)
        expected = self.checksums[rank][chunk]
        if digest != expected:
            raise WireError(
                f"version {tuple(self.version)}: chunk {chunk} of rank {rank}, with {self._names(rank, chunk)}, has "
                f"{self.algorithm} {digest}, but the learner has {expected}"
            )

    def contents(self) -> tuple[str, ...]:
        """Return the hash over all chunks of each rank."""
        ranks = zip(self.layouts, self.checksums, strict=True)
        return tuple(layout.contents(checksums) for layout, checksums in ranks)

    def check_complete(self) -> None:
        """Raise WireError unless the blocks of all ranks cover every element of every tensor exactly once."""
        blocks: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {name: [] for name in self._bits}
        for layout in self.layouts:
            for block in layout.blocks:
                blocks[block.name].append((block.offsets, block.shape))
        for name, boxes in blocks.items():
            present, needed = sum(math.prod(shape) for _, shape in boxes), math.prod(self.plans[name].shape)
            boxes.sort()
            if present != needed or any(_overlap(*pair) for pair in _may_overlap(boxes)):
                raise WireError(f"the snapshot's parts have {present} of {needed} elements of {name!r}, or duplicates")

    def _names(self, rank: int, chunk: int) -> str:
        layout = self.layouts[rank]
        names = [layout.blocks[piece.block].name for piece in layout.chunks[chunk]]
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        return ", ".join(map(repr, names[:NAMES_SHOWN])) + more

    def _piece(self, rank: int, piece: Rows) -> Bits:
        block = self.layouts[rank].blocks[piece.block]
        box = tuple(
            slice(offset, offset + length)
            for offset, length in zip(block.offsets or (0,), block.shape or (1,), strict=True)
        )
        return self._bits[block.name][box][piece.first : piece.last]


Box = tuple[tuple[int, ...], tuple[int, ...]]


def _may_overlap(boxes: list[Box]) -> list[tuple[Box, Box]]:
    """Return the pairs of sorted boxes that share rows."""
    pairs = []
    for index, (offsets, shape) in enumerate(boxes):
        for second in boxes[index + 1 :]:
            if not offsets or second[0][0] >= offsets[0] + shape[0]:
                break
            pairs.append(((offsets, shape), second))
    return pairs


def _overlap(first: Box, second: Box) -> bool:
    return all(a < b + m and b < a + n for a, n, b, m in zip(first[0], first[1], second[0], second[1], strict=True))
