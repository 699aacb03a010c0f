"""Warnings for settings that have no effect."""

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
