"""Combined rewards of several functions, with numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from paceline.advantages import closed_gates, gated, group_totals, totals, weighted_rewards, weights_at
from paceline.spec import RewardFunctionSection

NAN = math.nan


def functions(*changes: dict[str, Any]) -> list[RewardFunctionSection]:
    return [RewardFunctionSection(function=f"f{index}", **each) for index, each in enumerate(changes)]


@pytest.mark.parametrize(
    ("step", "weight"), [(0, 1.0), (10, 1.0), (15, 0.75), (20, 0.5), (30, 0.5), (60, 2.0), (1000, 2.0)]
)
def test_a_schedule_is_linear_between_its_points_and_constant_outside(step: int, weight: float) -> None:
    schedule = [[10, 1.0], [20, 0.5], [40, 0.5], [60, 2.0]]
    assert weights_at(functions({"weight_schedule": schedule}, {"weight": 3.0}), step) == [weight, 3.0]


def test_one_point_is_a_constant() -> None:
    assert weights_at(functions({"weight_schedule": [[5, 0.25]]}), 0) == [0.25]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"weight_schedule": [[5, 1.0], [5, 2.0]]}, "step 5 comes after step 5"),
        ({"weight_schedule": [[5, 1.0], [4, 2.0]]}, "step 4 comes after step 5"),
        ({"weight_schedule": [[5, math.inf]]}, "finite number"),
        ({"weight_schedule": [[0, 1.0]], "weight": 2.0}, "weight 2 with weight_schedule"),
        ({"gate_min": math.nan}, "finite number"),
    ],
)
def test_contradictory_rewards_are_refused(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        functions(change)


def test_a_closed_gate_sets_the_others_to_zero_and_keeps_its_own_reward() -> None:
    gates = functions({}, {"gate_min": 1.0}, {})
    rewards_CF = np.array([[0.7, 1.0, NAN], [0.7, 0.9, NAN], [0.7, NAN, 2.0]])
    np.testing.assert_array_equal(gated(rewards_CF, gates), [[0.7, 1, NAN], [0, 0.9, 0], [0.7, NAN, 2]])
    assert closed_gates(rewards_CF, gates).tolist() == [[False] * 3, [False, True, False], [False] * 3]


def test_gates_do_not_close_each_other() -> None:
    gates = functions({"gate_min": 0.0}, {"gate_min": 1.0}, {})
    rewards_CF = np.array([[-1.0, 1.0, 5.0], [-1.0, 0.5, 5.0]], np.float32)
    got_CF = gated(rewards_CF, gates)
    assert got_CF.tolist() == [[-1, 1, 0], [-1, 0.5, 0]]
    assert got_CF.dtype == np.float32


def test_without_gates_the_rewards_are_untouched() -> None:
    rewards_CF = np.array([[1.0, NAN]])
    assert gated(rewards_CF, functions({}, {})) is rewards_CF


def test_a_total_is_the_weighted_sum_of_the_functions_that_apply() -> None:
    chosen = functions({"weight": 2.0}, {"weight": 0.5})
    found = totals(np.array([[1.0, 1.0], [1.0, NAN], [NAN, NAN]], np.float32), chosen, 0)
    assert found[:2].tolist() == [2.5, 2.0]
    assert math.isnan(found[2])
    assert totals(np.array([[3e38, 3e38]], np.float32), functions({"weight": 9.0}, {}), 0).tolist() == [math.inf]


def test_weighted_rewards_skip_functions_that_do_not_apply() -> None:
    rewards_CF = np.array([[1, 0.5], [NAN, 0.5], [1, NAN], [NAN, NAN]], np.float32)
    totals_C = weighted_rewards(rewards_CF, [2.0, -1.0])
    np.testing.assert_array_equal(totals_C, [1.5, -0.5, 2.0, NAN])


@pytest.mark.parametrize("minimum", [0.1, 0.3, 0.7, 0.95, 1 / 3, 1.0, -0.2])
def test_a_reward_at_the_least_value_opens_the_gate(minimum: float) -> None:
    gates = functions({"gate_min": minimum}, {})
    at, beneath = np.float32(minimum), np.nextafter(np.float32(minimum), np.float32(-9))
    for dtype in (np.float32, np.float64):
        closed = closed_gates(np.array([[at, 1.0], [beneath, 1.0]], dtype), gates)
        assert closed[:, 0].tolist() == [False, True]


def test_totals_of_a_group_that_rounding_tells_apart_are_equal() -> None:
    chosen = functions({"weight": 0.1}, {"weight": 0.2}, {"weight": 0.3})
    rewards_CF = np.array([[1, 1, 0], [0, 0, 1], [1, 0, 0], [NAN, NAN, NAN], [0, 0, 1]], np.float32)
    first, second, third, none, last = group_totals(rewards_CF, chosen, 0).tolist()
    assert first == second == last != third
    assert third == 0.1
    assert math.isnan(none)
    assert len({*totals(rewards_CF, chosen, 0)[[0, 1]].tolist()}) == 2, "the sums themselves differ"


def test_a_weight_is_not_rounded_to_float32() -> None:
    assert totals(np.array([[1.0]], np.float32), functions({"weight": 0.7}), 0).tolist() == [0.7]
