"""Curves made of characters."""

from __future__ import annotations

import math

from paceline.services.common.reporting.terminal import chart, scaled, sparkline


def test_values_outside_of_0_to_1_are_scaled_to_their_range() -> None:
    assert scaled([0.25, 0.5]) == [0.25, 0.5]
    assert scaled([-1.0, 1.0, 3.0]) == [0.0, 0.5, 1.0]
    assert scaled([7.0, math.nan, 7.0]) == [0.5, 0.5]
    assert scaled([]) == []


def test_a_line_of_characters_averages_neighbours() -> None:
    assert sparkline([0.0, 0.5, 1.0], 8) == " ▄█"
    assert sparkline([0.0, 0.0, 1.0, 1.0], 2) == " █"
    assert len(chart([0.5] * 100, width=20, height=4).splitlines()) == 6
