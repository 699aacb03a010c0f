"""Lays out the bytes of a version of the weights, and lists the layout with checksums in a manifest.

The tensors of a version lie in one flat run of bytes, each at an aligned offset that both sides compute from names,
dtypes and shapes alone. Buckets are equal slices of that run, so a large tensor is split like all others, and a
receiver's tensors are views of the received bytes. The promise: two manifests with the same layout hash have every byte
of every tensor at the same offset, and a tensor is only passed on if its checksum is the sender's.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import xxhash

from paceline.errors import WireError

ALIGNMENT_BYTES = 64
"""Alignment in bytes of every tensor's start. It suffices for any dtype's view and for vector loads."""

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Size in bytes of each dtype that can travel, by torch's name."""

FORMAT = 1

MAX_MANIFEST_BYTES = 64 << 20
"""Largest manifest in bytes, enough for a million tensors: a manifest is read between two control-plane messages."""
MAX_BUCKETS = 1 << 20
MAX_DIMENSIONS = 16

Algorithm = Literal["xxh3_64", "sha256"]


class TensorPlan(NamedTuple):
    """A tensor without its offset. `same_as` names an earlier tensor that shares its bytes (tied weights)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    same_as: str | None = None


class TensorEntry(NamedTuple):
    """One tensor of a version: bytes [offset, offset + num_bytes) of the flat run."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    checksum: str
    """Hex digest of the tensor's bytes; empty until it is computed."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class WeightManifest:
    """Names, dtypes, shapes, offsets and checksums of one version's tensors, in order."""

    entries: tuple[TensorEntry, ...]
    total_bytes: int
    bucket_bytes: int
    algorithm: Algorithm = "xxh3_64"

    @classmethod
    def plan(cls, tensors: Iterable[TensorPlan], bucket_bytes: int) -> WeightManifest:
        """Assign an offset to every tensor. A tensor with `same_as` gets the offset of the tensor that `same_as` names.
        Raises ValueError for a dtype that cannot travel, a repeated name, or a `same_as` of other size."""
        if bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes is {bucket_bytes}; it must be positive")
        entries: dict[str, TensorEntry] = {}
        end = 0
        for name, dtype, shape, same_as in tensors:
            if dtype not in DTYPE_BYTES:
                raise ValueError(f"tensor {name!r} is {dtype}; only {', '.join(DTYPE_BYTES)} can be sent")
            if name in entries:
                raise ValueError(f"tensor {name!r} is listed twice")
            entry = TensorEntry(name, dtype, tuple(shape), _aligned(end), "")
            if same_as is not None:
                first = entries[same_as]
                if (first.dtype, first.shape) != (entry.dtype, entry.shape):
                    raise ValueError(f"tensor {name!r} cannot share the bytes of {same_as!r}: they differ in shape")
                entry = entry._replace(offset=first.offset)
            entries[name] = entry
            end = max(end, entry.offset + entry.num_bytes)
        return cls(tuple(entries.values()), end, bucket_bytes)

    def with_checksums(self, checksums: Mapping[str, str]) -> WeightManifest:
        """Return the same manifest with checksums: `checksums` maps each tensor's name to its hex digest."""
        entries = tuple(entry._replace(checksum=checksums[entry.name]) for entry in self.entries)
        return replace(self, entries=entries)

    @property
    def layout_hash(self) -> str:
        """Return the SHA-256 over names, dtypes, shapes and offsets, which all versions of a model on a channel share."""
        layout = [[e.name, e.dtype, list(e.shape), e.offset] for e in self.entries]
        return hashlib.sha256(json.dumps([FORMAT, layout], separators=(",", ":")).encode()).hexdigest()

    @property
    def content_hash(self) -> str:
        """Return the SHA-256 over layout and checksums: equal if and only if the weights are equal."""
        sums = [self.layout_hash, self.algorithm, *(entry.checksum for entry in self.entries)]
        return hashlib.sha256("\n".join(sums).encode()).hexdigest()

    def to_bytes(self) -> bytes:
        """Return JSON with the layout hash, which `from_bytes` checks."""
        document = {
            "format": FORMAT,
            "algorithm": self.algorithm,
            "bucket_bytes": self.bucket_bytes,
            "total_bytes": self.total_bytes,
            "layout_hash": self.layout_hash,
            "tensors": [list(entry) for entry in self.entries],
        }
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> WeightManifest:
        """Read the result of `to_bytes`. Raises WireError for anything else, before any memory is allocated for it."""
        if len(data) > MAX_MANIFEST_BYTES:
            raise WireError(f"weight manifest has {len(data)} bytes, more than {MAX_MANIFEST_BYTES}")
        try:
            document = json.loads(data)
            if document["format"] != FORMAT:
                raise WireError(f"weight manifest has format {document['format']!r}, but this Paceline reads {FORMAT}")
            manifest = cls(
                tuple(_entry(raw) for raw in document["tensors"]),
                _count(document["total_bytes"]),
                _count(document["bucket_bytes"]),
                algorithm_named(document["algorithm"]),
            )
            layout_hash = document["layout_hash"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise WireError(f"weight manifest cannot be read: {str(error)[:200]!r}") from error
        manifest._check(layout_hash)
        return manifest

    def _check(self, layout_hash: str) -> None:
        if self.bucket_bytes == 0:
            raise WireError("weight manifest has buckets of 0 bytes")
        if len({entry.name for entry in self.entries}) != len(self.entries):
            raise WireError("weight manifest names a tensor twice")
        for entry in self.entries:
            if entry.offset % ALIGNMENT_BYTES or entry.offset + entry.num_bytes > self.total_bytes:
                raise WireError(
                    f"weight manifest puts tensor {entry.name!r} of {entry.num_bytes} bytes at byte {entry.offset} "
                    f"of {self.total_bytes}"
                )
        # A gap of the sender's choosing would let a small model claim any amount of memory.
        needed = sum(_aligned(entry.num_bytes) for entry in self.entries)
        if self.total_bytes > needed:
            raise WireError(f"weight manifest asks for {self.total_bytes} bytes, but its tensors need {needed}")
        if self.total_bytes > MAX_BUCKETS * self.bucket_bytes:
            raise WireError(
                f"weight manifest cuts {self.total_bytes} bytes into buckets of {self.bucket_bytes} bytes; at most "
                f"{MAX_BUCKETS} buckets are received"
            )
        if layout_hash != self.layout_hash:
            raise WireError(
                f"weight manifest has the layout hash {layout_hash}, but its tensors have {self.layout_hash}"
            )


def algorithm_named(value: Any) -> Algorithm:
    """Return the checksum algorithm of that name. Raises WireError if there is none."""
    if value not in ("xxh3_64", "sha256"):
        raise WireError(f"checksum algorithm {value!r} is unknown; use xxh3_64 or sha256")
    return cast(Algorithm, value)


def checksum(data: Any, algorithm: Algorithm) -> str:
    """Return the hex digest of a bytes-like object (contiguous, one dimension)."""
    digest = hasher(algorithm)
    digest.update(data)
    return str(digest.hexdigest())


def hasher(algorithm: Algorithm) -> Any:
    return xxhash.xxh3_64() if algorithm == "xxh3_64" else hashlib.sha256()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _entry(raw: list[Any]) -> TensorEntry:
    name, dtype, shape, offset, digest = raw
    if not isinstance(name, str) or not isinstance(digest, str) or dtype not in DTYPE_BYTES:
        raise ValueError(
            f"tensor {name!r} with dtype {dtype!r}: name and checksum must be text, and the dtype one of {', '.join(DTYPE_BYTES)}"
        )
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"tensor {name!r} has a shape of more than {MAX_DIMENSIONS} dimensions")
    return TensorEntry(name, dtype, tuple(_count(size) for size in shape), _count(offset), digest)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a count")
    return value
