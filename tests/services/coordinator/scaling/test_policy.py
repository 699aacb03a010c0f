"""The sizes of pools, by numbers worked out by hand and by a simulated run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.scaling import LOADS, simulate
from paceline.services.coordinator.scaling.policy import Bounds, Measurement, PoolState, decide

BOUNDS = Bounds(least=0, most=20, cold_start_s=60.0)
BUSY = Measurement(
    seconds=100.0,
    has_run=True,
    ready=4,
    starting=0,
    completed=200,
    held=64,
    occupied=1.0,
    steps=10,
    step_s=10.0,
    groups_per_step=40,
)
"""Four full workers complete 0.5 groups/s each; the learner trains 4 groups/s."""
SETTLED = PoolState(desired=4, groups=500.0, full_worker_s=1000.0, demand=4.0, held=64)


def test_a_run_begins_with_the_first_size() -> None:
    before = Measurement(15.0, True, 0, 0, 0, 0, 0.0)
    assert decide(PoolState(), before, replace(BOUNDS, first=3)).desired == 3


def test_a_pool_grows_to_the_need_at_once() -> None:
    state = decide(SETTLED, BUSY, replace(BOUNDS, most=100))
    assert state.rate == pytest.approx(0.5)
    assert state.need == pytest.approx(4 * 1.1 / 0.5)
    assert state.desired == 8  # 9 are needed, and it doubles at most
    assert decide(state, replace(BUSY, ready=4, starting=4), BOUNDS).desired == 9


def test_workers_that_are_starting_are_not_ordered_again() -> None:
    state = replace(SETTLED, desired=9)
    for _ in range(20):
        state = decide(state, replace(BUSY, starting=5), BOUNDS)
        assert state.desired == 9


def test_bounds_hold() -> None:
    assert decide(replace(SETTLED, demand=400.0), replace(BUSY, ready=100, steps=0), BOUNDS).desired == 20
    low = replace(SETTLED, desired=12, demand=0.1)
    for _ in range(10):
        low = decide(low, replace(BUSY, steps=0), replace(BOUNDS, least=2))
    assert low.desired == 2


def test_a_pool_shrinks_only_when_the_need_has_been_low_for_long() -> None:
    state = replace(SETTLED, desired=20)
    sizes = []
    for _ in range(4):
        state = decide(state, BUSY, BOUNDS)
        sizes.append(state.desired)
    assert sizes == [20, 20, 9, 9]


def test_it_shrinks_to_the_largest_size_that_was_needed_meanwhile() -> None:
    state = decide(replace(SETTLED, desired=20), replace(BUSY, step_s=8.0), BOUNDS)
    assert state.largest_low == 11
    for _ in range(4):
        state = decide(state, BUSY, BOUNDS)
    assert state.desired == 11


def test_without_a_run_the_pool_goes_to_its_least_size_after_a_while() -> None:
    idle = Measurement(100.0, False, 4, 0, 0, 0, 0.0)
    state, sizes = SETTLED, []
    for _ in range(3):
        state = decide(state, idle, BOUNDS)
        sizes.append(state.desired)
    assert sizes == [4, 4, 0]
    assert decide(state, BUSY, BOUNDS).desired >= 1


def test_a_new_load_is_learnt_from_one_measurement() -> None:
    state = decide(SETTLED, replace(BUSY, steps=1, step_s=2.0), BOUNDS)
    assert state.demand == 20.0


def test_a_filling_pool_does_not_look_slow() -> None:
    filling = Measurement(
        15.0, True, 4, 0, completed=40, held=64, occupied=1.0, steps=1, step_s=10.0, groups_per_step=40
    )
    state = decide(PoolState(desired=4), filling, BOUNDS)
    assert state.rate == pytest.approx((40 + 32) / 60)


def test_another_kind_of_work_is_learnt_from_one_measurement() -> None:
    fast = decide(SETTLED, replace(BUSY, completed=2000), BOUNDS)
    assert fast.rate == pytest.approx(5.0)
    slower = decide(SETTLED, replace(BUSY, completed=100), BOUNDS)  # half as fast may be chance
    assert 0.25 < slower.rate < 0.5


def test_a_pool_serves_its_share_and_may_go_to_zero_without_one() -> None:
    assert decide(SETTLED, replace(BUSY, share=0.25), BOUNDS).need == pytest.approx(0.25 * 8.8)
    state = replace(SETTLED, desired=2)
    for _ in range(5):
        state = decide(state, replace(BUSY, ready=2, share=0.0), BOUNDS)
    assert state.desired == 0
    assert decide(state, replace(BUSY, ready=0, occupied=0.0, completed=0, share=0.5), BOUNDS).desired > 0


def test_the_time_for_which_a_need_has_to_be_low_is_named_or_follows_the_cold_start() -> None:
    assert Bounds(cold_start_s=30.0).hold_s == 300.0
    assert Bounds(cold_start_s=300.0).hold_s == 600.0
    assert Bounds(cold_start_s=300.0, low_s=4.0).hold_s == 4.0


def test_next_to_nothing_changes_next_to_nothing_of_the_rate() -> None:
    state = decide(SETTLED, replace(BUSY, occupied=0.01, completed=1), BOUNDS)
    assert state.rate == pytest.approx(SETTLED.rate, rel=0.02)
    idle = decide(SETTLED, replace(BUSY, occupied=0.0, completed=3), BOUNDS)
    assert idle.rate == SETTLED.rate, "groups of workers that have left since say nothing"


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_a_simulated_run_settles_and_feeds_its_learner(load: object) -> None:
    result = simulate(load, 120.0, 7)  # type: ignore[arg-type]
    assert result["direction_changes_per_load_change"] <= 1  # type: ignore[operator]
    assert result["learner_wait_share"] <= 0.05  # type: ignore[operator]
