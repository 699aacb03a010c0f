"""Length rewards against their formulas, worked out by hand."""

from __future__ import annotations

import pytest

from paceline.reward.builtin.formats import length, soft_overlong


def ids(*lengths: int) -> list[list[int]]:
    return [[1] * n for n in lengths]


def texts(count: int) -> list[str]:
    return [""] * count


def test_length_is_one_at_the_target_and_falls_linearly() -> None:
    rewards = length(texts(5), texts(5), ids(10, 12, 7, 14, 99), target_tokens=10, tolerance_tokens=4)
    assert rewards == [1.0, 0.5, 0.25, 0.0, 0.0]


def test_length_prefers_short_ones_by_default() -> None:
    assert length(texts(4), texts(4), ids(0, 25, 100, 101), tolerance_tokens=100) == [1.0, 0.75, 0.0, 0.0]


def test_soft_overlong_is_dapos_formula() -> None:
    # L = 10, C = 4: free up to 6, then a quarter per token, -1 from 10 on.
    rewards = soft_overlong(texts(7), texts(7), ids(0, 6, 7, 9, 10, 11, 50), max_completion_tokens=10, soft_tokens=4)
    assert rewards == [0.0, 0.0, -0.25, -0.75, -1.0, -1.0, -1.0]


@pytest.mark.parametrize("soft_tokens", [0, -1, 11])
def test_soft_overlong_refuses_an_impossible_zone(soft_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"soft_tokens {soft_tokens} "):
        soft_overlong(texts(1), texts(1), ids(1), max_completion_tokens=10, soft_tokens=soft_tokens)


def test_length_refuses_an_impossible_tolerance() -> None:
    with pytest.raises(ValueError, match="tolerance_tokens 0"):
        length(texts(1), texts(1), ids(1), tolerance_tokens=0)
