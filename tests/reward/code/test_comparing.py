"""Outputs that are equal, and outputs that are not."""

from __future__ import annotations

import pytest

from paceline.reward.code.cases import Compare, equal_outputs


@pytest.mark.parametrize(
    ("found", "right", "compare", "tolerance", "equal"),
    [
        ("3\n", "3", "lines", 0.0, True),
        ("3  \r\n\n", "3\n", "lines", 0.0, True),
        (" 3", "3", "lines", 0.0, False),
        ("1\n\n2", "1\n2", "lines", 0.0, False),
        ("1\n\n2 ", "1 2", "tokens", 0.0, True),
        ("1 2", "1 2 3", "tokens", 0.0, False),
        ("3\n", "3", "exact", 0.0, False),
        ("0.1000001", "0.1", "lines", 1e-6, True),
        ("0.10001", "0.1", "lines", 1e-6, False),
        ("1000001 x", "1000000 x", "tokens", 1e-5, True),
        ("nan", "1", "tokens", 1e-5, False),
        ("x", "y", "tokens", 1.0, False),
    ],
)
def test_outputs(found: str, right: str, compare: Compare, tolerance: float, equal: bool) -> None:
    assert equal_outputs(found, right, compare, tolerance) is equal
