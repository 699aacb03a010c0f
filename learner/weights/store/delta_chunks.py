"""The chunks of a version that differ from the version before, coded and hashed.

Promise: every element that differs is in a coded chunk, and the checksums are of the new elements. Elements that the
comparison on a device found are brought into the kept copy here, so the checksums prove that copy, not the device's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from paceline.groups import Version
from paceline.learner.weights.store.version_source import FoundChanges, KeptVersion, VersionSource, chunk_bits
from paceline.weights import delta_codec
from paceline.weights.manifest import Algorithm, checksum
from paceline.weights.part_file import ChunkNote

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


class CodedChunk(NamedTuple):
    """A chunk that changed."""

    note: ChunkNote
    payload: bytes


def coded_chunks(
    kept: KeptVersion, version: Version, source: VersionSource, algorithm: Algorithm, over: Map
) -> tuple[list[CodedChunk], KeptVersion]:
    """Return the changed chunks and the new version to keep; `over` maps a function over chunks, in threads."""

    def noted(chunk: int, payload: bytes, bits_N: Any) -> CodedChunk:
        note = ChunkNote(chunk, checksum(bits_N.view(np.uint8), algorithm), checksum(payload, algorithm))
        return CodedChunk(note, payload)

    def compared(chunk: int) -> CodedChunk | None:
        new_N = chunk_bits(slices, kept.layout, chunk)
        payload = delta_codec.encode(kept.chunk(chunk), new_N)
        return None if payload is None else noted(chunk, payload, new_N)

    def found(chunk: int) -> CodedChunk:
        kept.change(chunk, changes[chunk])
        return noted(chunk, delta_codec.pack(changes[chunk].changes), kept.chunk(chunk))

    if isinstance(source, FoundChanges):
        changes, slices = source.chunks, kept.slices
        coded = list(over(found, changes))
    else:
        slices = source.slices
        coded = [chunk for chunk in over(compared, range(len(kept.layout.chunks))) if chunk is not None]
    checksums = list(kept.checksums)
    for chunk in coded:
        checksums[chunk.note.chunk] = chunk.note.checksum
    return coded, kept.with_version(version, slices, checksums)
