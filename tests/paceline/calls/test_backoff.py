"""Pauses between retries."""

from __future__ import annotations

from paceline.calls.backoff import ExponentialBackoff, pause_after


def test_each_pause_is_twice_the_one_before_up_to_the_longest() -> None:
    backoff = ExponentialBackoff(0.1, 0.5)
    assert [backoff.next_s() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    backoff.reset()
    assert backoff.next_s() == 0.1


def test_pauses_grow_from_5_to_60_seconds_where_nothing_else_is_given() -> None:
    backoff = ExponentialBackoff()
    assert [backoff.next_s() for _ in range(6)] == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


def test_no_number_of_failures_is_too_large() -> None:
    assert pause_after(1_000_000, 0.5, 30.0) == 30.0
