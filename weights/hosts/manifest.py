"""The manifest of a version that hosts send to each other. It has the layout, the bytes that each of the learner's
hosts has, and the digest of each piece.

The control plane sends the manifest's SHA-256, so a host that passes the manifest on cannot change it. Layout and
owners stay the same for all versions of a run; only the digests change.

A version is one flat run of bytes (`paceline.weights.format.manifest`), and each of the learner's hosts has some
ranges. A *piece* is the part of one bucket that one of these hosts has: it has one digest, and is sent, verified and
passed on as a whole. With a single learner host the pieces are the buckets.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import xxhash

from paceline.errors import WireError
from paceline.groups import Version
from paceline.v1 import common_pb2
from paceline.weights.format.manifest import ALIGNMENT_BYTES, MAX_MANIFEST_BYTES, WeightManifest

MIN_BUCKET_BYTES = 256 << 10
MAX_BUCKET_BYTES = 16 << 20
BUCKETS = 1024
"""Number of buckets of a large version: a chain of 200 hosts then takes a fifth longer than one hop."""
MAX_PIECES = 1 << 20


class Owned(NamedTuple):
    """Bytes [begin, end) of a version on one of the learner's hosts."""

    begin: int
    end: int
    source: int
    """Index of the host among the learner's hosts."""


class Piece(NamedTuple):
    """The part of one bucket that one of the learner's hosts has."""

    bucket: int
    source: int
    ranges: tuple[tuple[int, int], ...]
    """Byte ranges [begin, end) within the version, ascending."""

    @property
    def size_bytes(self) -> int:
        return sum(end - begin for begin, end in self.ranges)


def bucket_bytes_for(total_bytes: int) -> int:
    """Return the bucket size: small enough to fill a chain of hosts soon, large enough for few buckets."""
    return min(max(total_bytes // BUCKETS, MIN_BUCKET_BYTES), MAX_BUCKET_BYTES)


def joined(owned: Iterable[Owned]) -> tuple[Owned, ...]:
    """Return the ranges in order, neighbours of one source joined. Alignment gaps belong to the range before."""
    whole: list[Owned] = []
    for source_range in sorted(owned):
        if whole and whole[-1].source == source_range.source and source_range.begin - whole[-1].end < ALIGNMENT_BYTES:
            whole[-1] = whole[-1]._replace(end=source_range.end)
        else:
            whole.append(source_range)
    return tuple(whole)


def plan_pieces(owned: Sequence[Owned], bucket_bytes: int) -> tuple[Piece, ...]:
    """Return the pieces of a version in the order of its buckets. `owned` is a result of `joined`."""
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
                f"the range of bytes {one.begin} to {one.end} is not between byte {end} and byte {layout.total_bytes}"
            )
        end = one.end
    index = 0
    for entry in sorted(layout.entries, key=lambda entry: entry.offset):
        at, stop = entry.offset, entry.offset + entry.num_bytes
        while at < stop:
            while index < len(owned) and owned[index].end <= at:
                index += 1
            if index == len(owned) or owned[index].begin > at:
                raise WireError(f"no host has byte {at} of tensor {entry.name!r}")
            at = owned[index].end


FORMAT = 1
PieceAlgorithm = Literal["xxh3_128", "sha256"]
DIGEST_BYTES = {"xxh3_128": 16, "sha256": 32}


@dataclass(frozen=True)
class HostManifest:
    """One version of one run, or its layout alone if `digests` is empty."""

    run_id: str
    version: Version
    layout: WeightManifest
    owned: tuple[Owned, ...]
    algorithm: PieceAlgorithm
    digests: tuple[bytes, ...] = ()
    """Digest of each piece, in the order of `pieces`."""

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        return plan_pieces(self.owned, self.layout.bucket_bytes)

    @property
    def sources(self) -> int:
        return max((one.source for one in self.owned), default=-1) + 1

    @property
    def size_bytes(self) -> int:
        return sum(one.end - one.begin for one in self.owned)

    def of(self, version: Version, digests: tuple[bytes, ...]) -> HostManifest:
        """Return the manifest of a version with this layout."""
        return replace(self, version=version, digests=digests)

    def to_bytes(self) -> bytes:
        document = {
            "format": FORMAT,
            "run_id": self.run_id,
            "version": list(self.version),
            "layout": self.layout.to_bytes().decode(),
            "owned": [list(one) for one in self.owned],
            "algorithm": self.algorithm,
            "digests": [digest.hex() for digest in self.digests],
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> HostManifest:
        """Read the result of `to_bytes`. Raises WireError for anything else, before any memory is allocated for it."""
        if len(data) > MAX_MANIFEST_BYTES:
            raise WireError(f"the manifest has {len(data)} bytes, more than {MAX_MANIFEST_BYTES}")
        try:
            document = json.loads(data)
            if document["format"] != FORMAT:
                raise WireError(f"the manifest has format {document['format']!r}, but this Paceline reads {FORMAT}")
            algorithm = document["algorithm"]
            if algorithm not in DIGEST_BYTES:
                raise WireError(f"the pieces have digests of {algorithm!r}; use one of {', '.join(DIGEST_BYTES)}")
            session, step = document["version"]
            manifest = cls(
                str(document["run_id"]),
                Version(_whole(session), _whole(step)),
                WeightManifest.from_bytes(document["layout"].encode()),
                tuple(Owned(_whole(b), _whole(e), _whole(s)) for b, e, s in document["owned"]),
                cast(PieceAlgorithm, algorithm),
                tuple(bytes.fromhex(text) for text in document["digests"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WireError(f"the manifest cannot be read: {str(error)[:200]!r}") from error
        manifest._check()
        return manifest

    def _check(self) -> None:
        check_owned(self.owned, self.layout)
        if self.layout.total_bytes // self.layout.bucket_bytes * max(1, self.sources) > MAX_PIECES:
            raise WireError(
                f"the manifest cuts {self.layout.total_bytes} bytes of {self.sources} hosts into buckets of "
                f"{self.layout.bucket_bytes} bytes; at most {MAX_PIECES} pieces are received"
            )
        if self.digests and len(self.digests) != len(self.pieces):
            raise WireError(f"the manifest has {len(self.digests)} digests for {len(self.pieces)} pieces")
        if any(len(digest) != DIGEST_BYTES[self.algorithm] for digest in self.digests):
            raise WireError(f"the manifest has digests of another length than {self.algorithm} makes")


def piece_digest(memory: memoryview, piece: Piece, algorithm: PieceAlgorithm) -> bytes:
    """Return the digest of one piece of the version in `memory`."""
    digest = xxhash.xxh3_128() if algorithm == "xxh3_128" else hashlib.sha256()
    for begin, end in piece.ranges:
        digest.update(memory[begin:end])
    return digest.digest()


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a count")
    return value


def version_of(message: Any) -> Version:
    return Version(message.version.session, message.version.step)


def version_message(version: Version) -> common_pb2.PolicyVersion:
    return common_pb2.PolicyVersion(session=version.session, step=version.step)
