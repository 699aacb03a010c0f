"""Chunks of a rank's blocks: every row once, no chunk of two widths, and none unnecessarily large."""

from __future__ import annotations

import math

import pytest

from paceline.weights.format.manifest import TensorPlan
from paceline.weights.store.store_layout import Block, RankLayout, block_from

BLOCKS = (
    Block("a", "bfloat16", (0, 0), (10, 30)),
    Block("b", "bfloat16", (4,), (50,)),
    Block("scalar", "bfloat16", (), ()),
    Block("wide", "bfloat16", (0, 0), (2, 500)),
    Block("a", "bfloat16", (0, 30), (10, 30)),
    Block("index", "int64", (0,), (3,)),
)


def test_chunks_have_every_row_once_and_one_width() -> None:
    layout = RankLayout(BLOCKS, chunk_elements=100)
    rows: dict[int, list[tuple[int, int]]] = {}
    for chunk, pieces in enumerate(layout.chunks):
        elements = 0
        for piece in pieces:
            block = BLOCKS[piece.block]
            assert block.dtype == BLOCKS[pieces[0].block].dtype
            elements += (piece.last - piece.first) * block.row_elements
            rows.setdefault(piece.block, []).append((piece.first, piece.last))
        assert layout.size_bytes(chunk) == elements * layout.width(chunk)
        assert elements <= 100 or len(pieces) == 1
    for index, block in enumerate(BLOCKS):
        ends = [0, *(last for _, last in rows[index])]
        assert [first for first, _ in rows[index]] == ends[:-1]
        assert ends[-1] == block.rows
    assert layout.keys == ("a", "b", "scalar", "wide", "a#1", "index")


@pytest.mark.parametrize(
    ("offsets", "shape"),
    [((0, 0), (11, 30)), ((5, 0), (6, 30)), ((0,), (10,)), ((0, 0), (10, 0)), ((-1, 0), (2, 3))],
)
def test_a_block_outside_its_tensor_is_refused(offsets: tuple[int, ...], shape: tuple[int, ...]) -> None:
    block = Block("a", "bfloat16", offsets, shape)
    with pytest.raises(ValueError, match="a block of 'a'"):
        block.check(TensorPlan("a", "bfloat16", (10, 30)))


def test_a_block_of_no_tensor_and_a_document_of_nonsense_are_refused() -> None:
    with pytest.raises(ValueError, match="does not have"):
        BLOCKS[0].check(None)
    for raw in (["a", "float3", [0], [1]], ["a", "bfloat16", [0], [1, 2]], ["a", "bfloat16", [0.5], [1]]):
        with pytest.raises(ValueError, match="a block 'a'"):
            block_from(raw)
    assert math.prod(block_from(["a", "bfloat16", [0, 1], [2, 3]]).shape) == 6
