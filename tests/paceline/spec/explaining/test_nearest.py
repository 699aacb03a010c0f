"""Suggestions by spelling: close ones or none."""

from __future__ import annotations

import pytest

from paceline.spec.faults import MAX_LETTERS, distance, nearest

SECTIONS = ["policy", "data", "grpo", "dpo", "rewards", "weights", "checkpointing", "value", "algorithm"]


@pytest.mark.parametrize(
    ("word", "known", "guesses"),
    [
        ("grop", SECTIONS, ["grpo"]),
        ("algoritm", SECTIONS, ["algorithm"]),
        ("Rewards", SECTIONS, ["rewards"]),
        ("wieght", ["weight", "name"], ["weight"]),
        ("max_step", ["max_num_steps", "max_val_samples"], ["max_num_steps"]),
        ("drgrpo", ["grpo", "dr_grpo"], ["dr_grpo"]),
        ("gpus", ["rollout_gpus", "learner_gpus", "device"], ["rollout_gpus", "learner_gpus"]),
        ("delta", SECTIONS, []),
        ("eval", SECTIONS, []),
        ("ppo", SECTIONS, []),
        ("scale_rewards", SECTIONS, []),
        ("reward_weights", SECTIONS, []),
        ("gradient_checkpointing", SECTIONS, []),
        ("dtensor_cfg", ["lora_cfg"], []),
        ("val_batch_size", ["val_at_end"], []),
        ("x" * (MAX_LETTERS + 1), ["x" * MAX_LETTERS], []),
        ("", SECTIONS, []),
    ],
)
def test_a_name_is_guessed_only_when_it_is_near(word: str, known: list[str], guesses: list[str]) -> None:
    assert nearest(word, known) == guesses


@pytest.mark.parametrize(
    ("one", "other", "typing_errors"),
    [("", "abc", 3), ("abc", "abc", 0), ("abcd", "abdc", 1), ("kitten", "sitting", 3), ("ca", "abc", 3)],
)
def test_the_distance_counts_letters_and_swaps(one: str, other: str, typing_errors: int) -> None:
    assert distance(one, other) == distance(other, one) == typing_errors
