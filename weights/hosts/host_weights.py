"""The tensors of one version in a segment of host memory, as a mapping that engines in other processes can map too.

The promise: the tensors are views, nothing is copied; while `reading` is held, their bytes do not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from paceline.weights.format.manifest import WeightManifest
from paceline.weights.format.packing import checksums, plan, views
from paceline.weights.format.verification import Check
from paceline.weights.hosts.segment import HostSegment
from paceline.weights.hosts.segment_pair import SegmentPair

if TYPE_CHECKING:
    import torch


State = Literal["received", "compared", "verified"]
"""Received: as the bytes came. Compared: they are the sender's. Verified: and every number is finite."""


class HostWeights(Mapping[str, "torch.Tensor"]):
    """The tensors that `manifest` places in `generation` of `segment`.

    An engine loads nothing before the bytes are `verified`, and does what is left of that itself.
    """

    def __init__(
        self, segment: HostSegment, generation: int, manifest: WeightManifest, state: State = "received"
    ) -> None:
        self.segment = segment
        self.generation = generation
        self.manifest = manifest
        self.state: State = state

    @classmethod
    def packed(
        cls, tensors: Mapping[str, torch.Tensor], segments: SegmentPair, timeout_s: float
    ) -> HostWeights:
        """Copy `tensors` into a segment of `segments`, which the caller releases; names of one memory stay one.

        Raises Unavailable when no segment is free within `timeout_s`.
        """
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
        """Keep the bytes from being overwritten. Raises Unavailable when they were already."""
        return self.segment.reading(self.generation)

    def verify(self) -> None:
        """Do what is left of comparing checksums and looking at numbers. Raises WireError or InvalidInput, see `Check`."""
        if self.state != "verified":
            with Check(self.segment.flat(), self.manifest, digests=self.state == "received") as check:
                check.finish()
            self.state = "verified"

    def under_names(self, same: Mapping[str, str]) -> HostWeights:
        """Return the same bytes under further names: each key of `same` shows the tensor that its value names."""
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
