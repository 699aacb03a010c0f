"""Writes versions to the object store: each rank writes its slices, in a thread beside training.

Promise: `put` takes a copy of this rank's slices and returns; comparing, coding, hashing and writing happen in the
background, in several threads and in the same order on all ranks. A version exists once rank 0 has written its
manifest, after every rank's part. The first version of a session is a snapshot; later ones are deltas against the
previous version. A snapshot is added every `anchor_interval` versions, when the deltas since the last snapshot outweigh
it, and after `put_snapshot`.

The thread waits for jobs, then on the board for the other ranks; only `close` ends these waits. A store that fails is
tried again, with the reason in the log, until it works; training goes on. Of the jobs that no rank has begun only the
newest is kept, so a slow store skips versions and memory stays bounded: the kept copy, the version that is being
written, and one version that waits.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from paceline.calls.backoff import ExponentialBackoff
from paceline.errors import PacelineError
from paceline.groups import Version
from paceline.weights.format import delta_codec
from paceline.weights.format.manifest import Algorithm, TensorPlan, checksum
from paceline.weights.store.object_store import Buffer, WeightStore
from paceline.weights.store.offers import Chain, Stored
from paceline.weights.store.rank_board import RankBoard
from paceline.weights.store.store_format import (
    ChunkNote,
    PartHeader,
    StoredObject,
    StoredVersion,
    digest_of,
    folder,
    manifest_name,
    part_chunks,
    part_name,
)
from paceline.weights.store.store_layout import CHUNK_ELEMENTS, RankLayout
from paceline.weights.store.version_source import (
    FoundChanges,
    KeptVersion,
    LocalSlice,
    VersionSource,
    WholeSlices,
    chunk_bits,
)

log = logging.getLogger(__name__)
T = TypeVar("T")
Part = tuple[StoredObject, StoredObject]
"""A part file and its head."""

FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 10.0
CLOSE_WAIT_S = 2.0


class StoreWriter:
    """Writes the versions of one rank. `on_stored` is called on rank 0, from the thread, for every version and
    snapshot. `any_rank` returns whether a fact is true on any rank, which makes `put` and `put_snapshot` collective
    calls. `oldest_held` returns the slowest member's version, for pruning (None: no member needs an old version)."""

    def __init__(
        self,
        *,
        store: WeightStore,
        board: RankBoard,
        run_id: str,
        rank: int,
        world_size: int,
        algorithm: Algorithm,
        anchor_interval: int,
        any_rank: Callable[[bool], bool],
        on_stored: Callable[[Stored], None],
        oldest_held: Callable[[], Version | None],
        threads: int = 1,
        chunk_elements: int = CHUNK_ELEMENTS,
    ) -> None:
        self._store = store
        self._board = board
        self._run_id = run_id
        self._rank = rank
        self._world_size = world_size
        self._algorithm: Algorithm = algorithm
        self._on_stored = on_stored
        self._tensors: tuple[TensorPlan, ...] = ()
        self._jobs = StoreJobs(any_rank)
        self._closed = self._jobs.closed
        self._kept: KeptVersion | None = None
        self._chunk_elements = chunk_elements
        self._helpers = ThreadPoolExecutor(threads, thread_name_prefix="weight-store")
        self._fault: Exception | None = None
        self._chain = Chain(anchor_interval, oldest_held) if rank == 0 else None
        self._thread = threading.Thread(target=self._run, name="weight-store", daemon=True)
        self._thread.start()

    def put(self, version: Version, slices: list[LocalSlice], tensors: tuple[TensorPlan, ...]) -> None:
        """Queue this rank's slices of `tensors` as `version`; they must not change any more. A collective call."""
        self.take(version, lambda replaced: WholeSlices(slices), tensors)

    def take(
        self, version: Version, take: Callable[[VersionSource | None], VersionSource], tensors: tuple[TensorPlan, ...]
    ) -> None:
        """Queue `version`; `take` returns its elements. A collective call. If an earlier version will not be written,
        `take` gets its source, and returns the changes since the version before it."""
        self._tensors = tensors
        self._jobs.put(version, take, wants_snapshot=False)

    def put_snapshot(self) -> None:
        """Queue a snapshot of the newest version. A collective call."""
        self._jobs.put(Version(0, 0), None, wants_snapshot=True)

    def check(self) -> None:
        """Raise the error that ended the thread, if any."""
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """End the thread. Wait a moment for it, never for a store that is stuck."""
        self._jobs.close()
        self._thread.join(CLOSE_WAIT_S)
        self._helpers.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        while (job := self._jobs.begin()) is not None:
            try:
                self._work_on(job)
            except _Closed:
                return
            except Exception as error:
                # A fault in this code, which a retry would repeat; the other ranks wait for this one.
                log.exception("version %s could not be stored", tuple(job.version))
                self._fault = error
                return
            self._jobs.end()

    def _work_on(self, job: Job) -> None:
        before, wants_snapshot = self._kept, job.wants_snapshot
        if job.source is not None and before is None:
            assert isinstance(job.source, WholeSlices), "changes before the first version"
            self._kept = self._keep(job.version, job.source)
        elif job.source is not None and before is not None:
            coded, self._kept = coded_chunks(before, job.version, job.source, self._algorithm, self._helpers.map)
            part = self._write_delta(coded, self._kept, before.version)
            self._leave(f"delta/{job.number}", part, self._kept)
            wants_snapshot = self._finish_delta(job)
            if not wants_snapshot:
                return
        if self._kept is None:
            return
        part = self._write_snapshot(self._kept)
        self._leave(f"anchor/{job.number}", part, self._kept)
        self._finish_snapshot(job, self._kept.version)

    def _keep(self, version: Version, source: WholeSlices) -> KeptVersion:
        layout = RankLayout(tuple(part.block for part in source.slices), self._chunk_elements)
        checksums = list(
            self._helpers.map(
                lambda chunk: checksum(chunk_bits(source.slices, layout, chunk).view("u1"), self._algorithm),
                range(len(layout.chunks)),
            )
        )
        return KeptVersion(version, source.slices, layout, checksums)

    def _write_delta(self, coded: list[CodedChunk], kept: KeptVersion, base: Version) -> Part:
        notes = tuple(chunk.note for chunk in coded)
        header = PartHeader("delta", self._run_id, kept.version, base, self._rank, self._algorithm, notes)
        tensors: list[tuple[str, str, tuple[int, ...], Buffer]] = [
            (str(chunk.note.chunk), "uint8", (len(chunk.payload),), chunk.payload) for chunk in coded
        ]
        return self._write_part(header, tensors)

    def _write_snapshot(self, kept: KeptVersion) -> Part:
        header = PartHeader(
            "anchor",
            self._run_id,
            kept.version,
            None,
            self._rank,
            self._algorithm,
            tuple(ChunkNote(chunk, digest, "") for chunk, digest in enumerate(kept.checksums)),
            kept.layout.blocks,
            kept.layout.chunk_elements,
        )
        tensors: list[tuple[str, str, tuple[int, ...], Buffer]] = [
            (key, part.block.dtype, part.block.shape, part.data)
            for key, part in zip(kept.layout.keys, kept.slices, strict=True)
        ]
        return self._write_part(header, tensors)

    def _write_part(self, header: PartHeader, tensors: list[tuple[str, str, tuple[int, ...], Buffer]]) -> Part:
        chunks = part_chunks(header, tensors)
        name = part_name(header.kind, header.version, self._rank)
        self._retried(lambda: self._store.write(name, chunks))
        part = StoredObject(name, sum(map(len, chunks)), digest_of(chunks, self._algorithm))
        return part, StoredObject(name, len(chunks[0]), checksum(chunks[0], self._algorithm))

    def _leave(self, key: str, part: Part, kept: KeptVersion) -> None:
        """Note on the board that this rank's part is in the store."""
        note = [*part, kept.layout.contents(kept.checksums)]
        self._board.put(f"{key}/{self._rank}", json.dumps(note).encode())

    def _finish_delta(self, job: Job) -> bool:
        """Wait until the version is complete, and return whether all ranks now write a snapshot of it."""
        if self._chain is not None:
            parts, heads, contents = self._all_parts(f"delta/{job.number}")
            chain = self._chain
            manifest = StoredVersion(
                "delta",
                self._run_id,
                job.version,
                self._algorithm,
                parts,
                contents,
                base_version=chain.newest_version,
                base=chain.newest,
                base_contents=chain.contents,
                heads=heads,
            )
            chain.add_delta(manifest, self._retried(lambda: self._write_manifest(manifest)))
            self._tell(job, manifest.size_bytes)
            snapshot_due = job.wants_snapshot or chain.snapshot_is_due()
            self._board.put(f"complete/{job.number}", b"anchor" if snapshot_due else b"-")
        return self._wait(f"complete/{job.number}") == b"anchor"

    def _finish_snapshot(self, job: Job, version: Version) -> None:
        if self._chain is not None:
            parts, heads, contents = self._all_parts(f"anchor/{job.number}")
            manifest = StoredVersion(
                "anchor", self._run_id, version, self._algorithm, parts, contents, tensors=self._tensors, heads=heads
            )
            is_first = self._chain.newest is None
            self._chain.add_snapshot(manifest, self._retried(lambda: self._write_manifest(manifest)))
            self._board.put(f"anchored/{job.number}", b"-")
            self._tell(job, manifest.size_bytes if is_first else 0)
            self._prune(version, is_first)
        self._wait(f"anchored/{job.number}")

    def _tell(self, job: Job, size_bytes: int) -> None:
        assert self._chain is not None
        self._on_stored(self._chain.stored(size_bytes, time.monotonic() - job.staged_s))

    def _all_parts(self, key: str) -> tuple[tuple[StoredObject, ...], tuple[StoredObject, ...], tuple[str, ...]]:
        """Wait until every rank has left its note; return (parts, heads, contents), each by rank."""
        keys = [f"{key}/{rank}" for rank in range(self._world_size)]
        notes = [json.loads(self._wait(key)) for key in keys]
        for key in keys:
            self._board.remove(key)
        parts = tuple(StoredObject(*part) for part, _, _ in notes)
        heads = tuple(StoredObject(*head) for _, head, _ in notes)
        return parts, heads, tuple(contents for *_, contents in notes)

    def _wait(self, key: str) -> bytes:
        note = self._board.wait(key, self._closed)
        if note is None:
            raise _Closed
        return note

    def _write_manifest(self, manifest: StoredVersion) -> StoredObject:
        data, name = manifest.to_bytes(), manifest_name(manifest.kind, manifest.version)
        self._store.write(name, [data])
        return StoredObject(name, len(data), checksum(data, self._algorithm))

    def _prune(self, version: Version, is_first: bool) -> None:
        assert self._chain is not None
        names = self._chain.prune()
        try:
            if is_first:
                # Versions of an earlier session: no member continues its chain.
                session = folder(Version(version.session, 0))
                names += [name for name in self._store.names() if name < session]
            self._store.remove(names)
        except PacelineError as error:
            log.warning("%d old objects stay in the weight store: %s", len(names), error)

    def _retried(self, attempt: Callable[[], T]) -> T:
        backoff = ExponentialBackoff(FIRST_RETRY_S, LONGEST_RETRY_S)
        while True:
            try:
                return attempt()
            except PacelineError as error:
                wait_s = backoff.next_s()
                log.warning("weights cannot be stored, trying again in %.1f s: %s", wait_s, error)
            if self._closed.wait(wait_s):
                raise _Closed


class _Closed(Exception):
    """The writer was closed during a job."""


Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


class CodedChunk(NamedTuple):
    note: ChunkNote
    payload: bytes


def coded_chunks(
    kept: KeptVersion, version: Version, source: VersionSource, algorithm: Algorithm, over: Map
) -> tuple[list[CodedChunk], KeptVersion]:
    """Return the changed chunks and the new version to keep; `over` maps a function over chunks, in threads. Every
    element that differs is in a coded chunk, and the checksums are of the new elements. Elements that the comparison
    on a device found are written to the kept copy here, so the checksums prove that copy, not the device's."""

    def noted(chunk: int, payload: bytes, bits_N: Any) -> CodedChunk:
        note = ChunkNote(chunk, checksum(bits_N.view(np.uint8), algorithm), checksum(payload, algorithm))
        return CodedChunk(note, payload)

    def compared(chunk: int) -> CodedChunk | None:
        new_N = chunk_bits(slices, kept.layout, chunk)
        payload = delta_codec.encode(kept.chunk(chunk), new_N)
        return None if payload is None else noted(chunk, payload, new_N)

    def packed(chunk: int) -> CodedChunk:
        kept.change(chunk, changes[chunk])
        return noted(chunk, delta_codec.pack(changes[chunk].changes), kept.chunk(chunk))

    if isinstance(source, FoundChanges):
        changes, slices = source.chunks, kept.slices
        coded = list(over(packed, changes))
    else:
        slices = source.slices
        coded = [chunk for chunk in over(compared, range(len(kept.layout.chunks))) if chunk is not None]
    checksums = list(kept.checksums)
    for chunk in coded:
        checksums[chunk.note.chunk] = chunk.note.checksum
    return coded, replace(kept, version=version, slices=slices, checksums=checksums)


@dataclass
class Job:
    """A job of the writer: store a version or, with `wants_snapshot`, also a snapshot."""

    number: int
    version: Version
    source: VersionSource | None
    """Elements of this rank; None if the job only writes a snapshot of the newest version."""
    wants_snapshot: bool
    staged_s: float
    begun: bool = False
    held: bool = False
    """True while `put` decides about the job, so that it cannot begin."""


class StoreJobs:
    """Jobs of one rank, the same ones in the same order on all ranks; `any_rank` returns whether a fact is true on any
    rank. One small collective in `put` decides whether any rank has begun a job; during it no job begins here."""

    def __init__(self, any_rank: Callable[[bool], bool]) -> None:
        self.closed = threading.Event()
        self._any_rank = any_rank
        self._jobs: deque[Job] = deque()
        self._count = 0
        self._changed = threading.Condition()

    def put(
        self, version: Version, take: Callable[[VersionSource | None], VersionSource] | None, *, wants_snapshot: bool
    ) -> None:
        """Add a job, or replace the last one that has not begun. A collective call. `take` returns the version's
        elements; it gets the elements of the version that is replaced, if any."""
        with self._changed:
            last = self._jobs[-1] if self._jobs and not self._jobs[-1].begun else None
            if last is not None:
                last.held = True
        overtakes = not self._any_rank(last is None)
        replaced = last.source if overtakes and last is not None else None
        source = None if take is None else take(replaced)
        with self._changed:
            if overtakes and last is not None:
                if source is not None:
                    last.version, last.source = version, source
                last.wants_snapshot |= wants_snapshot
            else:
                self._count += 1
                job = Job(self._count, version, source, wants_snapshot, time.monotonic())
                self._jobs.append(job)
            if last is not None:
                last.held = False
            self._changed.notify_all()

    def begin(self) -> Job | None:
        """Wait for the next job, without a deadline because the learner decides when it comes; None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed.is_set() or (len(self._jobs) > 0 and not self._jobs[0].held))
            if self.closed.is_set():
                return None
            self._jobs[0].begun = True
            return self._jobs[0]

    def end(self) -> None:
        with self._changed:
            self._jobs.popleft()

    def close(self) -> None:
        """Begin no further job."""
        self.closed.set()
        with self._changed:
            self._changed.notify_all()
