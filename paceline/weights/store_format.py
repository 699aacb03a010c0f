"""Format of the delta channel's object store: part files in safetensors, and the manifests that make a version
complete.

A *snapshot* is a version in full, a *delta* its difference from the previous version. Each learner rank writes one part
file with its slices of the tensors; then rank 0 writes a small manifest that names the parts with their digests, and
only this makes the version exist. A manifest also has the digest of its base's manifest and, by rank, one hash over the
checksums of all slices before and after. So a reader that was given one digest can check all files down to the
snapshot.

Names: `<session>-<step>/anchor.0.safetensors`, `<session>-<step>/delta.0.safetensors`, … and `anchor.json`,
`delta.json`.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from paceline.errors import WireError
from paceline.groups import Version
from paceline.weights.manifest import DTYPE_BYTES, Algorithm, TensorPlan, algorithm_named, checksum
from paceline.weights.object_store import Buffer

FORMAT = 2
METADATA_KEY = "paceline"
_ALIGNMENT_BYTES = 8
_SAFETENSORS_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
Kind = Literal["anchor", "delta"]


class Slice(NamedTuple):
    """Elements [start, start + length) of a flattened tensor: one rank's shard."""

    name: str
    start: int
    length: int
    checksum: str
    """Hex digest of the elements' bytes in this version."""


class StoredObject(NamedTuple):
    """One object of the store."""

    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True)
class PartHeader:
    """Header of a part file, in its safetensors metadata."""

    kind: Kind
    run_id: str
    version: Version
    base: Version | None
    """The version that a delta changes; None for a snapshot."""
    rank: int
    algorithm: Algorithm
    slices: tuple[Slice, ...]
    """All slices of a snapshot; of a delta those that changed."""


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
    """By rank: `content_hash` of all its slices in this version."""
    tensors: tuple[TensorPlan, ...] = ()
    """Names, dtypes, shapes and ties of the whole model; empty for a delta."""
    base_version: Version | None = None
    """The version before; None for a snapshot."""
    base: StoredObject | None = None
    """Manifest of the version before; None for a snapshot."""
    base_contents: tuple[str, ...] = ()
    """`contents` of the version before; empty for a snapshot."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.size_bytes for part in self.parts)

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: Buffer) -> StoredVersion:
        """Read what `to_bytes` wrote. Raises WireError for anything else."""
        try:
            document = json.loads(bytes(data))
            if document.pop("format") != FORMAT:
                raise ValueError("another format")
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
                **document,
            )
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            raise WireError(f"no manifest of stored weights: {str(error)[:200]!r}") from error
        if len(manifest.parts) != len(manifest.contents) or (manifest.kind == "delta") != (base is not None):
            raise WireError("manifest of stored weights contradicts itself: parts, contents or base")
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


def content_hash(slices: Iterable[Slice]) -> str:
    """SHA-256 over names, places and checksums: equal exactly where the slices are."""
    return hashlib.sha256(json.dumps(sorted(slices)).encode()).hexdigest()


def digest_of(chunks: Sequence[Buffer], algorithm: Algorithm) -> str:
    """Hex digest of an object that is written in chunks."""
    if len(chunks) == 1:
        return checksum(chunks[0], algorithm)
    import xxhash

    digest = xxhash.xxh3_64() if algorithm == "xxh3_64" else hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return str(digest.hexdigest())


def part_chunks(
    header: PartHeader, tensors: Sequence[tuple[str, str, tuple[int, ...], Buffer]]
) -> list[Buffer]:
    """Return a part file in pieces: safetensors of (name, dtype as torch calls it, shape, bytes), without copying
    the bytes."""
    metadata = asdict(header) | {"format": FORMAT}
    document: dict[str, Any] = {
        "__metadata__": {METADATA_KEY: json.dumps(metadata, separators=(",", ":")), "format": "pt"}
    }
    end = 0
    for name, dtype, shape, data in tensors:
        document[name] = {
            "dtype": _SAFETENSORS_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [end, end + len(data)],
        }
        end += len(data)
    head = json.dumps(document, separators=(",", ":")).encode()
    head += b" " * (-len(head) % _ALIGNMENT_BYTES)
    return [struct.pack("<Q", len(head)) + head, *(data for *_, data in tensors)]


def read_part(data: Buffer) -> tuple[PartHeader, dict[str, memoryview]]:
    """Return the header of a part file and the bytes of each tensor, as views. Raises WireError."""
    view = memoryview(data)
    try:
        (length,) = struct.unpack_from("<Q", view)
        document = json.loads(bytes(view[8 : 8 + length]))
        raw = json.loads(document.pop("__metadata__")[METADATA_KEY])
        if raw["format"] != FORMAT:
            raise ValueError(f"format {raw['format']!r}")
        header = PartHeader(
            kind=raw["kind"],
            run_id=raw["run_id"],
            version=Version(*raw["version"]),
            base=None if raw["base"] is None else Version(*raw["base"]),
            rank=raw["rank"],
            algorithm=raw["algorithm"],
            slices=tuple(_slice(item) for item in raw["slices"]),
        )
        body = view[8 + length :]
        tensors = {}
        for name, place in document.items():
            start, end = place["data_offsets"]
            if not 0 <= start <= end <= len(body):
                raise ValueError(f"tensor {name!r} lies at {start} to {end} of {len(body)} bytes")
            tensors[name] = body[start:end]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WireError(f"no part of stored weights: {error!r}") from error
    return header, tensors


def num_elements(plan: TensorPlan) -> int:
    """Elements of a tensor."""
    return math.prod(plan.shape)


def element_bytes(plan: TensorPlan) -> int:
    """Bytes of one element of a tensor."""
    return DTYPE_BYTES[plan.dtype]


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


def _slice(raw: Sequence[Any]) -> Slice:
    name, start, length, digest = raw
    if type(start) is not int or type(length) is not int or start < 0 or length <= 0:
        raise ValueError(f"a slice of {length!r} elements from {start!r}")
    return Slice(str(name), start, length, str(digest))
