"""The versions that a host holds in segments of shared memory: a version is passed on and loaded while the next one
arrives.

Pieces arrive in any order, each verified before it is noted here; threads that pass the version on wait for the next
piece. The promise: a segment is written only while no engine of the host reads it, according to the kernel's file
locks. Readers on other hosts do not keep a version: of two segments that other hosts read, the older one is
overwritten, and its readers are told that the version is gone. Staging waits for nobody: if engines read both segments,
a third one is made, and dropped later. One condition guards all state; waiting threads are woken at every change.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from paceline.errors import Unavailable
from paceline.groups import Version
from paceline.weights.hosts.manifest import HostManifest, Piece, piece_digest
from paceline.weights.hosts.segment import HostSegment

SEGMENTS = 2
MAX_SEGMENTS = 3
ENGINES_POLL_S = 0.01
"""Seconds between two checks whether an engine has stopped reading; the kernel does not announce the end."""


class HeldVersion:
    """A version in a segment, complete or not. The condition of `HeldVersions` guards everything but the bytes."""

    def __init__(
        self, layout: HostManifest, version: Version, segment: HostSegment, generation: int, staged: bool
    ) -> None:
        self.run_id, self.version = layout.run_id, version
        self.layout = layout
        self.pieces: Sequence[Piece] = layout.pieces
        self.segment, self.generation = segment, generation
        self.memory = segment.memory()
        self.staged = staged
        """True if learner ranks of this host write the version."""
        self.manifest: HostManifest | None = None
        self.manifest_bytes = b""
        self.present = bytearray(len(self.pieces))
        """For each piece, 1 if it is verified, else 0."""
        self.arrived: list[int] = []
        """Indices of the verified pieces, in order of arrival."""
        self.verified_bytes = 0
        self.gone = False
        """True once the segment is being overwritten, or the version was dropped."""
        self.readers = 0
        """Number of readers on other hosts."""
        self.writers = 0
        """Number of threads of this process and ranks of this host that write the version."""
        self.ranks_done: set[int] = set()

    @property
    def complete(self) -> bool:
        return self.manifest is not None and len(self.arrived) == len(self.pieces)

    @property
    def is_current(self) -> bool:
        """Return whether the bytes are still this version's."""
        return not self.gone and self.segment.generation == self.generation


class HeldVersions:
    """The versions of one run that a host holds. Any thread may call."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._held: list[HeldVersion] = []
        """Held versions by age, the oldest first; at most one for each segment."""
        self._segments: list[HostSegment] = []
        self.run_id = ""
        self.wanted: Version | None = None
        """Newest version that was planned for this host; older ones no longer begin to arrive."""
        self.closed = False

    def use_run(self, run_id: str) -> None:
        """Hold versions of this run from now on; versions of another run are dropped."""
        with self.changed:
            if run_id == self.run_id:
                return
            self.run_id, self.wanted = run_id, None
            for held in self._held:
                held.gone = True
            self._held, self._segments = [], []
            self.changed.notify_all()

    def find(self, run_id: str, version: Version) -> HeldVersion | None:
        """Return the version if this host has or receives it; else None."""
        with self.changed:
            return next((h for h in self._held if h.run_id == run_id and h.version == version), None)

    def newest_complete(self) -> HeldVersion | None:
        """Return the newest version of which this host has all bytes."""
        with self.changed:
            complete = [held for held in self._held if held.complete]
            return max(complete, key=lambda held: held.version, default=None)

    def will_come(self, version: Version) -> bool:
        """Return whether a version that this host lacks may still arrive: no newer one is complete or planned."""
        with self.changed:
            newest = self.newest_complete()
            is_older = newest is not None and version < newest.version
            return not (is_older or (self.wanted is not None and version < self.wanted))

    def begin(self, layout: HostManifest, version: Version, *, staged: bool, wait_s: float) -> HeldVersion | None:
        """Return memory for a version: the memory that already holds it, or the memory of an older version. Return None
        if engines read all segments for `wait_s`, or if a newer version came. A staged version always gets memory."""
        deadline_s = time.monotonic() + wait_s
        while True:
            with self.changed:
                if self.closed or layout.run_id != self.run_id:
                    return None
                here = next((h for h in self._held if h.version == version), None)
                if here is not None:
                    here.staged = here.staged or staged
                    return here
                taken = self._take(layout.layout.total_bytes, layout.layout.bucket_bytes, staged)
                if taken is not None:
                    held = HeldVersion(layout, version, *taken, staged=staged)
                    self._held.append(held)
                    self.changed.notify_all()
                    return held
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                self.changed.wait(min(left_s, ENGINES_POLL_S))

    def add(self, held: HeldVersion, piece: int, digest: bytes) -> None:
        """Note that a piece was verified, or was written by a rank of this host."""
        with self.changed:
            if held.present[piece] or not held.is_current:
                return
            held.present[piece] = 1
            held.arrived.append(piece)
            held.verified_bytes += held.pieces[piece].size_bytes
            self._publish(held, piece, digest)
            self._note_complete(held)
            self.changed.notify_all()

    def describe(self, held: HeldVersion, manifest: HostManifest, manifest_bytes: bytes) -> None:
        with self.changed:
            if held.manifest is None:
                held.manifest, held.manifest_bytes = manifest, manifest_bytes
                self._note_complete(held)
            self.changed.notify_all()

    def drop(self, held: HeldVersion) -> None:
        """Abandon a version that will not be completed; another one may use its memory."""
        with self.changed:
            held.gone = True
            self._held = [other for other in self._held if other is not held]
            self.changed.notify_all()

    @contextmanager
    def reading(self, held: HeldVersion) -> Iterator[None]:
        """Count a reader on another host while it reads a version. Raises Unavailable if the version is gone."""
        with self.changed:
            if not held.is_current:
                raise Unavailable(f"this host no longer has version {held.version.step}")
            held.readers += 1
        try:
            yield
        finally:
            with self.changed:
                held.readers -= 1
                self.changed.notify_all()

    @contextmanager
    def writing(self, held: HeldVersion) -> Iterator[None]:
        """Keep a version's segment from being reused while it is written."""
        with self.changed:
            held.writers += 1
        try:
            yield
        finally:
            with self.changed:
                held.writers -= 1
                self.changed.notify_all()

    def close(self) -> None:
        """Drop all versions and segments; wake all waiting threads."""
        with self.changed:
            self.closed = True
            for held in self._held:
                held.gone = True
            self._held, self._segments = [], []
            self.changed.notify_all()

    def _take(self, size_bytes: int, bucket_bytes: int, staged: bool) -> tuple[HostSegment, int] | None:
        fitting = [s for s in self._segments if (s.size_bytes, s.bucket_bytes) == (size_bytes, bucket_bytes)]
        for held in self._held:
            held.gone = held.gone or held.segment not in fitting
        self._held = [held for held in self._held if not held.gone]
        self._segments = fitting
        unused = [s for s in fitting if not any(held.segment is s for held in self._held)]
        if not unused and len(fitting) < SEGMENTS:
            return self._make(size_bytes, bucket_bytes)
        quiet = [held for held in self._held if not held.readers]
        read = [held for held in self._held if held.readers]
        for segment in [*unused, *(held.segment for held in (*quiet, *read))]:
            if any(held.writers for held in self._held if held.segment is segment):
                continue
            try:
                generation = segment.begin()
            except Unavailable:  # an engine reads it
                continue
            for held in self._held:
                held.gone = held.gone or held.segment is segment
            self._held = [held for held in self._held if not held.gone]
            if len(self._segments) > SEGMENTS:  # the third one, no longer needed
                self._segments = [other for other in self._segments if other is not segment]
                continue
            return segment, generation
        if staged and len(fitting) < MAX_SEGMENTS:
            return self._make(size_bytes, bucket_bytes)
        return None

    def _make(self, size_bytes: int, bucket_bytes: int) -> tuple[HostSegment, int]:
        segment = HostSegment.create(size_bytes, bucket_bytes)
        self._segments.append(segment)
        return segment, segment.begin()

    def _publish(self, held: HeldVersion, piece: int, digest: bytes) -> None:
        """Publish the bucket of a piece to the engines, once all pieces of the bucket are present."""
        bucket = held.pieces[piece].bucket
        parts = [index for index in _pieces_of(held, piece) if held.pieces[index].bucket == bucket]
        if all(held.present[index] for index in parts):
            # With several sources no host has the digest of the whole; engines compare with what was verified here.
            whole = digest if len(parts) == 1 else piece_digest(held.memory, _whole_bucket(held, bucket), "xxh3_128")
            held.segment.publish(bucket, whole)

    def _note_complete(self, held: HeldVersion) -> None:
        if held.complete and held.is_current:
            held.segment.complete()


def _pieces_of(held: HeldVersion, piece: int) -> range:
    """Return indices around `piece` that include all pieces of its bucket, because pieces are in bucket order."""
    sources = max(1, held.layout.sources)
    return range(max(0, piece - sources), min(len(held.pieces), piece + sources + 1))


def _whole_bucket(held: HeldVersion, bucket: int) -> Piece:
    begin = bucket * held.segment.bucket_bytes
    end = min(begin + held.segment.bucket_bytes, held.segment.size_bytes)
    return Piece(bucket, 0, ((begin, end),))
