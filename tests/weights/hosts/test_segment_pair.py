"""Two segments: the next version arrives in memory that is neither read nor written."""

from __future__ import annotations

import gc
import os

import pytest

from paceline.errors import Unavailable
from paceline.weights.hosts.host_weights import SegmentPair

SIZE, BUCKET = 10_000, 4096


def test_one_segment_is_enough_while_every_version_is_copied_before_the_next() -> None:
    pair = SegmentPair()
    seen = set()
    for _ in range(3):
        segment, generation = pair.begin(SIZE, BUCKET, 0)
        seen.add((segment.identity, generation))
        pair.release(segment)
    assert len({identity for identity, _ in seen}) == 1
    assert {generation for _, generation in seen} == {1, 2, 3}


def test_the_other_one_is_taken_while_the_first_is_read_and_nothing_while_both_are() -> None:
    pair = SegmentPair()
    first, generation = pair.begin(SIZE, BUCKET, 0)
    pair.release(first)
    with first.reading(generation):
        second, other = pair.begin(SIZE, BUCKET, 0)
        assert second is not first
        pair.release(second)
        still_read = "both segments of 10000 bytes are still read"
        with second.reading(other), pytest.raises(Unavailable, match=still_read):
            pair.begin(SIZE, BUCKET, 0)
        assert pair.begin(SIZE, BUCKET, 0)[0] is second


def test_memory_under_an_operation_is_never_given_out_and_freed_when_that_ends() -> None:
    pair = SegmentPair()
    stuck = [pair.begin(SIZE, BUCKET, 0)[0] for _ in range(2)]
    third, _ = pair.begin(SIZE, BUCKET, 0)
    assert third not in stuck
    pair.release(third)
    assert pair.begin(SIZE, BUCKET, 0)[0] is third
    path = stuck[0].path
    assert os.path.exists(path)
    pair.release(stuck.pop(0))
    gc.collect()
    assert not os.path.exists(path)


def test_a_model_of_another_size_gets_other_memory() -> None:
    pair = SegmentPair()
    old, _ = pair.begin(SIZE, BUCKET, 0)
    pair.release(old)
    new, _ = pair.begin(2 * SIZE, BUCKET, 0)
    assert (new.size_bytes, new.identity == old.identity) == (2 * SIZE, False)
