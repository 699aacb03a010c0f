"""Divides the elements of one learner rank in the store into blocks of tensors, and the blocks into chunks.

A *block* is a box of a tensor, in row-major order: the rank's shard on a mesh of any dimensions, or some columns of it.
A *chunk* is coded, checked and read as a whole: rows of consecutive blocks whose elements have one width, together at
most `CHUNK_ELEMENTS` unless a single row has more. So the shards of many ranks do not cost more than whole tensors,
large tensors are coded in several threads, and a reader that needs a part of the model fetches the chunks that touch
it. The promise: both sides compute the same chunks from blocks and chunk size alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from paceline.weights.format.manifest import DTYPE_BYTES, MAX_DIMENSIONS, TensorPlan

CHUNK_ELEMENTS = 1 << 22
FEWEST_CHUNK_ELEMENTS = 64


class Block(NamedTuple):
    """Elements [offset, offset + length) of a tensor in each dimension."""

    name: str
    dtype: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Length of the first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_elements(self) -> int:
        return math.prod(self.shape[1:])

    def check(self, plan: TensorPlan | None) -> None:
        """Raise ValueError unless this is a box of the tensor that `plan` describes."""
        if plan is None or plan.same_as is not None or plan.dtype != self.dtype:
            raise ValueError(f"a block of {self.name!r} as {self.dtype}, which the model does not have")
        if len(self.offsets) != len(plan.shape) or len(self.shape) != len(plan.shape):
            raise ValueError(f"a block of {self.name!r} with shape {self.shape}, but the tensor has {plan.shape}")
        for offset, length, whole in zip(self.offsets, self.shape, plan.shape, strict=True):
            if offset < 0 or length <= 0 or offset + length > whole:
                raise ValueError(
                    f"a block of {self.name!r} at {self.offsets} + {self.shape}, beyond the tensor's {plan.shape}"
                )


class Rows(NamedTuple):
    """Rows [first, last) of a block."""

    block: int
    first: int
    last: int


@dataclass(frozen=True)
class RankLayout:
    blocks: tuple[Block, ...]
    chunk_elements: int = CHUNK_ELEMENTS

    @cached_property
    def chunks(self) -> tuple[tuple[Rows, ...], ...]:
        """Rows of blocks in each chunk."""
        chunks: list[tuple[Rows, ...]] = []
        pieces: list[Rows] = []
        width, room = 0, 0
        for index, block in enumerate(self.blocks):
            first = 0
            while first < block.rows:
                fits = room // block.row_elements if DTYPE_BYTES[block.dtype] == width else 0
                if not fits:
                    if pieces:
                        chunks.append(tuple(pieces))
                    pieces, width, room = [], DTYPE_BYTES[block.dtype], self.chunk_elements
                    fits = max(1, room // block.row_elements)
                last = min(block.rows, first + fits)
                pieces.append(Rows(index, first, last))
                used = (last - first) * block.row_elements
                room = max(0, room - used)  # one row may be larger than a chunk
                first = last
        if pieces:
            chunks.append(tuple(pieces))
        return tuple(chunks)

    def width(self, chunk: int) -> int:
        """Return the bytes of each element of a chunk."""
        return DTYPE_BYTES[self.blocks[self.chunks[chunk][0].block].dtype]

    def size_bytes(self, chunk: int) -> int:
        elements = sum(
            (piece.last - piece.first) * self.blocks[piece.block].row_elements for piece in self.chunks[chunk]
        )
        return elements * self.width(chunk)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Names of blocks in a snapshot's file: the tensor's name; from the tensor's second block on, a number is
        added."""
        seen: dict[str, int] = {}
        keys = []
        for block in self.blocks:
            number = seen[block.name] = seen.get(block.name, -1) + 1
            keys.append(f"{block.name}#{number}" if number else block.name)
        return tuple(keys)

    def contents(self, checksums: Sequence[str]) -> str:
        """Return a SHA-256 over blocks and the chunks' checksums: equal if and only if all elements are equal."""
        document = [self.chunk_elements, self.blocks, list(checksums)]
        return hashlib.sha256(json.dumps(document).encode()).hexdigest()


def block_from(raw: Sequence[Any]) -> Block:
    """Return the block of a parsed document. Raises ValueError; whether its tensor exists is not checked."""
    name, dtype, offsets, shape = raw
    if dtype not in DTYPE_BYTES or len(offsets) != len(shape) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"a block {name!r} of {dtype!r} at {offsets!r} + {shape!r} is malformed")
    if not all(type(number) is int for number in (*offsets, *shape)):
        raise ValueError(f"a block {name!r} at {offsets!r} + {shape!r} is malformed")
    return Block(str(name), str(dtype), tuple(offsets), tuple(shape))
