"""Mean used share of a worker's capacity, with a clock of the test."""

from __future__ import annotations

import pytest

from paceline.services.common.reporting.progress_log import Occupancy


def test_the_mean_over_the_time_since_the_last_report() -> None:
    now = [0.0]
    occupancy = Occupancy(lambda: now[0])
    now[0] = 0.5
    occupancy.note(1, 4)
    now[0] = 1.0
    occupancy.note(3, 4)
    now[0] = 2.0
    assert occupancy.take() == pytest.approx((0.5 * 0.25 + 1.0 * 0.75) / 2.0)
    now[0] = 3.0
    assert occupancy.take() == pytest.approx(0.75)
    assert occupancy.take() == pytest.approx(0.75), "no time has passed"


def test_more_work_than_room_is_a_full_worker() -> None:
    now = [0.0]
    occupancy = Occupancy(lambda: now[0])
    occupancy.note(9, 4)
    now[0] = 1.0
    assert occupancy.take() == 1.0
    occupancy.note(1, 0)  # an engine that has no capacity yet
    now[0] = 2.0
    assert occupancy.take() == 1.0
