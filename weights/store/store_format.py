"""Format of the delta channel's object store: the manifests that make a version complete, and the names of objects.

A *snapshot* is a version in full, a *delta* its difference from the previous version. Each learner rank writes one part
file (`weights/store/part_file.py`); then rank 0 writes a small manifest that names the parts with their digests, and
only this makes the version exist. A manifest also has the digest of its base's manifest and, by rank, one hash over the
checksums of all chunks before and after. So a reader that was given one digest can check all files down to the
snapshot, and one that reads some chunks only has the digests of the parts' heads, which have those of the chunks.

Names: `<session>-<step>/anchor.0.safetensors`, `<session>-<step>/delta.0.safetensors`, … and `anchor.json`,
`delta.json`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from paceline.errors import WireError
from paceline.groups import Version
from paceline.weights.format.manifest import Algorithm, TensorPlan, algorithm_named, checksum, hasher
from paceline.weights.store.object_store import Buffer

FORMAT = 3
"""Format of manifests and part files."""
Kind = Literal["anchor", "delta"]


class StoredObject(NamedTuple):
    """One object of the store."""

    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True)
class StoredVersion:
    """The manifest of a snapshot or a delta."""

    kind: Kind
    run_id: str
    version: Version
    algorithm: Algorithm
    parts: tuple[StoredObject, ...]
    """By rank."""
    contents: tuple[str, ...]
    """By rank: `RankLayout.contents` in this version."""
    tensors: tuple[TensorPlan, ...] = ()
    """Names, dtypes, shapes and ties of the whole model; empty for a delta."""
    base_version: Version | None = None
    """The version before; None for a snapshot."""
    base: StoredObject | None = None
    """Manifest of the version before; None for a snapshot."""
    base_contents: tuple[str, ...] = ()
    """`contents` of the version before; empty for a snapshot."""
    heads: tuple[StoredObject, ...] = ()
    """By rank: the part's head, the first bytes of the file."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.size_bytes for part in self.parts)

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps({**asdict(self), "format": FORMAT}, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: Buffer) -> StoredVersion:
        """Read what `to_bytes` wrote. Raises WireError for anything else."""
        try:
            document = json.loads(bytes(data))
            if (found := document.pop("format")) != FORMAT:
                raise ValueError(f"format {found!r}, this side reads {FORMAT}")
            if document["kind"] not in ("anchor", "delta"):
                raise ValueError(f"kind {document['kind']!r}")
            algorithm_named(document["algorithm"])
            base, base_version = document.pop("base"), document.pop("base_version")
            manifest = cls(
                version=Version(*map(int, document.pop("version"))),
                parts=tuple(_stored(part) for part in document.pop("parts")),
                contents=tuple(map(str, document.pop("contents"))),
                tensors=tuple(
                    TensorPlan(str(name), str(dtype), tuple(map(int, shape)), same_as)
                    for name, dtype, shape, same_as in document.pop("tensors")
                ),
                base_version=None if base_version is None else Version(*map(int, base_version)),
                base=None if base is None else _stored(base),
                base_contents=tuple(map(str, document.pop("base_contents"))),
                heads=tuple(_stored(part) for part in document.pop("heads")),
                **document,
            )
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            raise WireError(f"no manifest of stored weights: {str(error)[:200]!r}") from error
        if len(manifest.parts) != len(manifest.contents) or (manifest.kind == "delta") != (base is not None):
            raise WireError("manifest of stored weights contradicts itself: parts, contents or base")
        if len(manifest.heads) != len(manifest.parts):
            raise WireError("manifest of stored weights has not one head for each part")
        return manifest


def run_store(place: str | None, run_id: str, directory: str) -> str:
    """Return the URL of a run's stored weights: below `weights.store` (`place`), which may serve many runs, or in
    its directory."""
    return f"{place.rstrip('/')}/{run_id}" if place else f"{directory.rstrip('/')}/weights"


def folder(version: Version) -> str:
    """Return the folder of a version's objects."""
    return f"{version.session:06d}-{version.step:08d}"


def part_name(kind: Kind, version: Version, rank: int) -> str:
    """Name of one rank's part."""
    return f"{folder(version)}/{kind}.{rank}.safetensors"


def manifest_name(kind: Kind, version: Version) -> str:
    """Name of a manifest."""
    return f"{folder(version)}/{kind}.json"


def digest_of(chunks: Sequence[Buffer], algorithm: Algorithm) -> str:
    """Hex digest of an object that is written in chunks."""
    if len(chunks) == 1:
        return checksum(chunks[0], algorithm)
    digest = hasher(algorithm)
    for chunk in chunks:
        digest.update(chunk)
    return str(digest.hexdigest())


def checked_object(name: str, size_bytes: int, digest: str) -> StoredObject:
    """Return the object of this name. Raises ValueError for one outside the store or of no possible size."""
    if not name or ".." in name or name.startswith("/") or "://" in name or "::" in name:
        raise ValueError(f"an object may not be called {name[:200]!r}")
    if not 0 <= size_bytes < 2**63:
        raise ValueError(f"{name!r} cannot have {size_bytes} bytes")
    return StoredObject(name, size_bytes, digest)


def _stored(raw: Sequence[Any]) -> StoredObject:
    name, size_bytes, digest = raw
    return checked_object(str(name), int(size_bytes), str(digest))
