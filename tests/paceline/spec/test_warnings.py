"""Warnings for settings without an effect, or with another one than their name suggests."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.spec import RunSpec

GRPO = {
    "rewards": [{"function": "length"}],
    "grpo": {"num_prompts_per_step": 4},
    "async_grpo": {"max_trajectory_age_steps": 0},
}


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"algorithm": "sft", **GRPO}, "algorithm sft does not read rewards, grpo, async_grpo, which"),
        ({"algorithm": "sft", "sft": {"val_period": 0}}, ""),
        ({"algorithm": "dpo", "sft": {"num_examples_per_step": 3}}, "does not read sft, which"),
        (GRPO, ""),
        ({**GRPO, "dpo": {"sft_loss_weight": 1.0}}, "algorithm grpo does not read dpo, which"),
    ],
)
def test_sections_that_the_algorithm_does_not_read_are_named(sections: dict[str, Any], named: str) -> None:
    tree = {"policy": {"model_name": "m"}, "data": {"train": "x"}, **sections}
    warnings = [text for text in RunSpec.model_validate(tree).warnings if "does not read" in text]
    assert len(warnings) == bool(named)
    assert named in "".join(warnings)


@pytest.mark.parametrize(
    ("grpo", "loss_fn", "warns"),
    [
        ({"advantage": "gae"}, {"preset": "ppo"}, True),
        ({"advantage": "reinforce_pp"}, {"preset": "reinforce_pp"}, True),
        ({}, {"preset": "rloo"}, True),
        ({}, {}, False),
        ({"advantage": "gdpo"}, {}, False),
        ({"advantage": "reinforce_pp", "use_dynamic_sampling": False}, {"preset": "reinforce_pp"}, False),
    ],
)
def test_a_filter_that_leaves_groups_of_equal_rewards_is_named(
    grpo: dict[str, Any], loss_fn: dict[str, Any], warns: bool
) -> None:
    tree = {"policy": {"model_name": "m"}, "data": {"train": "x"}, **GRPO, "loss_fn": loss_fn}
    spec = RunSpec.model_validate(tree | {"grpo": {"use_dynamic_sampling": True, **grpo}})
    assert any("only groups without any reward are dropped" in text for text in spec.warnings) == warns
