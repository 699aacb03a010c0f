"""Maps the tensors of one version in a segment of host memory, which engines in other processes can map too.

The promise: the tensors are views, never copies; while `reading` is held, their bytes do not change. Weights outside a
segment are copied into one of a pair: one is read while the next version is written into the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from paceline.errors import Unavailable
from paceline.weights.format.manifest import WeightManifest
from paceline.weights.format.packing import checksums, plan, views
from paceline.weights.format.verification import pieces_of, verify
from paceline.weights.hosts.segment import HostSegment

if TYPE_CHECKING:
    import torch

MAX_SEGMENTS = 2
POLL_S = 0.002
"""Seconds between two checks whether a reader has stopped reading; the kernel does not announce the end."""


class SegmentPair:
    """A writer's segments, made when needed. None is written while an engine reads it or another operation writes it.
    Any thread may call; only the caller of `begin` writes, until it calls `release`. Memory under an operation that
    does not end is abandoned: it is never reused, and is freed if the operation ends later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: list[HostSegment] = []
        self._writing: list[HostSegment] = []

    def begin(self, size_bytes: int, bucket_bytes: int, timeout_s: float) -> tuple[HostSegment, int]:
        """Return a segment of this size for writing, and its new generation; call `release` with the segment at the
        end. Raises Unavailable if engines read all segments for `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._segments = [
                    s for s in self._segments if (s.size_bytes, s.bucket_bytes) == (size_bytes, bucket_bytes)
                ]
                for segment in self._segments:
                    if segment in self._writing:
                        continue
                    try:
                        generation = segment.begin()
                    except Unavailable:  # an engine reads it
                        continue
                    self._writing.append(segment)
                    return segment, generation
                if (made := self._make(size_bytes, bucket_bytes)) is not None:
                    return made
            if time.monotonic() >= deadline_s:
                raise Unavailable(
                    f"both segments of {size_bytes} bytes are still read after {timeout_s:.1f} s; nothing was overwritten"
                )
            time.sleep(POLL_S)

    def release(self, segment: HostSegment) -> None:
        """End the writing: no operation may write into `segment` any more."""
        with self._lock:
            self._writing = [other for other in self._writing if other is not segment]

    def _make(self, size_bytes: int, bucket_bytes: int) -> tuple[HostSegment, int] | None:
        """Return a new segment and its generation. If there are MAX_SEGMENTS already, return None. But if operations
        that may never end write all of them, the new segment replaces one of them."""
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


State = Literal["received", "compared", "verified"]
"""`received`: nothing is checked. `compared`: the checksums are the sender's. `verified`: besides, all numbers are
finite.
"""


class HostWeights(Mapping[str, "torch.Tensor"]):
    """The tensors of `manifest` in `generation` of `segment`. Engines do the missing checks, then load."""

    def __init__(
        self, segment: HostSegment, generation: int, manifest: WeightManifest, state: State = "received"
    ) -> None:
        self.segment = segment
        self.generation = generation
        self.manifest = manifest
        self.state: State = state

    @classmethod
    def packed(cls, tensors: Mapping[str, torch.Tensor], segments: SegmentPair, timeout_s: float) -> HostWeights:
        """Copy `tensors` into a segment of `segments`, which the caller releases; names that share memory still share
        it. Raises Unavailable if no segment is free within `timeout_s`."""
        layout = plan(tensors, bucket_bytes=1 << 30)
        segment, generation = segments.begin(max(1, layout.total_bytes), layout.bucket_bytes, timeout_s)
        try:
            flat = segment.flat()
            for name, view in views(flat, layout).items():
                view.copy_(tensors[name])
            segment.complete()
            manifest = layout.with_checksums(checksums(flat, layout))
        except BaseException:
            segments.release(segment)
            raise
        return cls(segment, generation, manifest)

    def reading(self) -> AbstractContextManager[None]:
        """Keep the bytes from being overwritten. Raises Unavailable if they were overwritten before."""
        return self.segment.reading(self.generation)

    def verify(self) -> None:
        """Compare checksums and check numbers unless both were done. Raises WireError or InvalidInput, see `verify`."""
        if self.state != "verified":
            pieces, flat = pieces_of(self.manifest), self.segment.flat()
            verify(flat, self.manifest, pieces, digests=self.state == "received")
            self.state = "verified"

    def under_names(self, same: Mapping[str, str]) -> HostWeights:
        """Return the same bytes under further names: each key of `same` gets the tensor that its value names."""
        entries = {entry.name: entry for entry in self.manifest.entries}
        more = tuple(entries[of]._replace(name=name) for name, of in same.items() if name not in entries)
        if not more:
            return self
        manifest = replace(self.manifest, entries=(*self.manifest.entries, *more))
        return HostWeights(self.segment, self.generation, manifest, self.state)

    @cached_property
    def _views(self) -> dict[str, torch.Tensor]:
        return views(self.segment.flat(), self.manifest)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)
