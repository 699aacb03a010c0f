"""NeMo RL's settings in our units and by our names."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.apps.importers.nemo_rl import convert


@pytest.mark.parametrize(
    ("normal", "one_out", "advantage"),
    [(True, True, "nemo"), (True, False, "trl"), (False, True, "rloo"), (False, False, "dr_grpo")],
)
def test_two_switches_are_one_advantage(normal: bool, one_out: bool, advantage: str) -> None:
    settings = {"grpo.normalize_rewards": normal, "grpo.use_leave_one_out_baseline": one_out}
    assert convert(settings).tree["grpo"]["advantage"] == advantage


@pytest.mark.parametrize(
    ("settings", "path", "value"),
    [
        (  # 32 × 16 completions in updates of 128
            {
                "grpo.num_prompts_per_step": 32,
                "grpo.num_generations_per_prompt": 16,
                "policy.train_global_batch_size": 128,
            },
            ("policy", "num_updates_per_step"),
            4,
        ),
        ({"dpo.seed": 1, "policy.train_global_batch_size": 64}, ("dpo", "num_examples_per_step"), 64),
        ({"sft.val_batches": 8, "sft.val_global_batch_size": 32}, ("sft", "max_val_samples"), 256),
        ({"grpo.async_grpo.enabled": True, "grpo.async_grpo.max_trajectory_age_steps": 3},
         ("async_grpo", "max_trajectory_age_steps"), 3),
        ({"loss_fn.sequence_level_importance_ratios": True}, ("loss_fn", "ratio_level"), "sequence"),
        ({"data.train.data_path": "train.jsonl", "data.train.dataset_name": "ResponseDataset"}, ("data", "train"),
         "train.jsonl"),
    ],
)  # fmt: skip
def test_a_setting_in_our_units(settings: dict[str, Any], path: tuple[str, str], value: Any) -> None:
    section, key = path
    assert convert(settings).tree[section][key] == value


def test_settings_of_another_algorithm_are_left_out() -> None:
    done = convert({"sft.seed": 1, "loss_fn.ratio_clip_min": 0.2})
    assert done.left_out == ["loss_fn.ratio_clip_min (0.2): algorithm sft does not read this key"]
