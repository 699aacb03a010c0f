"""Advantages of episodes in a step: one for each sample, the same for all its transcripts, or one for each turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from episode_groups import episode_group
from tiny_policy import make_spec

from paceline.learner.batch.samples import sequences_from_groups
from paceline.learner.objectives import objective_of
from paceline.learner.step.assign_advantages import sample_of_each, with_advantages
from paceline.learner.step.plan import plan_updates
from paceline.spec import RunSpec

CPU = torch.device("cpu")


def spec_of(**environment: Any) -> RunSpec:
    return make_spec(
        Path("nowhere"),
        grpo={"advantage": "dr_grpo"},
        sections={"environment": {"class": "a.py:A", **environment}},
    )


def advantages(spec: RunSpec, rewards: list[float]) -> list[list[float]]:
    """Return the advantages of the trained tokens of each transcript."""
    batch = sequences_from_groups([episode_group(rewards)], spec)
    updates = plan_updates(batch, 5, spec, objective_of(spec), CPU, 1)
    (update,) = with_advantages(batch, updates, spec, CPU, None)
    by_row: list[list[float]] = [[] for _ in batch]
    for micro in update.micro_batches:
        assert micro.advantages_N is not None
        for index, place in enumerate(micro.indices):
            by_row[place] = micro.advantages_N[micro.packed.sequence_N == index].tolist()
    return by_row


def test_rows_share_a_sample() -> None:
    batch = sequences_from_groups([episode_group([1.0, 0.0]), episode_group([1.0, 0.0], group_id=8)], spec_of())
    assert sample_of_each(batch).tolist() == [0, 0, 1, 2, 2, 3]


def test_all_rows_of_a_sample_have_its_advantage_and_count_once_in_the_mean() -> None:
    assert advantages(spec_of(), [1.0, 0.0]) == [[0.5, 0.5, 0.5], [0.5], [-0.5, -0.5]]


def test_a_sample_without_a_reward_has_no_part() -> None:
    assert advantages(spec_of(), [1.0, np.nan]) == [[0.0, 0.0, 0.0], [0.0], [0.0, 0.0]]


def test_discounted_rewards_reach_the_tokens_of_their_turns() -> None:
    # Sample 0 has rewards 0.5, none, 1.0 and the outcome 1: to go 2.5, 2.0, 2.0. Sample 1: 0 and the outcome 0.
    mean = (2.5 + 2.0 + 2.0 + 0.0) / 4
    first, second, third = advantages(spec_of(advantage="discounted"), [1.0, 0.0])
    assert first == pytest.approx([2.5 - mean, 2.5 - mean, 2.0 - mean])
    assert second == pytest.approx([2.0 - mean])
    assert third == pytest.approx([-mean, -mean])


def test_turn_level_adds_the_turns_advantage_to_the_samples() -> None:
    # Turn 0: rewards 0.5 and 0, so ±0.25; other turns have no counterpart.
    first, second, third = advantages(spec_of(advantage="turn_level", turn_weight=2.0), [1.0, 0.0])
    assert first == pytest.approx([1.0, 1.0, 0.5])
    assert second == pytest.approx([0.5])
    assert third == pytest.approx([-1.0, -1.0])


def test_sample_means_divide_by_samples() -> None:
    spec = spec_of()
    batch = sequences_from_groups([episode_group([1.0, 0.0])], spec)
    (update,) = plan_updates(batch, 5, spec, objective_of(spec), CPU, 1)
    assert update.denominators.sequences == 2
    assert update.denominators.tokens == 6
    lengths = torch.cat([micro.packed.sample_lengths_N for micro in update.micro_batches])
    assert sorted(lengths.tolist()) == [2.0, 2.0, 4.0, 4.0, 4.0, 4.0]
