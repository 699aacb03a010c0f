"""Fetching the part files of a stored version: whole, or the heads and then the chunks that a part of the model needs.

Promise: every byte that is returned was compared with a digest that the version's manifest names, or a head that it names.
The next parts are fetched while the caller works on one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from paceline.errors import WireError
from paceline.weights.format.manifest import Algorithm, checksum
from paceline.weights.store.held_weights import HeldWeights
from paceline.weights.store.object_store import Buffer, WeightStore
from paceline.weights.store.part_file import ChunkNote, PartHead, read_head
from paceline.weights.store.store_format import StoredObject, StoredVersion

PARTS_AHEAD = 4
"""Parts that are fetched while an earlier one is worked on."""
GAP_BYTES = 1 << 16
"""Chunks this close together are fetched with one request."""

Chunk = tuple[ChunkNote, Buffer]


class _Place(NamedTuple):
    note: ChunkNote
    start: int
    end: int


class PartFetcher:
    """Fetcher of one run; `in_part` fetches no more of each part file than its head and the needed chunks."""

    def __init__(self, store: WeightStore, run_id: str, *, in_part: bool) -> None:
        self._store = store
        self._run_id = run_id
        self._in_part = in_part
        self._helpers = ThreadPoolExecutor(PARTS_AHEAD, thread_name_prefix="weights-fetch")
        self._lock = threading.Lock()
        self.read_bytes = 0
        """Bytes read from the store so far."""

    def close(self) -> None:
        """End the helpers, without waiting."""
        self._helpers.shutdown(wait=False, cancel_futures=True)

    def whole(self, stored: StoredObject, algorithm: Algorithm) -> Buffer:
        """Return an object. Raises NotFound, Unavailable, and WireError for another size or digest."""
        data = self._store.read(stored.name, stored.size_bytes)
        self._check(data, stored, algorithm)
        return data

    def parts(self, manifest: StoredVersion, held: HeldWeights) -> Iterator[tuple[int, list[Chunk]]]:
        """Yield each part's rank and needed chunks, and note the checksums of all its chunks in `held`.

        A snapshot's layouts are added to `held` as well. Raises as `whole`.
        """
        if manifest.kind == "delta" and len(manifest.parts) != len(held.layouts):
            raise WireError(f"a delta has {len(manifest.parts)} parts, its snapshot {len(held.layouts)}")
        waiting: deque[Future[tuple[PartHead, Buffer | None]]] = deque()
        begun = 0
        try:
            for rank in range(len(manifest.parts)):
                while begun < min(len(manifest.parts), rank + PARTS_AHEAD):
                    waiting.append(self._helpers.submit(self._open, manifest, begun))
                    begun += 1
                head, data = waiting.popleft().result()
                yield rank, self._chunks(manifest, held, rank, head, data)
        finally:
            for future in waiting:
                future.cancel()

    def _open(self, manifest: StoredVersion, rank: int) -> tuple[PartHead, Buffer | None]:
        """Return the head of a part, and the part where it was fetched whole."""
        stored = manifest.parts[rank]
        if self._in_part:
            head = manifest.heads[rank]
            data: Buffer = self._store.read_range(stored.name, 0, head.size_bytes)
            self._check(data, head._replace(name=stored.name), manifest.algorithm)
            return read_head(data, stored.size_bytes), None
        data = self.whole(stored, manifest.algorithm)
        return read_head(data, len(data)), data

    def _chunks(
        self,
        manifest: StoredVersion,
        held: HeldWeights,
        rank: int,
        head: PartHead,
        data: Buffer | None,
    ) -> list[Chunk]:
        header, stored = head.header, manifest.parts[rank]
        found = (header.kind, header.run_id, header.version, header.base, header.rank, header.algorithm)
        wanted = (
            manifest.kind,
            self._run_id,
            manifest.version,
            manifest.base_version,
            rank,
            manifest.algorithm,
        )
        if found != wanted:
            raise WireError(f"{stored.name} says that it is {found}, its manifest {wanted}")
        if manifest.kind == "anchor":
            layout = header.layout(held.plans)
            held.add_rank(layout, [""] * len(layout.chunks))
        layout = held.layouts[rank]
        notes = header.notes_for(layout)
        for note in notes:
            held.checksums[rank][note.chunk] = note.checksum
        if manifest.kind == "anchor" and len({note.chunk for note in notes}) != len(layout.chunks):
            raise WireError(f"{stored.name} has {len(notes)} of {len(layout.chunks)} chunks")
        places = [
            _Place(note, *place)
            for note, place in zip(notes, header.places_of(layout, head.places), strict=True)
            if held.needs(rank, note.chunk)
        ]
        if data is None:
            return self._ranges(stored, places, manifest.algorithm)
        view = memoryview(data)
        return [(place.note, view[place.start : place.end]) for place in places]

    def _ranges(self, stored: StoredObject, places: list[_Place], algorithm: Algorithm) -> list[Chunk]:
        """Fetch chunks of a part, neighbours together."""
        waiting = deque(sorted(places, key=lambda place: place.start))
        found: list[Chunk] = []
        while waiting:
            run = [waiting.popleft()]
            while waiting and waiting[0].start <= run[-1].end + GAP_BYTES:
                run.append(waiting.popleft())
            data = memoryview(self._store.read_range(stored.name, run[0].start, run[-1].end))
            self._count(data)
            for note, start, end in run:
                chunk = data[start - run[0].start : end - run[0].start]
                named = StoredObject(
                    f"chunk {note.chunk} of {stored.name}", end - start, note.digest or note.checksum
                )
                _compare(chunk, named, algorithm)
                found.append((note, chunk))
        return found

    def _check(self, data: Buffer, stored: StoredObject, algorithm: Algorithm) -> None:
        self._count(data)
        _compare(data, stored, algorithm)

    def _count(self, data: Buffer) -> None:
        with self._lock:
            self.read_bytes += len(data)


def _compare(data: Buffer, stored: StoredObject, algorithm: Algorithm) -> None:
    if len(data) != stored.size_bytes:
        raise WireError(f"{stored.name} has {len(data)} bytes, not {stored.size_bytes}")
    digest = checksum(data, algorithm)
    if digest != stored.digest:
        raise WireError(f"{stored.name} has {algorithm} {digest}, not {stored.digest}")
