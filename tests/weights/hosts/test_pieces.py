"""The parts of a version, for one and for several of the learner's hosts."""

from __future__ import annotations

import pytest

from paceline.errors import WireError
from paceline.weights.format.manifest import TensorPlan, WeightManifest
from paceline.weights.hosts.manifest import (
    MAX_BUCKET_BYTES,
    MIN_BUCKET_BYTES,
    Owned,
    Piece,
    bucket_bytes_for,
    check_owned,
    joined,
    plan_pieces,
)


def test_with_one_host_the_pieces_are_the_buckets() -> None:
    owned = joined([Owned(0, 100, 0), Owned(128, 250, 0)])  # the gap of an alignment is sent too
    assert owned == (Owned(0, 250, 0),)
    assert plan_pieces(owned, 100) == (
        Piece(0, 0, ((0, 100),)),
        Piece(1, 0, ((100, 200),)),
        Piece(2, 0, ((200, 250),)),
    )


def test_each_host_has_a_piece_of_every_bucket_that_its_rows_touch() -> None:
    owned = joined([Owned(0, 60, 0), Owned(60, 120, 1), Owned(128, 188, 0), Owned(188, 248, 1)])
    assert plan_pieces(owned, 200) == (
        Piece(0, 0, ((0, 60), (128, 188))),
        Piece(0, 1, ((60, 120), (188, 200))),
        Piece(1, 1, ((200, 248),)),
    )


def test_buckets_are_small_enough_to_fill_a_chain_and_bounded() -> None:
    assert bucket_bytes_for(1000) == MIN_BUCKET_BYTES
    assert bucket_bytes_for(4 << 30) == 4 << 20
    assert bucket_bytes_for(1 << 40) == MAX_BUCKET_BYTES


@pytest.mark.parametrize(
    "owned",
    [
        [Owned(0, 99, 0)],  # no host has the last byte
        [Owned(10, 100, 0)],
        [Owned(0, 60, 0), Owned(50, 100, 1)],
        [Owned(0, 100, 0), Owned(100, 100, 0)],
        [Owned(0, 400, 0)],
        [Owned(0, 100, -1)],
        [],
    ],
)
def test_ranges_that_overlap_leave_out_or_exceed_are_refused(owned: list[Owned]) -> None:
    layout = WeightManifest.plan([TensorPlan("t", "uint8", (100,), None)], 64)
    with pytest.raises(WireError):
        check_owned(owned, layout)
