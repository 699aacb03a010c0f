"""Advantages against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from learner.advantages.group import Preset, advantages, weighted_rewards

NAN = math.nan


@pytest.mark.parametrize(
    ("preset", "high", "low"),
    [
        # mean 1/2, sample std 1/√3: ±0.5 / (0.57735 + 0.0001)
        ("trl", 0.5 / (math.sqrt(1 / 3) + 1e-4), -0.5 / (math.sqrt(1 / 3) + 1e-4)),
        # the others of a 1 are [0, 0, 1]: mean 1/3, std 1/√3
        ("nemo", (2 / 3) / (math.sqrt(1 / 3) + 1e-6), -(2 / 3) / (math.sqrt(1 / 3) + 1e-6)),
        ("dr_grpo", 0.5, -0.5),
        ("rloo", 2 / 3, -2 / 3),
    ],
)
def test_two_of_four(preset: Preset, high: float, low: float) -> None:
    np.testing.assert_allclose(
        advantages(np.array([1.0, 0, 0, 1]), preset), [high, low, low, high], rtol=1e-12
    )


@pytest.mark.parametrize(
    ("preset", "high", "low", "digits"),
    [
        ("trl", 1.4997, -0.4999, 4),
        ("nemo", 1.0, -0.57735, 5),  # the others of the 1 are equal, so their std 0 does not divide
        ("dr_grpo", 0.75, -0.25, 12),
        ("rloo", 1.0, -1 / 3, 12),
    ],
)
def test_one_of_four(preset: Preset, high: float, low: float, digits: int) -> None:
    np.testing.assert_allclose(
        advantages(np.array([1.0, 0, 0, 0]), preset), [high, low, low, low], atol=0.6 * 10**-digits
    )


@pytest.mark.parametrize("preset", ["trl", "nemo", "dr_grpo", "rloo"])
def test_rows_without_a_reward_neither_train_nor_count(preset: Preset) -> None:
    alone = advantages(np.array([1.0, 0, 0, 1]), preset)
    mixed = advantages(np.array([1.0, NAN, 0, 0, NAN, 1]), preset)
    np.testing.assert_array_equal(mixed, [alone[0], 0, alone[1], alone[2], 0, alone[3]])


@pytest.mark.parametrize("preset", ["trl", "nemo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("totals", [[0.3, 0.3, 0.3], [NAN, 2.0, NAN], [NAN, NAN], []])
def test_no_contrast_no_advantage(preset: Preset, totals: list[float]) -> None:
    np.testing.assert_allclose(advantages(np.array(totals), preset), np.zeros(len(totals)), atol=1e-12)


def test_two_completions_leave_one_out_has_no_std() -> None:
    np.testing.assert_array_equal(advantages(np.array([1.0, 0]), "nemo"), [1, -1])


def test_weighted_rewards_skip_what_does_not_apply() -> None:
    rewards_CF = np.array([[1, 0.5], [NAN, 0.5], [1, NAN], [NAN, NAN]], np.float32)
    totals_C = weighted_rewards(rewards_CF, [2.0, -1.0])
    np.testing.assert_array_equal(totals_C, [1.5, -0.5, 2.0, NAN])


def test_unknown_preset() -> None:
    with pytest.raises(ValueError, match="'gae'"):
        advantages(np.array([1.0, 0]), "gae")  # type: ignore[arg-type]
