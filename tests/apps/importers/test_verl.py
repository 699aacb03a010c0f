"""verl's settings in our units, and the adapter for its reward functions, which is run."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from paceline.apps.importers.verl import ADAPTER, convert
from paceline.errors import SpecError

COMPUTE_SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "acc": 1}
"""


@pytest.mark.parametrize(
    ("settings", "section", "expected"),
    [
        ({"algorithm.adv_estimator": "grpo"}, "grpo", {"advantage": "trl"}),
        (
            {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False},
            "grpo",
            {"advantage": "dr_grpo"},
        ),
        (
            {"actor_rollout_ref.actor.clip_ratio": 0.1},
            "loss_fn",
            {"ratio_clip_min": 0.1, "ratio_clip_max": 0.1},
        ),
        (
            {
                "algorithm.use_kl_in_reward": True,
                "algorithm.kl_ctrl.kl_coef": 0.02,
                "algorithm.kl_penalty": "kl",
            },
            "loss_fn",
            {"reference_policy_kl_penalty": 0.02, "use_kl_in_reward": True, "reference_policy_kl_type": "k1"},
        ),
        ({"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean"}, "loss_fn", {"reduction": "grpo"}),
        (
            {"data.apply_chat_template_kwargs.reasoning_effort": "medium"},
            "data",
            {"chat_template_kwargs": {"reasoning_effort": "medium"}},
        ),
        ({"critic.optim.lr": "1e-5"}, "value", {"optimizer": {"lr": 1e-5}}),
    ],
)
def test_a_setting_by_our_name(settings: dict[str, Any], section: str, expected: dict[str, Any]) -> None:
    tree = convert(settings).tree[section]
    assert {name: tree[name] for name in expected} == expected


def test_defaults_that_differ_are_written() -> None:
    tree = convert({"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 4}).tree
    assert tree["grpo"] | {"num_prompts_per_step": 1024, "max_num_epochs": 30} == tree["grpo"]
    assert tree["policy"]["num_updates_per_step"] == 4
    assert tree["policy"]["max_total_sequence_length"] == 1024
    assert tree["policy"]["generation"]["max_new_tokens"] == 512
    assert tree["loss_fn"]["ratio_clip_c"] == 3.0
    assert "max_num_epochs" not in convert({"trainer.total_training_steps": 100}).tree["grpo"]
    supervised = convert({"model.partial_pretrain": "m"})
    assert supervised.tree["policy"]["optimizer"] == {"lr": 1e-5, "betas": [0.9, 0.95]}
    assert supervised.tree["policy"]["scheduler"] == {"warmup_ratio": 0.1, "name": "cosine"}
    assert supervised.tree["sft"] == {"num_examples_per_step": 256, "max_num_epochs": 4}
    assert supervised.left_out == []


def test_the_adapter_calls_the_function_with_verls_arguments(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(COMPUTE_SCORE)
    done = convert({"custom_reward_function.path": "score.py"})
    (tmp_path / ADAPTER).write_text(done.files[ADAPTER])
    reward = runpy.run_path(str(tmp_path / ADAPTER))["reward"]
    truth = [{"style": "rule", "ground_truth": "4"}] * 2
    chat = [[{"role": "assistant", "content": "4"}], [{"role": "assistant", "content": "5"}]]
    assert reward(completions=chat, reward_model=truth, data_source=["a", "a"]) == [1.0, 0.0]
    assert reward(completions=["5", "4"], reward_model=truth) == [0.0, 1.0]


def test_the_adapter_passes_the_arguments_of_the_reward_function(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, bonus, deep):\n"
        "    return bonus + deep['a'] if solution_str == ground_truth else 0\n"
    )
    kwargs = {"custom_reward_function.reward_kwargs.bonus": 0.5, "custom_reward_function.reward_kwargs.deep.a": 2}
    done = convert({"custom_reward_function.path": "score.py"} | kwargs)
    (tmp_path / ADAPTER).write_text(done.files[ADAPTER])
    reward = runpy.run_path(str(tmp_path / ADAPTER))["reward"]
    assert reward(completions=["4", "5"], reward_model=[{"ground_truth": "4"}] * 2) == [2.5, 0.0]
    assert done.left_out == []
    whole = convert({"custom_reward_function.path": "score.py", "custom_reward_function.reward_kwargs": {"bonus": 1}})
    assert '{"bonus": 1}' in whole.files[ADAPTER]


@pytest.mark.parametrize("section", ["reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg"])
def test_a_length_penalty_is_a_reward(section: str) -> None:
    settings = {f"{section}.enable": True, f"{section}.len": 40, f"{section}.penalty_factor": 0.5}
    done = convert(settings | {"data.max_response_length": 100, "reward_model.reward_manager": "dapo"})
    kwargs = {"max_completion_tokens": 100, "soft_tokens": 40}
    assert done.tree["rewards"][1] == {"function": "soft_overlong", "weight": 0.5, "kwargs": kwargs}
    assert done.left_out == []
    assert len(convert(settings | {f"{section}.enable": False, "data.max_response_length": 100}).tree["rewards"]) == 1


def test_samples_with_images_are_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"data\.image_key 'images': samples with images cannot be trained"):
        convert({"data.image_key": "images"})
    convert({"data.image_key": "images", "actor_rollout_ref.hybrid_engine": True})  # a full configuration of 2025
    composed = convert({"data.image_key": "images", "data.video_key": "videos"})
    assert any(line.startswith("data.image_key") for line in composed.left_out), "a default of every configuration"


def test_the_adapter_without_a_function_compares_the_final_answer(tmp_path: Path) -> None:
    (tmp_path / ADAPTER).write_text(convert({}).files[ADAPTER])
    reward = runpy.run_path(str(tmp_path / ADAPTER))["reward"]
    scores = reward(["q"] * 2, ["so \\boxed{4}", "\\boxed{5}"], [{"ground_truth": 4}] * 2, data_source=["x"] * 2)
    assert scores == [1.0, 0.0]


def test_a_correction_that_is_off_stays_off() -> None:
    off = {"algorithm.rollout_correction.rollout_is": None, "algorithm.rollout_correction.rollout_is_threshold": 2.0}
    assert convert(off).tree["loss_fn"]["truncated_importance_sampling_ratio"] is None
    on = convert(off | {"algorithm.rollout_correction.rollout_is": "token"}).tree["loss_fn"]
    assert on["truncated_importance_sampling_ratio"] == 2.0
