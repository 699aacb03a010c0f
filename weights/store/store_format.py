"""Format of the delta channel's object store: manifests, part files, object names, and the message of an offer.

A *snapshot* is a version in full, a *delta* its difference from the previous version. Each learner rank writes one part
file; then rank 0 writes a small manifest that names the parts with their digests, and only this makes the version
exist. A manifest also has the digest of its base's manifest and, for each rank, one hash over the checksums of all
chunks before the change and one after it. So a reader that got one digest can check all files down to the snapshot.

Names: `<session>-<step>/anchor.0.safetensors`, `<session>-<step>/delta.0.safetensors`, … and `anchor.json`,
`delta.json`. A part is a safetensors file with our header in its metadata. A snapshot's tensors are the rank's blocks,
in order and without gaps, so that a chunk is one run of the file; with one rank it is an ordinary model file. A delta's
tensors are the coded chunks, named by their numbers; the header has their digests.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from paceline.errors import WireError
from paceline.groups import Version
from paceline.v1 import worker_pb2
from paceline.weights.format.manifest import DTYPE_BYTES, Algorithm, TensorPlan, algorithm_named, checksum, hasher
from paceline.weights.store.object_store import Buffer
from paceline.weights.store.store_layout import FEWEST_CHUNK_ELEMENTS, Block, RankLayout, block_from

FORMAT = 3
Kind = Literal["anchor", "delta"]


class StoredObject(NamedTuple):
    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True)
class StoredVersion:
    """Manifest of a snapshot or a delta."""

    kind: Kind
    run_id: str
    version: Version
    algorithm: Algorithm
    parts: tuple[StoredObject, ...]
    """Part files, in the order of ranks."""
    contents: tuple[str, ...]
    """`RankLayout.contents` of each rank in this version."""
    tensors: tuple[TensorPlan, ...] = ()
    """Names, dtypes, shapes and ties of the whole model; empty for a delta."""
    base_version: Version | None = None
    """The previous version; None for a snapshot."""
    base: StoredObject | None = None
    """Manifest of the previous version; None for a snapshot."""
    base_contents: tuple[str, ...] = ()
    """`contents` of the previous version; empty for a snapshot."""
    heads: tuple[StoredObject, ...] = ()
    """Head of each rank's part file: its first bytes."""

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    def to_bytes(self) -> bytes:
        return json.dumps({**asdict(self), "format": FORMAT}, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: Buffer) -> StoredVersion:
        """Read the result of `to_bytes`. Raises WireError for anything else."""
        try:
            document = json.loads(bytes(data))
            if (found := document.pop("format")) != FORMAT:
                raise ValueError(f"format {found!r}, but this Paceline reads {FORMAT}")
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
            raise WireError(f"not a manifest of stored weights: {str(error)[:200]!r}") from error
        if len(manifest.parts) != len(manifest.contents) or (manifest.kind == "delta") != (base is not None):
            raise WireError("manifest of stored weights has parts, contents or a base that contradict each other")
        if len(manifest.heads) != len(manifest.parts):
            raise WireError("manifest of stored weights does not have one head for each part")
        return manifest


def run_store(url: str | None, run_id: str, directory: str) -> str:
    """Return the URL of a run's stored weights: below `url` (`weights.store`, maybe shared), or in `directory`."""
    return f"{url.rstrip('/')}/{run_id}" if url else f"{directory.rstrip('/')}/weights"


def folder(version: Version) -> str:
    return f"{version.session:06d}-{version.step:08d}"


def part_name(kind: Kind, version: Version, rank: int) -> str:
    return f"{folder(version)}/{kind}.{rank}.safetensors"


def manifest_name(kind: Kind, version: Version) -> str:
    return f"{folder(version)}/{kind}.json"


def digest_of(chunks: Sequence[Buffer], algorithm: Algorithm) -> str:
    """Return the hex digest of an object that is written in `chunks`."""
    if len(chunks) == 1:
        return checksum(chunks[0], algorithm)
    digest = hasher(algorithm)
    for chunk in chunks:
        digest.update(chunk)
    return str(digest.hexdigest())


def checked_object(name: str, size_bytes: int, digest: str) -> StoredObject:
    """Return the object of this name. Raises ValueError for a name outside the store or an impossible size."""
    if not name or ".." in name or name.startswith("/") or "://" in name or "::" in name:
        raise ValueError(f"an object may not be called {name[:200]!r}")
    if not 0 <= size_bytes < 2**63:
        raise ValueError(f"{name!r} cannot have {size_bytes} bytes")
    return StoredObject(name, size_bytes, digest)


def _stored(raw: Sequence[Any]) -> StoredObject:
    name, size_bytes, digest = raw
    return checked_object(str(name), int(size_bytes), str(digest))


METADATA_KEY = "paceline"
PREFIX_BYTES = 8
"""Size in bytes of the number that precedes the header and gives its length."""
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


class ChunkNote(NamedTuple):
    """Checksum and digest of a chunk in a part file."""

    chunk: int
    checksum: str
    """Hex digest of the elements' bytes in this version."""
    digest: str
    """Hex digest of the coded bytes of a delta; empty for a snapshot, whose bytes are the elements'."""


@dataclass(frozen=True)
class PartHeader:
    kind: Kind
    run_id: str
    version: Version
    base: Version | None
    """The version that a delta changes; None for a snapshot."""
    rank: int
    algorithm: Algorithm
    notes: tuple[ChunkNote, ...] = ()
    """One note for each chunk of a snapshot, or for each changed chunk of a delta."""
    blocks: tuple[Block, ...] = ()
    """Blocks of the rank in a snapshot; empty for a delta."""
    chunk_elements: int = 0

    def layout(self, plans: Mapping[str, TensorPlan]) -> RankLayout:
        """Return the layout of a snapshot's part. Raises WireError unless its blocks are of these tensors."""
        try:
            for block in self.blocks:
                block.check(plans.get(block.name))
            return RankLayout(self.blocks, self.chunk_elements)
        except ValueError as error:
            raise WireError(f"part of rank {self.rank} has {error}") from None

    def notes_for(self, layout: RankLayout) -> tuple[ChunkNote, ...]:
        """Return the notes of the chunks in this part. Raises WireError unless the layout has those chunks."""
        notes = self.notes
        chunks = {note.chunk for note in notes}
        if len(chunks) != len(notes) or not chunks <= set(range(len(layout.chunks))):
            raise WireError(
                f"part of rank {self.rank} has a chunk twice, or one beyond the {len(layout.chunks)} of its layout"
            )
        return notes

    def locations_of(self, layout: RankLayout, locations: Mapping[str, tuple[int, int]]) -> list[tuple[int, int]]:
        """Return [start, end) of each noted chunk in the file, from the tensors' `locations`. Raises WireError."""
        notes = self.notes_for(layout)
        try:
            if self.kind == "delta":
                return [locations[str(note.chunk)] for note in notes]
            for key, block in zip(layout.keys, layout.blocks, strict=True):
                start, end = locations[key]
                if end - start != block.rows * block.row_elements * DTYPE_BYTES[block.dtype]:
                    raise KeyError(f"{key} with {end - start} bytes")
            starts = [locations[key][0] for key in layout.keys]
            if any(locations[key][1] != start for key, start in zip(layout.keys, starts[1:], strict=False)):
                raise KeyError("blocks without gaps")
        except KeyError as error:
            raise WireError(f"part of rank {self.rank} has no {error}") from None
        ranges = []
        for note in notes:
            first = layout.chunks[note.chunk][0]
            row_bytes = layout.blocks[first.block].row_elements * layout.width(note.chunk)
            start = starts[first.block] + first.first * row_bytes
            ranges.append((start, start + layout.size_bytes(note.chunk)))
        return ranges


class PartHead(NamedTuple):
    header: PartHeader
    locations: dict[str, tuple[int, int]]
    """[start, end) in the file of each tensor."""


def part_chunks(header: PartHeader, tensors: Sequence[tuple[str, str, tuple[int, ...], Buffer]]) -> list[Buffer]:
    """Return the pieces of a safetensors file, without copies. A tensor is (name, torch's dtype name, shape, bytes)."""
    metadata = {"format": FORMAT, **asdict(header)}
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


def read_head(data: Buffer, size_bytes: int) -> PartHead:
    """Read the head of a part file of `size_bytes` from `data`, which has at least the head. Raises WireError."""
    view = memoryview(data)
    try:
        (length,) = struct.unpack_from("<Q", view)
        body = PREFIX_BYTES + length
        if body > len(view):
            raise ValueError(f"the head has {body} bytes, but only {len(view)} were read")
        document = json.loads(bytes(view[PREFIX_BYTES:body]))
        header = _header(json.loads(document.pop("__metadata__")[METADATA_KEY]))
        locations = {}
        for name, entry in document.items():
            start, end = entry["data_offsets"]
            if not 0 <= start <= end <= size_bytes - body:
                raise ValueError(f"tensor {name!r} is at bytes {start} to {end} of only {size_bytes - body} bytes")
            locations[str(name)] = (body + start, body + end)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WireError(f"not a part of stored weights: {error!r}") from error
    return PartHead(header, locations)


def _header(raw: dict[str, Any]) -> PartHeader:
    if raw["format"] != FORMAT:
        raise ValueError(f"format {raw['format']!r}, but this Paceline reads {FORMAT}")
    chunk_elements = raw["chunk_elements"]
    if type(chunk_elements) is not int or (raw["blocks"] and chunk_elements < FEWEST_CHUNK_ELEMENTS):
        raise ValueError(f"chunks cannot have {chunk_elements!r} elements")
    return PartHeader(
        kind=raw["kind"],
        run_id=raw["run_id"],
        version=Version(*raw["version"]),
        base=None if raw["base"] is None else Version(*raw["base"]),
        rank=raw["rank"],
        algorithm=algorithm_named(raw["algorithm"]),
        notes=tuple(_note(item) for item in raw["notes"]),
        blocks=tuple(block_from(item) for item in raw["blocks"]),
        chunk_elements=chunk_elements,
    )


def _note(raw: Sequence[Any]) -> ChunkNote:
    chunk, checksum, digest = raw
    if type(chunk) is not int:
        raise ValueError(f"{chunk!r} is not the number of a chunk")
    return ChunkNote(chunk, str(checksum), str(digest))


@dataclass(frozen=True)
class StoreOffer:
    """Offer of a version in the object store to one member. The control plane that carries the offer authenticates
    it."""

    run_id: str
    epoch: int
    member_id: str
    version: Version
    url: str
    algorithm: Algorithm
    manifest: StoredObject
    """Manifest of the version; the manifest's digest authenticates everything else."""
    snapshot_version: Version
    """Version of the newest snapshot up to this version."""
    snapshot: StoredObject
    snapshot_bytes: int
    """Size of the snapshot's parts in bytes."""

    def to_proto(self, max_wait_s: float) -> worker_pb2.WeightOffer:
        """Return the message; `max_wait_s` is the longest silence that the learner allows."""
        message = worker_pb2.WeightOffer(
            run_id=self.run_id, epoch=self.epoch, member_id=self.member_id, max_wait_s=max_wait_s
        )
        message.version.session, message.version.step = self.version
        stored = message.stored
        stored.url, stored.algorithm = self.url, self.algorithm
        stored.manifest.CopyFrom(_object_message(self.manifest))
        stored.anchor_version.session, stored.anchor_version.step = self.snapshot_version
        stored.anchor.CopyFrom(_object_message(self.snapshot))
        stored.anchor_bytes = self.snapshot_bytes
        return message

    @classmethod
    def from_proto(cls, message: worker_pb2.WeightOffer) -> StoreOffer:
        """Read the message. Raises WireError for an unknown algorithm and for an impossible object."""
        stored = message.stored
        return cls(
            run_id=message.run_id,
            epoch=message.epoch,
            member_id=message.member_id,
            version=Version(message.version.session, message.version.step),
            url=stored.url,
            algorithm=algorithm_named(stored.algorithm),
            manifest=_object(stored.manifest),
            snapshot_version=Version(stored.anchor_version.session, stored.anchor_version.step),
            snapshot=_object(stored.anchor),
            snapshot_bytes=stored.anchor_bytes,
        )


def _object_message(stored: StoredObject) -> worker_pb2.StoredObject:
    return worker_pb2.StoredObject(name=stored.name, size_bytes=stored.size_bytes, digest=stored.digest)


def _object(message: worker_pb2.StoredObject) -> StoredObject:
    try:
        return checked_object(message.name, message.size_bytes, message.digest)
    except ValueError as error:
        raise WireError(f"the offer is invalid: {error}") from None
