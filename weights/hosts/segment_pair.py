"""The two segments of a receiver: one is read while the next version arrives in the other.

The promise: a version is received only into memory that no engine reads and no operation writes. Segments are made when they
are needed, so a receiver whose engine copies a version before the next one comes has one. Memory under an operation
that never ends is given up and never reused; it is freed when the operation ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from paceline.errors import Unavailable
from paceline.weights.hosts.segment import POLL_S, HostSegment

MAX_SEGMENTS = 2


class SegmentPair:
    """The writer's segments. Any thread may call; the caller of `begin` alone writes, until it calls `release` or
    `discard`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: list[HostSegment] = []
        self._writing: list[HostSegment] = []
        self._closed = False

    @property
    def size_bytes(self) -> int:
        """Bytes of weights that the present segments hold together."""
        with self._lock:
            return sum(segment.size_bytes for segment in self._segments)

    def begin(
        self,
        size_bytes: int,
        bucket_bytes: int,
        timeout_s: float,
        *,
        keep: HostSegment | None = None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> tuple[HostSegment, int]:
        """Return a segment of this size, to write, and its new generation; call `release` or `discard` with it at the
        end.

        `keep` is not taken: the newest version, that others still ask for. Raises Unavailable when all are read for
        `timeout_s`, when `given_up` returns True, or after `close`.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if self._closed:
                    raise Unavailable("these segments are closed")
                self._drop_others(size_bytes, bucket_bytes)
                for segment in self._segments:
                    if segment is keep or segment in self._writing:
                        continue
                    try:
                        generation = segment.begin()
                    except Unavailable:  # an engine reads it
                        continue
                    self._writing.append(segment)
                    return segment, generation
                if (made := self._make(size_bytes, bucket_bytes)) is not None:
                    return made
            if given_up() or time.monotonic() >= deadline_s:
                raise Unavailable(
                    f"both segments of {size_bytes} bytes are still read after {timeout_s:.1f} s; nothing was overwritten"
                )
            # The kernel does not announce that a reader has finished.
            time.sleep(POLL_S)

    def release(self, segment: HostSegment) -> None:
        """End writing: no operation writes into `segment` any more."""
        with self._lock:
            self._writing = [other for other in self._writing if other is not segment]

    def discard(self, segment: HostSegment) -> None:
        """Give one segment up: an operation that failed may still write into it. It is freed when nobody uses it."""
        with self._lock:
            self._segments = [other for other in self._segments if other is not segment]
            self._writing = [other for other in self._writing if other is not segment]

    def close(self) -> None:
        """Give all segments up; memory that is still read or written is freed afterwards."""
        with self._lock:
            self._closed = True
            self._segments = []
            self._writing = []

    def _drop_others(self, size_bytes: int, bucket_bytes: int) -> None:
        fitting = [s for s in self._segments if (s.size_bytes, s.bucket_bytes) == (size_bytes, bucket_bytes)]
        self._segments = fitting

    def _make(self, size_bytes: int, bucket_bytes: int) -> tuple[HostSegment, int] | None:
        """Return a new segment where there is room: in place of one that an operation may write for ever, if there must be."""
        if len(self._segments) >= MAX_SEGMENTS:
            stuck = [segment for segment in self._segments if segment in self._writing]
            if len(stuck) < MAX_SEGMENTS:
                return None
            self._segments.remove(stuck[0])
        segment = HostSegment.create(size_bytes, bucket_bytes)
        generation = segment.begin()
        self._segments.append(segment)
        self._writing.append(segment)
        return segment, generation
