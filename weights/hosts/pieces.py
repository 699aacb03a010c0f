"""The parts in which a version travels between hosts.

A version is one flat run of bytes (`paceline.weights.format.manifest`), of which each of the learner's hosts has some ranges. A
*piece* is what one of these hosts has of one bucket: what a digest is for, what is sent, verified and passed on as a whole.
With a single learner host the pieces are the buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from paceline.errors import WireError
from paceline.weights.format.manifest import ALIGNMENT_BYTES, WeightManifest

MIN_BUCKET_BYTES = 256 << 10
MAX_BUCKET_BYTES = 16 << 20
BUCKETS = 1024
"""Buckets of a large version: a chain of 200 hosts then takes a fifth longer than one hop."""
MAX_PIECES = 1 << 20


class Owned(NamedTuple):
    """Bytes [begin, end) of a version that one of the learner's hosts has."""

    begin: int
    end: int
    source: int
    """Index of the host among the learner's."""


class Piece(NamedTuple):
    """What one of the learner's hosts has of one bucket."""

    bucket: int
    source: int
    ranges: tuple[tuple[int, int], ...]
    """[begin, end) within the version, ascending."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all ranges."""
        return sum(end - begin for begin, end in self.ranges)


def bucket_bytes_for(total_bytes: int) -> int:
    """Return the size of a bucket: small enough that a chain of hosts is filled soon, large enough to cost no time by number."""
    return min(max(total_bytes // BUCKETS, MIN_BUCKET_BYTES), MAX_BUCKET_BYTES)


def joined(owned: Iterable[Owned]) -> tuple[Owned, ...]:
    """Return the ranges in order, neighbours of one source as one range; the gap of an alignment belongs to what is before it."""
    whole: list[Owned] = []
    for one in sorted(owned):
        if whole and whole[-1].source == one.source and one.begin - whole[-1].end < ALIGNMENT_BYTES:
            whole[-1] = whole[-1]._replace(end=one.end)
        else:
            whole.append(one)
    return tuple(whole)


def plan_pieces(owned: Sequence[Owned], bucket_bytes: int) -> tuple[Piece, ...]:
    """Return the pieces in the order of buckets. `owned` is as `joined` returns it."""
    ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for begin, end, source in owned:
        while begin < end:
            bucket = begin // bucket_bytes
            stop = min(end, (bucket + 1) * bucket_bytes)
            ranges.setdefault((bucket, source), []).append((begin, stop))
            begin = stop
    return tuple(Piece(bucket, source, tuple(parts)) for (bucket, source), parts in sorted(ranges.items()))


def check_owned(owned: Sequence[Owned], layout: WeightManifest) -> None:
    """Raise WireError unless the ranges are disjoint, ascending and cover every tensor of the layout."""
    end = 0
    for one in owned:
        if not end <= one.begin < one.end <= layout.total_bytes or one.source < 0:
            raise WireError(
                f"a range of {one.begin} to {one.end} bytes of {layout.total_bytes} comes after byte {end}"
            )
        end = one.end
    place = 0
    for entry in sorted(layout.entries, key=lambda entry: entry.offset):
        at, stop = entry.offset, entry.offset + entry.num_bytes
        while at < stop:
            while place < len(owned) and owned[place].end <= at:
                place += 1
            if place == len(owned) or owned[place].begin > at:
                raise WireError(f"nobody has byte {at} of tensor {entry.name!r}")
            at = owned[place].end
