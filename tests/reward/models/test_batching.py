"""Passes of a token budget."""

from __future__ import annotations

import random

from paceline.reward.models.scorer import passes


def test_texts_of_similar_length_share_a_pass() -> None:
    assert passes([3, 10, 4, 9], 20) == [[1, 3], [2, 0]]


def test_a_text_above_the_budget_is_a_pass_alone() -> None:
    assert passes([5, 100, 5], 10) == [[1], [0, 2]]


def test_nothing_and_empty_texts() -> None:
    assert passes([], 10) == []
    assert passes([0, 0], 10) == [[0, 1]]


def test_every_text_once_and_no_pass_above_the_budget() -> None:
    rng = random.Random(0)
    lengths = [rng.randint(1, 300) for _ in range(500)]
    found = passes(lengths, 1024)
    assert sorted(index for indices in found for index in indices) == list(range(500))
    assert all(len(indices) * max(lengths[i] for i in indices) <= 1024 for indices in found)
