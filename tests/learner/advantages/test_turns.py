"""Advantages of turns, worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from learner.advantages.turns import Episode, discounted_turns, turn_level

NAN = math.nan


def test_discounted_rewards_to_go_are_relative_to_all_turns_of_the_group() -> None:
    group = [
        Episode(1.0, 0.0, np.array([NAN, 2.0])),  # last turn: 2 + 1 = 3; first: 0 + 0.5 * 3 = 1.5
        Episode(NAN, 0.0, np.array([0.5])),  # no outcome, but a turn's reward
        Episode(NAN, 0.0, np.array([NAN])),  # no reward at all
    ]
    first, second, third = discounted_turns(group, 0.5, "dr_grpo")
    mean = (1.5 + 3.0 + 0.5) / 3
    assert first.tolist() == pytest.approx([1.5 - mean, 3.0 - mean])
    assert second.tolist() == pytest.approx([0.5 - mean])
    assert third.tolist() == [0.0]


def test_without_discount_and_turn_rewards_every_turn_has_the_outcome() -> None:
    group = [Episode(1.0, 0.0, np.full(3, NAN)), Episode(0.0, 0.0, np.full(3, NAN))]
    first, second = discounted_turns(group, 1.0, "dr_grpo")
    assert first.tolist() == [0.5, 0.5, 0.5]
    assert second.tolist() == [-0.5, -0.5, -0.5]


def test_turns_are_compared_with_the_same_turn_of_other_samples() -> None:
    group = [
        Episode(1.0, 0.25, np.array([1.0, NAN])),
        Episode(0.0, -0.25, np.array([0.0, 4.0])),
        Episode(0.0, 0.0, np.array([NAN])),
    ]
    first, second, third = turn_level(group, 2.0, "dr_grpo")
    assert first.tolist() == [0.25 + 2 * 0.5, 0.25]
    assert second.tolist() == [-0.25 - 2 * 0.5, -0.25]  # turn 1 has no other to compare with
    assert third.tolist() == [0.0]


def test_a_group_without_turns_has_no_advantages() -> None:
    assert [a.tolist() for a in turn_level([Episode(1.0, 0.5, np.zeros(0))], 1.0, "trl")] == [[]]
    assert [a.tolist() for a in discounted_turns([Episode(1.0, 0.5, np.zeros(0))], 1.0, "trl")] == [[]]
