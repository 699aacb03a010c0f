"""The weights that a reader of the object store keeps in host memory, and the checksum of every chunk of them.

Promise: chunks are read and written in place, several at a time in as many threads, because no two share an element.
A chunk that is no single run of memory (several tensors, columns of one) is gathered into a copy and written back.

A reader of a part of the model holds the chunks that touch it; the memory of the rest is never touched.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import WireError
from paceline.weights.format.manifest import DTYPE_BYTES, Algorithm, TensorPlan, WeightManifest, checksum
from paceline.weights.format.packing import empty_flat, views
from paceline.weights.store.store_format import StoredVersion
from paceline.weights.store.store_layout import Piece, RankLayout
from paceline.weights.store.tensor_part import TensorPart

Bits = npt.NDArray[Any]
NAMES_SHOWN = 3


class HeldWeights:
    """All weights, or those that `part` needs, of the version that `snapshot` is of."""

    def __init__(self, snapshot: StoredVersion, part: TensorPart | None = None) -> None:
        self.version = snapshot.version
        self.algorithm: Algorithm = snapshot.algorithm
        self.plans: dict[str, TensorPlan] = {plan.name: plan for plan in snapshot.tensors}
        self._part = part
        try:
            layout = WeightManifest.plan(snapshot.tensors, bucket_bytes=1 << 28)
        except (ValueError, KeyError) as error:
            raise WireError(f"snapshot of {tuple(snapshot.version)}: {error}") from error
        flat = empty_flat(layout)
        self._whole: dict[str, torch.Tensor] = views(flat, layout)
        raw = flat.numpy()
        self._bits: dict[str, Bits] = {}
        for entry in layout.entries:
            if self.plans[entry.name].same_as is None:
                run = raw[entry.offset : entry.offset + entry.num_bytes]
                self._bits[entry.name] = run.view(f"u{DTYPE_BYTES[entry.dtype]}").reshape(entry.shape or 1)
        self.layouts: list[RankLayout] = []
        self.checksums: list[list[str]] = []

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, or the wanted ranges of them."""
        if self._part is None:
            return self._whole
        found = {}
        for name, tensor in self._whole.items():
            plan = self.plans[name]
            owner = self.plans[plan.same_as] if plan.same_as is not None else plan
            wanted = self._part.range_of(owner)
            found[name] = (
                tensor
                if wanted is None
                else tensor.narrow(wanted.dim, wanted.start, wanted.stop - wanted.start)
            )
        return found

    def add_rank(self, layout: RankLayout, checksums: list[str]) -> None:
        """Add the next rank's layout, whose chunks are to be written."""
        self.layouts.append(layout)
        self.checksums.append(checksums)

    def needs(self, rank: int, chunk: int) -> bool:
        """Return whether the chunk has wanted elements."""
        layout, part = self.layouts[rank], self._part
        if part is None:
            return True
        return any(
            part.needs(
                self.plans[layout.blocks[piece.block].name],
                layout.blocks[piece.block],
                piece.first,
                piece.last,
            )
            for piece in layout.chunks[chunk]
        )

    def read(self, rank: int, chunk: int) -> tuple[Bits, bool]:
        """Return ([N] the bits of a chunk, whether they are the held ones and no copy)."""
        runs = [self._piece(rank, piece) for piece in self.layouts[rank].chunks[chunk]]
        if len(runs) == 1 and runs[0].flags.c_contiguous:
            return runs[0].reshape(-1), True
        return np.concatenate([run.reshape(-1) for run in runs]), False

    def write(self, rank: int, chunk: int, bits_N: Bits) -> None:
        """Replace the bits of a chunk."""
        end = 0
        for piece in self.layouts[rank].chunks[chunk]:
            run = self._piece(rank, piece)
            start, end = end, end + run.size
            run[...] = bits_N[start:end].reshape(run.shape)

    def check(self, rank: int, chunk: int, bits_N: Bits) -> None:
        """Raise WireError unless these bits of a chunk have its checksum."""
        digest = checksum(bits_N.view(np.uint8), self.algorithm)
        expected = self.checksums[rank][chunk]
        if digest != expected:
            raise WireError(
                f"version {tuple(self.version)}: chunk {chunk} of rank {rank}, with {self._names(rank, chunk)}, comes to "
                f"{self.algorithm} {digest}, the learner has {expected}"
            )

    def contents(self) -> tuple[str, ...]:
        """Return the hash over all chunks of each rank."""
        ranks = zip(self.layouts, self.checksums, strict=True)
        return tuple(layout.contents(checksums) for layout, checksums in ranks)

    def check_complete(self) -> None:
        """Raise WireError unless the blocks of all ranks are every element of every tensor, once."""
        blocks: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {name: [] for name in self._bits}
        for layout in self.layouts:
            for block in layout.blocks:
                blocks[block.name].append((block.offsets, block.shape))
        for name, boxes in blocks.items():
            found, needed = sum(math.prod(shape) for _, shape in boxes), math.prod(self.plans[name].shape)
            boxes.sort()
            if found != needed or any(_overlap(*pair) for pair in _may_overlap(boxes)):
                raise WireError(
                    f"the snapshot's parts have {found} of {needed} elements of {name!r}, or some twice"
                )

    def _names(self, rank: int, chunk: int) -> str:
        layout = self.layouts[rank]
        names = [layout.blocks[piece.block].name for piece in layout.chunks[chunk]]
        more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
        return ", ".join(map(repr, names[:NAMES_SHOWN])) + more

    def _piece(self, rank: int, piece: Piece) -> Bits:
        block = self.layouts[rank].blocks[piece.block]
        box = tuple(
            slice(offset, offset + length)
            for offset, length in zip(block.offsets or (0,), block.shape or (1,), strict=True)
        )
        return self._bits[block.name][box][piece.first : piece.last]


Box = tuple[tuple[int, ...], tuple[int, ...]]


def _may_overlap(boxes: list[Box]) -> list[tuple[Box, Box]]:
    """Return the pairs of sorted boxes that share rows."""
    pairs = []
    for index, (offsets, shape) in enumerate(boxes):
        for other in boxes[index + 1 :]:
            if not offsets or other[0][0] >= offsets[0] + shape[0]:
                break
            pairs.append(((offsets, shape), other))
    return pairs


def _overlap(one: Box, other: Box) -> bool:
    return all(a < b + m and b < a + n for a, n, b, m in zip(one[0], one[1], other[0], other[1], strict=True))
