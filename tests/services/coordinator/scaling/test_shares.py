"""The demand of one role divided between pools of different speed and cost, by numbers worked out by hand."""

from __future__ import annotations

import pytest

from paceline.services.coordinator.scaling.scaler import Supply, shares


def test_the_cheapest_groups_come_first_and_the_next_pool_takes_the_rest() -> None:
    pools = {"spot": Supply(1.0, 4, 2.0, True), "reserved": Supply(2.0, 10, 8.0, True)}
    found = shares(8.0, pools, headroom=0.0)
    assert found == {"spot": pytest.approx(0.5), "reserved": pytest.approx(0.5)}
    assert shares(3.0, pools, headroom=0.0) == {"spot": 1.0, "reserved": 0.0}


def test_headroom_counts_against_what_a_pool_is_able_to() -> None:
    pools = {"a": Supply(1.0, 4, 1.0, True), "b": Supply(1.0, 4, 2.0, False)}
    assert shares(4.0, pools, headroom=0.25)["a"] == pytest.approx(0.8)


def test_pools_that_are_too_small_together_serve_all_of_it() -> None:
    pools = {"a": Supply(1.0, 2, 1.0, True), "b": Supply(1.0, 2, 2.0, True)}
    assert sum(shares(100.0, pools, headroom=0.1).values()) == pytest.approx(1.0)


def test_a_pool_of_unknown_rate_counts_like_the_others_and_a_used_one_stays_first() -> None:
    pools = {"new": Supply(0.0, 8, 1.0, False), "old": Supply(2.0, 8, 1.1, True)}
    assert shares(4.0, pools, headroom=0.0) == {"new": 0.0, "old": 1.0}, "cheaper by less than the margin"
    cheap = pools | {"new": Supply(0.0, 8, 0.5, False)}
    assert shares(4.0, cheap, headroom=0.0) == {"new": 1.0, "old": 0.0}


def test_without_a_known_rate_or_demand_the_cheapest_workers_serve_all() -> None:
    pools = {"a": Supply(0.0, 1, 5.0, False), "b": Supply(0.0, 1, 4.0, False)}
    assert shares(0.0, pools, headroom=0.1) == {"a": 0.0, "b": 1.0}
    assert shares(0.0, {}, headroom=0.1) == {}
