"""Packing: every sequence once, whole, within the budget, and always the same way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.learner.step.plan import pack, pack_evenly


def test_longest_first_into_the_first_that_has_room() -> None:
    # 6 | 6+4 | 5 | 5+3 | 10 full, 8 + 2
    assert pack([3, 6, 2, 5, 4], budget_tokens=10) == [[1, 4], [3, 0, 2]]


def test_equal_lengths_are_neighbours_in_input_order() -> None:
    assert pack([2, 3, 2, 3, 2], budget_tokens=100) == [[1, 3, 0, 2, 4]]


def test_too_long_goes_alone_and_empty_goes_nowhere() -> None:
    assert pack([3, 50, 0, 3], budget_tokens=8) == [[1], [0, 3]]
    assert pack([], budget_tokens=8) == []
    assert pack([0], budget_tokens=8) == []


def test_budget_must_be_positive() -> None:
    with pytest.raises(ValueError, match="budget_tokens is 0"):
        pack([1], 0)


@given(st.lists(st.integers(0, 60), max_size=80), st.integers(1, 70))
def test_every_sequence_is_somewhere_once(lengths: list[int], budget: int) -> None:
    bins = pack(lengths, budget)
    assert sorted(i for indices in bins for i in indices) == [i for i, n in enumerate(lengths) if n > 0]
    for indices in bins:
        sizes = [lengths[i] for i in indices]
        assert sizes == sorted(sizes, reverse=True)
        assert sum(sizes) <= budget or len(sizes) == 1


def test_by_cost_the_next_longest_goes_where_least_is_done() -> None:
    lengths = [8, 4, 4, 2, 2, 2]
    costs = [float(length**2) for length in lengths]
    assert pack(lengths, budget_tokens=12) == [[0, 1], [2, 3, 4, 5]]
    assert pack_evenly(lengths, costs, 14, 2) == [[0], [1, 2, 3, 4, 5]]
    assert pack_evenly(lengths, costs, 14, 3) == [[0], [1, 3, 5], [2, 4]]
    assert pack_evenly([], [], 14, 2) == []


def test_where_even_costs_find_no_room_the_tokens_decide() -> None:
    lengths = [6, 4, 4, 3, 3]  # by cost, 4 + 4 leave no room beside the second 3
    costs = [float(length**2) for length in lengths]
    assert pack_evenly(lengths, costs, 10, 2) == pack(lengths, 10) == [[0, 1], [2, 3, 4]]


@given(st.lists(st.integers(0, 60), max_size=60), st.integers(1, 70), st.integers(0, 3))
def test_by_cost_every_sequence_is_somewhere_once(lengths: list[int], budget: int, more: int) -> None:
    fewest = len(pack(lengths, budget))
    bins = pack_evenly(lengths, [length + length**2 / 50 for length in lengths], budget, fewest + more)
    assert sorted(i for indices in bins for i in indices) == [i for i, n in enumerate(lengths) if n > 0]
    assert len(bins) <= fewest + more
    for indices in bins:
        sizes = [lengths[i] for i in indices]
        assert sizes == sorted(sizes, reverse=True)
        assert sum(sizes) <= budget or len(sizes) == 1
