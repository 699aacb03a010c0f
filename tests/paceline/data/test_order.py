"""Orders: every row in each epoch, weights in each block, and the same row for a draw wherever an order begins."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from paceline.data.prompts import Epochs, Mixture
from paceline.spec.sections.data import MIXTURE_BLOCK


def test_epochs_have_the_order_of_earlier_versions() -> None:
    order = Epochs((3, 4), 7, shuffle=True)
    expected = [*np.random.default_rng((7, 0)).permutation(7), *np.random.default_rng((7, 1)).permutation(7)]
    assert [order.index(cursor) for cursor in range(14)] == [int(row) for row in expected]
    assert [order.part(cursor) for cursor in range(7)] == [int(row >= 3) for row in expected[:7]]
    assert order.rows(3) == sorted(int(row) for row in expected[:3])


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_mixture_is_resumed_at_every_draw(shuffle: bool) -> None:
    sizes, weights, draws = (5, 40, 7), (2.0, 1.0, 0.5), 300
    whole = Mixture(sizes, weights, 3, shuffle=shuffle)
    expected = [whole.index(cursor) for cursor in range(draws)]
    for start in range(draws):
        resumed = Mixture(sizes, weights, 3, shuffle=shuffle)
        assert [resumed.index(cursor) for cursor in range(start, min(start + 3, draws))] == expected[start : start + 3]
    rng = np.random.default_rng(0)
    jumps = rng.integers(0, draws, 200)
    assert [whole.index(int(cursor)) for cursor in jumps] == [expected[cursor] for cursor in jumps]


def test_a_mixture_is_resumed_across_blocks() -> None:
    cursors = range(2 * MIXTURE_BLOCK - 50, 2 * MIXTURE_BLOCK + 50)
    whole = Mixture((50, 60), (1.0, 3.0), 1, shuffle=True)
    expected = [whole.index(cursor) for cursor in cursors]
    assert [Mixture((50, 60), (1.0, 3.0), 1, shuffle=True).index(cursor) for cursor in cursors] == expected


def test_a_block_has_exactly_the_weights_and_parts_of_it_nearly() -> None:
    order = Mixture((10, 10, 10), (5.0, 3.0, 2.0), 11, shuffle=True)
    parts = [order.part(cursor) for cursor in range(MIXTURE_BLOCK)]
    assert Counter(parts) == {0: 5000, 1: 3000, 2: 2000}
    for start in range(0, MIXTURE_BLOCK - 100, 37):
        counts = Counter(parts[start : start + 100])
        assert all(abs(counts[part] - 10 * weight) <= 3 for part, weight in ((0, 5), (1, 3), (2, 2)))


def test_the_rows_of_a_part_come_in_epochs_of_its_own() -> None:
    order = Mixture((4, 3), (1.0, 2.0), 5, shuffle=True)
    drawn = [order.index(cursor) for cursor in range(90)]
    for rows in (range(4), range(4, 7)):
        own = [row for row in drawn if row in rows]
        epochs = [own[start : start + len(rows)] for start in range(0, len(own) - len(rows) + 1, len(rows))]
        assert all(sorted(epoch) == list(rows) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1
    assert order.rows(90) == list(range(7))


def test_shares_that_do_not_divide_a_block_are_rounded_to_it() -> None:
    order = Mixture((1, 1, 1), (1.0, 1.0, 1.0), 0, shuffle=False)
    counts = Counter(order.part(cursor) for cursor in range(MIXTURE_BLOCK))
    assert sorted(counts.values()) == [3333, 3333, 3334]


def test_seeds_differ() -> None:
    orders = [Mixture((20, 20), (1.0, 1.0), seed, shuffle=True) for seed in (1, 2)]
    assert [orders[0].index(c) for c in range(20)] != [orders[1].index(c) for c in range(20)]
