"""Shares of a rate, on a clock that only sleeping moves."""

from __future__ import annotations

import pytest

from paceline.reward.endpoints.client import MAX_PAUSE_S, RequestRate, share_of, slots_of


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


async def starts(rate: RequestRate, clock: Clock, per_minute: float | None, number: int) -> list[float]:
    found = []
    for _ in range(number):
        await rate.turn(per_minute)
        found.append(clock.now_s - 100.0)
    return found


async def test_requests_start_at_even_distances() -> None:
    clock = Clock()
    rate = RequestRate(clock, clock.sleep)
    assert await starts(rate, clock, 30.0, 4) == [0.0, 2.0, 4.0, 6.0]
    assert await starts(rate, clock, None, 2) == [6.0, 6.0]


async def test_processes_with_shares_keep_the_limit_together() -> None:
    times: list[float] = []
    for _ in range(6):  # two workers of three processes
        clock = Clock()
        rate = RequestRate(clock, clock.sleep)
        times += await starts(rate, clock, share_of(60.0, 6), 25)
    for start_s in (0.0, 30.0, 60.0, 85.0):
        assert sum(start_s <= time_s < start_s + 60.0 for time_s in times) <= 60
    assert sum(time_s < 60.0 for time_s in times) == 60


async def test_a_pause_holds_for_all_and_is_bounded() -> None:
    clock = Clock()
    rate = RequestRate(clock, clock.sleep)
    rate.pause(7.0)
    rate.pause(3.0)
    assert await starts(rate, clock, None, 2) == [7.0, 7.0]
    rate.pause(1e9)
    assert await starts(rate, clock, None, 1) == [7.0 + MAX_PAUSE_S]


@pytest.mark.parametrize(("limit", "processes", "slots"), [(32, 4, 8), (3, 8, 1), (5, 0, 5)])
def test_slots_are_divided_and_never_none(limit: int, processes: int, slots: int) -> None:
    assert slots_of(limit, processes) == slots
