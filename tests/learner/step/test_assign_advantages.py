"""Every token gets the advantage of its sample; each phase leaves the values of the phase before unchanged."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from tiny_policy import CPU, make_batch, make_spec

from paceline.advantages import advantages
from paceline.errors import InvalidInput
from paceline.groups import Completion, Group, VersionSpan
from paceline.learner.batch.samples import TrainingSample, sequences_from_groups
from paceline.learner.objectives import objective_of
from paceline.learner.step.assign_advantages import with_advantages, with_clipped_advantages
from paceline.learner.step.plan import plan_updates
from paceline.spec import RunSpec


def by_sample(batch: list[TrainingSample], spec: RunSpec) -> list[list[float]]:
    """The advantages of each sample's tokens."""
    result: list[list[float]] = [[] for _ in batch]
    for update in with_advantages(
        batch,
        plan_updates(batch, 0, spec, objective_of(spec), CPU, spec.policy.num_updates_per_step),
        spec,
        CPU,
        None,
    ):
        for micro in update.micro_batches:
            assert micro.advantages_N is not None
            for s, index in enumerate(micro.indices):
                result[index] = micro.advantages_N[micro.packed.sequence_N == s].tolist()
    return result


def test_every_token_gets_the_advantage_of_its_sample() -> None:
    spec, batch = make_spec(Path("nowhere"), train_mb_tokens=24), make_batch()
    planned = plan_updates(batch, 0, spec, objective_of(spec), CPU, spec.policy.num_updates_per_step)
    (update,) = with_advantages(batch, planned, spec, CPU, None)
    assert len(update.micro_batches) > 1
    assert all(micro.advantages_N is None for micro in planned[0].micro_batches)
    rewards_GC = np.array([s.rewards_F for s in batch]).reshape(4, 2)
    expected_S = np.concatenate([advantages(rewards_C, "trl") for rewards_C in rewards_GC]).astype(np.float32)
    assert by_sample(batch, spec) == [
        [float(advantage)] * s.num_trained_tokens for advantage, s in zip(expected_S, batch, strict=True)
    ]


def group(rewards: list[float]) -> Group:
    def completion(finish_reason: str) -> Completion:
        ids = np.array([3, 4], np.int32)
        return Completion(ids, np.full(2, -1, np.float32), (VersionSpan(1, 0, 0, 2),), finish_reason)

    completions = tuple(completion(reason) for reason in ("stop", "length", "stop"))
    return Group(1, np.array([1], np.int32), completions, rewards_CF=np.array(rewards, np.float32)[:, None])


def test_a_completion_without_a_reward_gets_zero() -> None:
    spec = make_spec(Path("nowhere"), grpo={"advantage": "dr_grpo"})
    assert by_sample(sequences_from_groups([group([1.0, 0.0, math.nan])], spec), spec) == [
        [0.5, 0.5],
        [-0.5, -0.5],
        [0.0, 0.0],
    ]


def test_over_long_filtering_keeps_the_sample_and_the_baseline() -> None:
    spec = make_spec(Path("nowhere"), grpo={"advantage": "dr_grpo", "overlong_filtering": True})
    assert by_sample(sequences_from_groups([group([1.0, 0.0, math.nan])], spec), spec) == [
        [0.5, 0.5],
        [],
        [0.0, 0.0],
    ]


def test_a_sample_without_rewards_is_refused() -> None:
    spec, one = make_spec(Path("nowhere")), np.ones(1, np.int32)
    sample = TrainingSample(7, one, one, np.zeros(1, np.float32), one)
    with pytest.raises(InvalidInput, match="group 7 has no rewards for the 1 functions"):
        by_sample([sample], spec)


def test_a_dummy_gets_zero() -> None:
    spec = make_spec(Path("nowhere"))
    (update,) = with_advantages([], plan_updates([], 0, spec, objective_of(spec), CPU, 1), spec, CPU, None)
    (micro,) = update.micro_batches
    assert micro.is_dummy
    assert micro.advantages_N is not None
    assert micro.advantages_N.tolist() == [0.0]


def test_examples_have_no_advantages() -> None:
    spec, batch = make_spec(Path("nowhere"), "sft"), make_batch(supervised=True)
    (update,) = with_advantages(
        batch,
        plan_updates(batch, 0, spec, objective_of(spec), CPU, spec.policy.num_updates_per_step),
        spec,
        CPU,
        None,
    )
    assert all(micro.advantages_N is None for micro in update.micro_batches)


@pytest.mark.parametrize("advantage", ["dr_grpo", "reinforce_pp"])
def test_advantages_are_clipped_on_both_sides_and_the_largest_is_told(advantage: str) -> None:
    bounds = {"advantage_clip_low": -0.25, "advantage_clip_high": 0.5}
    spec = make_spec(Path("nowhere"), grpo={"advantage": advantage, **bounds})
    batch = sequences_from_groups([group([9.0, 0.0, math.nan])], spec)
    updates = with_advantages(batch, plan_updates(batch, 0, spec, objective_of(spec), CPU, 1), spec, CPU, None)
    clipped, metrics = with_clipped_advantages(updates, spec, CPU)
    assert metrics == {"advantage_max": 4.5 if advantage == "dr_grpo" else 1.0}
    found = [micro.advantages_N.tolist() for update in clipped for micro in update.micro_batches]  # type: ignore[union-attr]
    assert found == [[0.5, 0.5, -0.25, -0.25, 0.0, 0.0]]


def test_examples_have_no_largest_advantage() -> None:
    spec, batch = make_spec(Path("nowhere"), "sft"), make_batch(supervised=True)
    updates = plan_updates(batch, 0, spec, objective_of(spec), CPU, 1)
    assert with_clipped_advantages(updates, spec, CPU)[1] == {}
