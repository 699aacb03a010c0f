"""TRL's settings in our units, by numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.apps.importers.trl import convert

BASE = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["f"]}


@pytest.mark.parametrize(
    ("settings", "processes", "batch"),
    [
        # completions of a generation ÷ group, and updates = generation ÷ (each × processes × accumulated)
        ({"per_device_train_batch_size": 8, "num_generations": 8}, 1, (1, 1, 8)),
        (
            {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_generations": 8},
            2,
            (4, 1, 8),
        ),
        (
            {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 8},
            1,
            (4, 4, 8),
        ),
        (
            {"per_device_train_batch_size": 2, "generation_batch_size": 64, "num_generations": 4},
            1,
            (16, 16, 4),
        ),
    ],
)
def test_a_batch_counts_prompts(settings: dict[str, Any], processes: int, batch: tuple[int, int, int]) -> None:
    tree = convert(BASE | settings, processes=processes).tree
    prompts, updates = tree["grpo"]["num_prompts_per_step"], tree["policy"]["num_updates_per_step"]
    assert (prompts, updates, tree["grpo"]["num_generations_per_prompt"]) == batch


def test_steps_are_batches() -> None:
    settings = {"per_device_train_batch_size": 8, "steps_per_generation": 4, "max_steps": 100}
    assert convert(BASE | settings).tree["grpo"]["max_num_steps"] == 25
    assert convert(BASE | {"num_train_epochs": 2}).tree["grpo"]["max_num_epochs"] == 2.0


def test_defaults_that_differ_are_written() -> None:
    tree = convert(BASE).tree
    assert tree["policy"]["optimizer"]["weight_decay"] == 0.0
    assert tree["policy"]["scheduler"]["name"] == "linear"
    assert tree["checkpointing"]["save_period"] == 500


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # values of trl/trainer/*_config.py and trl/experimental at f2cd577
        ("SFTConfig", {"algorithm": "sft", "policy.optimizer.lr": 2e-5, "policy.max_total_sequence_length": 1024}),
        (
            "RewardConfig",
            {"policy.optimizer.lr": 1e-4, "policy.max_total_sequence_length": 1024, "rm.centring": 0.0},
        ),
        ("DPOConfig", {"dpo.reference_policy_kl_penalty": 0.1, "policy.max_total_sequence_length": 1024}),
        ("KTOConfig", {"kto.reference_policy_kl_penalty": 0.1, "policy.max_total_sequence_length": 1024}),
        ("ORPOConfig", {"orpo.odds_ratio_weight": 0.1, "policy.max_total_sequence_length": 1024}),
        ("GRPOConfig", {"policy.generation.max_new_tokens": 512, "grpo.num_generations_per_prompt": 8}),
        (
            "RLOOConfig",
            {
                "policy.generation.max_new_tokens": 512,
                "grpo.num_generations_per_prompt": 2,
                "loss_fn.preset": "rloo",
                "loss_fn.reference_policy_kl_penalty": 0.05,
            },
        ),
        (
            "AsyncGRPOConfig",
            {
                "policy.generation.max_new_tokens": 2048,
                "async_grpo.max_trajectory_age_steps": 4,
                "loss_fn.ratio_anchor": "behaviour",
                "loss_fn.truncated_importance_sampling_ratio": None,
                "policy.scheduler.name": "constant",
            },
        ),
    ],
)
def test_each_class_has_its_defaults(config: str, expected: dict[str, Any]) -> None:
    tree = convert(BASE, config=config).tree
    found = {key: tree for key in expected}
    for key in expected:
        for part in key.split("."):
            found[key] = found[key][part]
    assert found == expected


@pytest.mark.parametrize(
    ("settings", "section", "expected"),
    [
        (
            {"use_vllm": True},
            "loss_fn",
            {"truncated_importance_sampling_type": "sequence_mask", "truncated_importance_sampling_ratio": 3.0},
        ),
        (
            {
                "vllm_importance_sampling_mode": "token_truncate",
                "vllm_importance_sampling_clip_max": 2.0,
                "vllm_importance_sampling_clip_min": 0.5,
            },
            "loss_fn",
            {
                "truncated_importance_sampling_type": "tis",
                "truncated_importance_sampling_ratio": 2.0,
                "truncated_importance_sampling_ratio_min": 0.5,
            },
        ),
        ({"epsilon": 0.1}, "loss_fn", {"ratio_clip_min": 0.1, "ratio_clip_max": 0.1}),
        ({"epsilon": 0.1, "epsilon_high": 0.3}, "loss_fn", {"ratio_clip_min": 0.1, "ratio_clip_max": 0.3}),
        ({"loss_type": "bnpo"}, "loss_fn", {"reduction": "bnpo"}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "loss_fn", {"preset": "cispo", "ratio_clip_max": 4.0}),
        ({"epsilon_high": 0.28}, "loss_fn", {"ratio_clip_max": 0.28}),
        (
            {"scale_rewards": "none", "multi_objective_aggregation": "sum_then_normalize"},
            "grpo",
            {"advantage": "dr_grpo"},
        ),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "grpo", {"advantage": "gdpo"}),
        ({"scale_rewards": False}, "grpo", {"advantage": "dr_grpo"}),
        ({"scale_rewards": "batch"}, "grpo", {"advantage": "trl_batch"}),
        (
            {"vllm_importance_sampling_correction": False},
            "loss_fn",
            {"truncated_importance_sampling_ratio": None},
        ),
        (
            {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 64},
            "loss_fn",
            {"reference_policy_sync_steps": 64, "reference_policy_sync_mix": 0.6},
        ),
    ],
)
def test_the_objective(settings: dict[str, Any], section: str, expected: dict[str, Any]) -> None:
    tree = convert(BASE | settings).tree[section]
    assert {name: tree[name] for name in expected} == expected


def test_rewards_have_their_weights_and_trls_own_functions_have_ours() -> None:
    done = convert(BASE | {"reward_funcs": ["accuracy_reward", "f.py:g"], "reward_weights": [1.0, 0.5]})
    assert done.tree["rewards"] == [
        {"function": "math_accuracy", "kwargs": {"answer_column": "solution"}, "weight": 1.0},
        {"function": "f.py:g", "weight": 0.5},
    ]


def test_an_unknown_setting_is_left_out_with_its_value() -> None:
    assert "frobnicate (3): the name is unknown" in convert(BASE | {"frobnicate": 3}).left_out


def test_names_of_open_r1_are_mapped_or_named() -> None:
    done = convert(
        {"reward_funcs": ["accuracy", "tag_count"], "reward_weights": [1.0, 0.5], "dataset_prompt_column": "problem"}
    )
    assert done.tree["rewards"] == [
        {"function": "math_accuracy", "kwargs": {"answer_column": "solution"}, "weight": 1.0}
    ]
    assert done.tree["data"] == {"prompt_key": "problem"}
    assert done.left_out[0].startswith("reward_funcs 'tag_count': no built-in is the same")


def test_steps_below_one_are_fractions_of_the_run() -> None:
    done = convert({
        "warmup_steps": 0.1, "save_steps": 0.05, "reward_funcs": ["accuracy"], "eval_strategy": "steps",
        "eval_steps": 0.25, "dataset_name": "d", "dataset_test_split": "test",
    })  # fmt: skip
    assert done.tree["grpo"]["val_period"] == 100
    assert done.tree["policy"]["scheduler"]["warmup_ratio"] == 0.1
    assert "save_steps (0.05): a fraction of the run; here it is a number of steps" in done.left_out


def test_a_reward_that_is_dropped_keeps_the_weights_of_the_others() -> None:
    done = convert({"reward_funcs": [None, "f.py:g"], "reward_weights": [0.1, 1.0]})
    assert done.tree["rewards"] == [{"function": "f.py:g", "weight": 1.0}]
