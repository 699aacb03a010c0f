"""The manifest of a version that travels by hosts: its layout, which of the learner's hosts has which bytes, and a digest of
each piece.

The control plane brings its SHA-256, so whoever passes it on can change nothing. Layout and owners stay the same for all
versions of a run; only the digests change.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, cast

import xxhash

from paceline.errors import WireError
from paceline.groups import Version
from paceline.weights.format.manifest import MAX_MANIFEST_BYTES, WeightManifest
from paceline.weights.hosts.pieces import MAX_PIECES, Owned, Piece, check_owned, plan_pieces

FORMAT = 1
PieceAlgorithm = Literal["xxh3_128", "sha256"]
DIGEST_BYTES = {"xxh3_128": 16, "sha256": 32}


@dataclass(frozen=True)
class HostManifest:
    """One version of one run, or its layout alone where `digests` is empty."""

    run_id: str
    version: Version
    layout: WeightManifest
    owned: tuple[Owned, ...]
    algorithm: PieceAlgorithm
    digests: tuple[bytes, ...] = ()
    """Of each piece."""

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces, in the order of buckets."""
        return plan_pieces(self.owned, self.layout.bucket_bytes)

    @property
    def sources(self) -> int:
        """Number of the learner's hosts."""
        return max((one.source for one in self.owned), default=-1) + 1

    @property
    def size_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(one.end - one.begin for one in self.owned)

    def of(self, version: Version, digests: tuple[bytes, ...]) -> HostManifest:
        """Return the manifest of a version with this layout."""
        return replace(self, version=version, digests=digests)

    def to_bytes(self) -> bytes:
        """As JSON."""
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
        """Read what `to_bytes` wrote. Raises WireError for anything else, before any memory is set aside for it."""
        if len(data) > MAX_MANIFEST_BYTES:
            raise WireError(f"the manifest has {len(data)} bytes; this side reads up to {MAX_MANIFEST_BYTES}")
        try:
            document = json.loads(data)
            if document["format"] != FORMAT:
                raise WireError(f"the manifest has format {document['format']!r}, this side reads {FORMAT}")
            algorithm = document["algorithm"]
            if algorithm not in DIGEST_BYTES:
                raise WireError(
                    f"pieces have digests of {algorithm!r}; this side knows {', '.join(DIGEST_BYTES)}"
                )
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
                f"{self.layout.bucket_bytes}; at most {MAX_PIECES} pieces are received"
            )
        if self.digests and len(self.digests) != len(self.pieces):
            raise WireError(f"the manifest has {len(self.digests)} digests for {len(self.pieces)} pieces")
        if any(len(digest) != DIGEST_BYTES[self.algorithm] for digest in self.digests):
            raise WireError(f"the manifest has digests of another length than {self.algorithm} makes")


def piece_digest(memory: memoryview, piece: Piece, algorithm: PieceAlgorithm) -> bytes:
    """Return the digest of a piece of a version that lies in `memory`."""
    digest = xxhash.xxh3_128() if algorithm == "xxh3_128" else hashlib.sha256()
    for begin, end in piece.ranges:
        digest.update(memory[begin:end])
    return digest.digest()


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} where a count belongs")
    return value
