"""Metrics of a batch, with numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from exchange_drivers import make_spec

from paceline.services.coordinator.exchange.batch_metrics import batch_metrics

NAN = math.nan


def a_group(rewards: list[list[float]], tokens: int = 8, oldest_step: int = 3) -> dict[str, Any]:
    """Return a row of two completions, with the mean that the exchange records."""
    rewards_CF = np.array(rewards, "<f4")
    known = rewards_CF[~np.isnan(rewards_CF).all(axis=1)]
    mean = float(np.nansum(known, axis=1).mean()) if len(known) else None
    return {"rewards": rewards_CF.tobytes(), "reward": mean, "tokens": tokens, "oldest_step": oldest_step}


def metrics_of(tmp_path: Any, *groups: dict[str, Any], functions: int = 1, **second: Any) -> dict[str, float]:
    rewards = [{"function": "exact_match"}, {"function": "format_reward", **second}][:functions]
    spec = make_spec(tmp_path, rewards=rewards)
    assert spec.grpo.num_generations_per_prompt == 2
    return batch_metrics(spec, groups, 4)


def test_spread_of_two_groups(tmp_path: Any) -> None:
    metrics = metrics_of(tmp_path, a_group([[1.0], [0.0]]), a_group([[1.0], [1.0]], tokens=12, oldest_step=4))
    assert metrics["reward"] == 0.75
    assert metrics["reward_std"] == pytest.approx(0.5)  # of 1, 0, 1, 1: sqrt((3·0.0625 + 0.5625) / 3)
    assert metrics["reward_group_std"] == pytest.approx(math.sqrt(0.5) / 2)
    assert metrics["zero_variance_fraction"] == 0.5
    assert metrics["unscored_fraction"] == 0.0
    assert metrics["completion_length"] == 5.0
    assert metrics["trained_tokens"] == 20.0
    assert (metrics["age/0"], metrics["age/1"]) == (1.0, 1.0)


def test_functions_are_counted_where_they_gave_a_number(tmp_path: Any) -> None:
    metrics = metrics_of(tmp_path, a_group([[1.0, NAN], [0.0, 0.5]]), functions=2)
    assert metrics["reward/exact_match"] == 0.5
    assert metrics["reward_std/exact_match"] == pytest.approx(math.sqrt(0.5))
    assert metrics["reward/format_reward"] == 0.5
    assert math.isnan(metrics["reward_std/format_reward"])
    assert metrics["zero_variance_fraction"] == 0.0


def test_a_batch_without_any_reward(tmp_path: Any) -> None:
    metrics = metrics_of(tmp_path, a_group([[NAN], [NAN]]))
    assert math.isnan(metrics["reward"])
    assert metrics["unscored_fraction"] == 1.0
    assert metrics["zero_variance_fraction"] == 1.0


def test_quantiles_of_a_function_and_the_share_that_it_left_out(tmp_path: Any) -> None:
    groups = [a_group([[0.0], [1.0]]), a_group([[2.0], [4.0]]), a_group([[NAN], [8.0]])]
    metrics = metrics_of(tmp_path, *groups)
    percentiles = [metrics[f"reward_p{p}/exact_match"] for p in (10, 50, 90)]
    assert percentiles == pytest.approx([0.4, 2.0, 6.4])  # of 0, 1, 2, 4, 8 at ranks 0.4, 2, 3.6
    assert metrics["unscored_fraction/exact_match"] == pytest.approx(1 / 6)


def test_a_function_that_left_everything_out_has_no_quantiles(tmp_path: Any) -> None:
    metrics = metrics_of(tmp_path, a_group([[NAN], [NAN]]))
    assert metrics["unscored_fraction/exact_match"] == 1.0
    assert not [name for name in metrics if name.startswith("reward_p")]


def test_a_schedule_weighs_by_the_step_of_the_batch(tmp_path: Any) -> None:
    schedule = [[2, 1.0], [10, 5.0]]
    metrics = metrics_of(tmp_path, a_group([[1.0, 1.0], [0.0, 0.0]]), functions=2, weight_schedule=schedule)
    assert metrics["reward_weight/format_reward"] == 2.0  # at step 4, a quarter of the way from 1 to 5
    assert metrics["reward"] == 1.5  # 1 + 2 · 1, and 0
    assert "reward_weight/exact_match" not in metrics


def test_a_closed_gate_leaves_only_its_own_reward(tmp_path: Any) -> None:
    groups = [a_group([[1.0, 0.5], [1.0, 0.0]]), a_group([[NAN, 0.2], [1.0, NAN]])]
    metrics = metrics_of(tmp_path, *groups, functions=2, gate_min=0.5)
    assert metrics["closed_fraction/format_reward"] == 0.5
    assert metrics["reward"] == pytest.approx((1.5 + 0.0 + 0.2 + 1.0) / 4)
    assert metrics["unscored_fraction"] == 0.0


@pytest.mark.parametrize(
    ("advantage", "second", "share"),
    [
        ("trl", [[1.0, 0.0], [0.0, 2.0]], 1.0),  # weights 1 and 0.5: equal totals
        ("gdpo", [[1.0, 0.0], [0.0, 2.0]], 0.5),  # but not each function by itself
        ("gdpo", [[1.0, 0.0], [0.0, 1.0]], 0.5),
        ("reinforce_pp", [[1.0, 0.0], [0.0, 2.0]], None),
    ],
)
def test_the_share_without_an_advantage_is_that_of_the_preset(
    tmp_path: Any, advantage: str, second: list[list[float]], share: float | None
) -> None:
    rewards = [{"function": "exact_match"}, {"function": "format_reward", "weight": 0.5}]
    spec = make_spec(tmp_path, rewards=rewards, grpo={"advantage": advantage})
    metrics = batch_metrics(spec, [a_group([[1.0, 1.0], [1.0, 1.0]]), a_group(second)], 4)
    assert metrics.get("zero_variance_fraction") == share


@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 1 / 3, 1e6 + 0.1, -0.35])
def test_the_spread_of_equal_rewards_is_exactly_zero(tmp_path: Any, reward: float) -> None:
    metrics = metrics_of(tmp_path, *[a_group([[reward], [reward]])] * 3)
    assert [metrics[name] for name in ("reward_std", "reward_group_std", "reward_std/exact_match")] == [0.0] * 3
