"""Writer of versions to the object store: each rank writes its slices, in a thread beside training.

Promise: `put` takes a copy of this rank's slices and returns; comparing, coding and writing happen in the background, in the
same order on all ranks. A version exists once rank 0 has written its manifest, after every rank's part. The first
version of a session is a snapshot; later ones are deltas against the one before, and now and then a snapshot as well:
every `anchor_interval` versions, when the deltas since the last one outweigh it, and after `put_snapshot`.

The thread waits for jobs, then on the board for the other ranks, with no deadline but `close`. A
store that fails is tried again, with the reason in the log, until it works; training goes on. A waiting version is replaced
by the next one (`learner/weights/store/jobs.py`).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from learner.weights.rank_board import RankBoard
from learner.weights.shards import LocalSlice
from learner.weights.store.chain import Chain, Stored
from learner.weights.store.jobs import Job, StoreJobs
from paceline.backoff import ExponentialBackoff
from paceline.errors import PacelineError
from paceline.groups import Version
from paceline.weights.delta_codec import changed_positions, encode
from paceline.weights.manifest import Algorithm, TensorPlan, checksum
from paceline.weights.object_store import Buffer, WeightStore
from paceline.weights.store_format import (
    Kind,
    PartHeader,
    Slice,
    StoredObject,
    StoredVersion,
    content_hash,
    digest_of,
    folder,
    manifest_name,
    part_chunks,
    part_name,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 10.0
CLOSE_WAIT_S = 2.0


@dataclass
class _Kept:
    """The version written last, which is the base of the next delta."""

    version: Version
    slices: list[LocalSlice]
    table: dict[str, Slice]


class StoreWriter:
    """One rank's side. `on_stored` is called on rank 0, from the thread, for every version and for every snapshot.

    `any_rank` returns whether a fact is true on any rank, which makes `put` and `put_snapshot` collective calls.
    `oldest_held` returns the slowest member's version, for pruning (None: no member needs an old version).
    """

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
        self._kept: _Kept | None = None
        self._fault: Exception | None = None
        self._chain = Chain(anchor_interval, oldest_held) if rank == 0 else None
        self._thread = threading.Thread(target=self._run, name="weight-store", daemon=True)
        self._thread.start()

    def put(self, version: Version, slices: list[LocalSlice], tensors: tuple[TensorPlan, ...]) -> None:
        """Queue this rank's slices of `tensors` as `version`; they must not change any more. A collective call."""
        self._tensors = tensors
        self._jobs.put(version, slices, wants_snapshot=False)

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

    # In the thread

    def _run(self) -> None:
        while (job := self._jobs.begin()) is not None:
            try:
                self._work_on(job)
            except _Closed:
                return
            except Exception as error:
                # A fault in this code, which another try would only repeat; the other ranks wait for this one.
                log.exception("version %s could not be stored", tuple(job.version))
                self._fault = error
                return
            self._jobs.end()

    def _work_on(self, job: Job) -> None:
        before = self._kept
        wants_snapshot = job.wants_snapshot
        if job.slices is not None:
            first = before is None
            if before is not None:
                kept, part = self._retried(lambda: self._write_delta(job.version, job.slices or [], before))
            else:
                kept, part = _keep(job.version, job.slices, self._algorithm), None
            self._kept = kept
            if part is not None:
                self._leave(f"delta/{job.number}", part, kept)
                wants_snapshot = self._finish_delta(job)
            if not (first or wants_snapshot):
                return
        if self._kept is None:
            return
        snapshot = self._retried(lambda: self._write_snapshot(self._kept))
        self._leave(f"anchor/{job.number}", snapshot, self._kept)
        self._finish_snapshot(job, self._kept.version)

    def _write_delta(
        self, version: Version, slices: list[LocalSlice], base: _Kept
    ) -> tuple[_Kept, StoredObject]:
        table = dict(base.table)
        changed: list[Slice] = []
        payloads: list[tuple[str, str, tuple[int, ...], Buffer]] = []
        for old, new in zip(base.slices, slices, strict=True):
            changed_K = changed_positions(old.bits, new.bits)
            if not len(changed_K):
                continue
            table[new.name] = Slice(new.name, new.start, len(new.bits), checksum(new.data, self._algorithm))
            payload = encode(old.bits, new.bits, changed_K)
            changed.append(table[new.name])
            payloads.append((new.name, "uint8", (len(payload),), payload))
        part = self._write_part("delta", version, base.version, changed, payloads)
        return _Kept(version, slices, table), part

    def _write_snapshot(self, kept: _Kept | None) -> StoredObject:
        assert kept is not None
        tensors: list[tuple[str, str, tuple[int, ...], Buffer]] = [
            (part.name, part.dtype, part.shape, part.data) for part in kept.slices
        ]
        return self._write_part("anchor", kept.version, None, list(kept.table.values()), tensors)

    def _write_part(
        self,
        kind: Kind,
        version: Version,
        base: Version | None,
        slices: list[Slice],
        tensors: list[tuple[str, str, tuple[int, ...], Buffer]],
    ) -> StoredObject:
        header = PartHeader(kind, self._run_id, version, base, self._rank, self._algorithm, tuple(slices))
        chunks = part_chunks(header, tensors)
        name = part_name(kind, version, self._rank)
        self._store.write(name, chunks)
        return StoredObject(name, sum(map(len, chunks)), digest_of(chunks, self._algorithm))

    def _leave(self, key: str, part: StoredObject, kept: _Kept) -> None:
        """Leave a note that this rank's part is in the store."""
        note = [*part, content_hash(kept.table.values())]
        self._board.put(f"{key}/{self._rank}", json.dumps(note).encode())

    def _finish_delta(self, job: Job) -> bool:
        """Wait until the version is complete, and return whether all ranks now write a snapshot of it."""
        if self._chain is not None:
            parts, contents = self._all_parts(f"delta/{job.number}")
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
            )
            chain.add_delta(manifest, self._retried(lambda: self._write_manifest(manifest)))
            self._tell(job, manifest.size_bytes)
            snapshot_due = job.wants_snapshot or chain.snapshot_is_due()
            self._board.put(f"complete/{job.number}", b"anchor" if snapshot_due else b"-")
        return self._wait(f"complete/{job.number}") == b"anchor"

    def _finish_snapshot(self, job: Job, version: Version) -> None:
        if self._chain is not None:
            parts, contents = self._all_parts(f"anchor/{job.number}")
            manifest = StoredVersion(
                "anchor", self._run_id, version, self._algorithm, parts, contents, tensors=self._tensors
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

    def _all_parts(self, key: str) -> tuple[tuple[StoredObject, ...], tuple[str, ...]]:
        keys = [f"{key}/{rank}" for rank in range(self._world_size)]
        notes = [json.loads(self._wait(key)) for key in keys]
        for key in keys:
            self._board.remove(key)
        return tuple(StoredObject(*note[:3]) for note in notes), tuple(note[3] for note in notes)

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


def _keep(version: Version, slices: list[LocalSlice], algorithm: Algorithm) -> _Kept:
    table = {
        part.name: Slice(part.name, part.start, len(part.bits), checksum(part.data, algorithm))
        for part in slices
    }
    return _Kept(version, slices, table)
