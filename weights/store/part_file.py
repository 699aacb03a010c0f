"""Part files of the weight store: one learner rank's elements of a version, or of its difference from the one before.

A part is a safetensors file with a header of ours in its metadata. A snapshot's tensors are the rank's blocks, in order and
without gaps, so that a chunk is one run of the file; with one rank it is an ordinary model file. A delta's tensors are the
coded chunks, named by their numbers, of which the header has the digests, so a reader may fetch some of them alone.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from paceline.errors import WireError
from paceline.groups import Version
from paceline.weights.format.manifest import DTYPE_BYTES, Algorithm, TensorPlan, algorithm_named
from paceline.weights.store.object_store import Buffer
from paceline.weights.store.store_format import FORMAT, Kind
from paceline.weights.store.store_layout import (
    FEWEST_CHUNK_ELEMENTS,
    Block,
    RankLayout,
    block_from,
)

METADATA_KEY = "paceline"
PREFIX_BYTES = 8
"""Bytes of the length before the header."""
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
    """A chunk that a part has."""

    chunk: int
    checksum: str
    """Hex digest of the elements' bytes in this version."""
    digest: str
    """Hex digest of the coded bytes of a delta; empty in a snapshot, where they are the elements' bytes."""


@dataclass(frozen=True)
class PartHeader:
    """Header of a part file."""

    kind: Kind
    run_id: str
    version: Version
    base: Version | None
    """The version that a delta changes; None for a snapshot."""
    rank: int
    algorithm: Algorithm
    notes: tuple[ChunkNote, ...] = ()
    """All chunks of a snapshot; of a delta those that changed."""
    blocks: tuple[Block, ...] = ()
    """Of a snapshot."""
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
        """Return the notes, whose chunks the layout has. Raises WireError."""
        notes = self.notes
        chunks = {note.chunk for note in notes}
        if len(chunks) != len(notes) or not chunks <= set(range(len(layout.chunks))):
            raise WireError(
                f"part of rank {self.rank} has a chunk twice or one that is not of {len(layout.chunks)}"
            )
        return notes

    def places_of(self, layout: RankLayout, places: Mapping[str, tuple[int, int]]) -> list[tuple[int, int]]:
        """Return [start, end) of each of the notes' chunks in the file, of which `places` has the tensors'. Raises WireError."""
        notes = self.notes_for(layout)
        try:
            if self.kind == "delta":
                return [places[str(note.chunk)] for note in notes]
            for key, block in zip(layout.keys, layout.blocks, strict=True):
                start, end = places[key]
                if end - start != block.rows * block.row_elements * DTYPE_BYTES[block.dtype]:
                    raise KeyError(f"{key} with {end - start} bytes")
            starts = [places[key][0] for key in layout.keys]
            if any(places[key][1] != start for key, start in zip(layout.keys, starts[1:], strict=False)):
                raise KeyError("blocks without gaps")
        except KeyError as error:
            raise WireError(f"part of rank {self.rank} has no {error}") from None
        found = []
        for note in notes:
            first = layout.chunks[note.chunk][0]
            row_bytes = layout.blocks[first.block].row_elements * layout.width(note.chunk)
            start = starts[first.block] + first.first * row_bytes
            found.append((start, start + layout.size_bytes(note.chunk)))
        return found


class PartHead(NamedTuple):
    """What the first bytes of a part file say."""

    header: PartHeader
    places: dict[str, tuple[int, int]]
    """[start, end) of each tensor in the file."""
    body: int
    """Where the tensors begin."""


def part_chunks(
    header: PartHeader, tensors: Sequence[tuple[str, str, tuple[int, ...], Buffer]]
) -> list[Buffer]:
    """Return a part file in pieces: safetensors of (name, dtype as torch calls it, shape, bytes), without copying
    the bytes."""
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
    """Read the head of a part file of `size_bytes`, of which `data` is at least the head. Raises WireError."""
    view = memoryview(data)
    try:
        (length,) = struct.unpack_from("<Q", view)
        body = PREFIX_BYTES + length
        if body > len(view):
            raise ValueError(f"a head of {body} bytes, {len(view)} are there")
        document = json.loads(bytes(view[PREFIX_BYTES:body]))
        header = _header(json.loads(document.pop("__metadata__")[METADATA_KEY]))
        places = {}
        for name, place in document.items():
            start, end = place["data_offsets"]
            if not 0 <= start <= end <= size_bytes - body:
                raise ValueError(f"tensor {name!r} lies at {start} to {end} of {size_bytes - body} bytes")
            places[str(name)] = (body + start, body + end)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WireError(f"no part of stored weights: {error!r}") from error
    return PartHead(header, places, body)


def _header(raw: dict[str, Any]) -> PartHeader:
    if raw["format"] != FORMAT:
        raise ValueError(f"format {raw['format']!r}, this side reads {FORMAT}")
    chunk_elements = raw["chunk_elements"]
    if type(chunk_elements) is not int or (raw["blocks"] and chunk_elements < FEWEST_CHUNK_ELEMENTS):
        raise ValueError(f"chunks of {chunk_elements!r} elements")
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
        raise ValueError(f"chunk {chunk!r}")
    return ChunkNote(chunk, str(checksum), str(digest))
