"""NeMo RL's settings in our units and by our names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.apps.importers.import_spec import import_config
from paceline.apps.importers.nemo_rl import convert
from paceline.errors import SpecError
from paceline.spec.reading import parse_spec


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


def test_engine_arguments_get_their_key_or_are_left_out_with_the_reason() -> None:
    kwargs = {
        "block_size": 64,
        "max_num_seqs": 32,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1},
        "quantization": "fp8",
    }
    done = convert({"policy.generation.vllm_kwargs": kwargs})
    generation = done.tree["policy"]["generation"]
    assert generation["vllm_kwargs"] == {"block_size": 64}
    assert generation["max_batch_size"] == 32
    assert generation["vllm_cfg"]["speculative"] == {"method": "ngram", "num_speculative_tokens": 3}
    assert [note for note in done.notes if "quantization" in note] == [
        "policy.generation.vllm_kwargs.quantization was left out: sampled log-probabilities would not be those of a full "
        "forward pass"
    ]
    other = {"speculative_config": {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}}
    done = convert({"policy.generation.vllm_kwargs": other})
    assert "policy" not in done.tree
    assert any("speculative_config was left out" in note for note in done.notes)


def test_settings_of_another_algorithm_are_left_out() -> None:
    done = convert({"sft.seed": 1, "loss_fn.ratio_clip_min": 0.2})
    assert done.left_out == ["loss_fn.ratio_clip_min (0.2): algorithm sft does not read this key"]


MEGATRON = {
    "policy.optimizer.kwargs.lr": 5e-6,
    "policy.scheduler": [
        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"end_factor": 1.0, "total_iters": 50}},
        {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {}},
    ],
    "policy.megatron_cfg.optimizer.lr": 1e-6,
    "policy.megatron_cfg.optimizer.min_lr": 1e-7,
    "policy.megatron_cfg.scheduler.lr_warmup_iters": 13,
    "policy.megatron_cfg.scheduler.lr_decay_style": "cosine",
}


def test_the_warm_up_is_that_of_the_section_that_is_switched_on() -> None:
    off = convert(MEGATRON | {"policy.megatron_cfg.enabled": False}).tree["policy"]
    assert off["scheduler"] == {"warmup_steps": 50, "name": "constant"}
    assert off["optimizer"] == {"lr": 5e-6}
    assert [
        line for line in convert(MEGATRON | {"policy.megatron_cfg.enabled": False}).left_out if "megatron" in line
    ] == []
    on = convert(MEGATRON | {"policy.megatron_cfg.enabled": True}).tree["policy"]
    assert on["scheduler"] == {"name": "cosine", "min_lr_ratio": 0.1, "warmup_steps": 13}
    assert on["optimizer"] == {"lr": 1e-6}


@pytest.mark.parametrize(
    ("estimator", "advantage"),
    [
        ({"name": "reinforce_plus_plus", "minus_baseline": True}, "reinforce_pp_baseline"),
        ({"name": "reinforce_plus_plus", "minus_baseline": False}, "reinforce_pp"),
        ({"name": "gdpo"}, "gdpo"),
        ({"name": "grpo", "normalize_rewards": False, "use_leave_one_out_baseline": False}, "dr_grpo"),
    ],
)
def test_the_estimator_of_the_advantage_is_read(estimator: dict[str, Any], advantage: str) -> None:
    settings = {f"grpo.adv_estimator.{name}": value for name, value in estimator.items()}
    assert convert({"grpo.normalize_rewards": True, **settings}).tree["grpo"]["advantage"] == advantage


def test_ppo_is_grpo_with_a_value_model() -> None:
    done = convert({
        "ppo.num_prompts_per_step": 32, "policy.train_global_batch_size": 256, "ppo.ppo_epochs": 4, "ppo.adv_estimator.name": "gae",
        "ppo.adv_estimator.gae_lambda": 0.95, "value_loss_fn.cliprange": 0.2, "value.optimizer.kwargs.lr": 1e-5,
        "ppo.reward_shaping.enabled": True, "ppo.reward_shaping.overlong_buffer_length": 20, "env.math.num_workers": 8,
        "ppo.reward_shaping.max_response_length": 100, "ppo.reward_shaping.overlong_buffer_penalty": 0.5,
    })  # fmt: skip
    assert done.tree["grpo"] == {"advantage": "gae", "num_prompts_per_step": 32}
    assert done.tree["value"] == {"gae_lambda": 0.95, "cliprange": 0.2, "optimizer": {"lr": 1e-5}}
    assert done.tree["rewards"] == [
        {"function": "math_accuracy"},
        {"function": "soft_overlong", "kwargs": {"max_completion_tokens": 100, "soft_tokens": 20}, "weight": 0.5},
    ]
    assert any(line.startswith("grpo.ppo_epochs (4): every sample trains once") for line in done.left_out)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data.default.processor": "vlm_hf_data_processor"}, "samples with images, audio or video"),
        ({"data.train.dataset_name": "avqa"}, "samples with images, audio or video"),
        ({"teachers": [{"model_name": "m"}]}, "one teacher .* with the student's tokenizer"),
        ({"grpo.adv_estimator.name": "tomorrow"}, "grpo.advantage has no such estimator"),
    ],
)
def test_a_training_without_a_counterpart_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        convert(settings)


def test_data_sets_that_cannot_be_read_as_one_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(
        "grpo: {seed: 1}\npolicy: {model_name: m}\nenv: {math: {n: 1}, code: {n: 1}}\ndata: {default: {env_name: math}, "
        "train: [{dataset_name: OpenMathInstruct-2}, {dataset_name: DeepScaler}], validation: [{dataset_name: AIME2024}]}\n"
    )
    with pytest.raises(SpecError, match=r"gives no value for data\.train; add data\.train="):
        import_config("nemo", path)
    done = import_config("nemo", path, ("data.train=mine.jsonl",))
    assert done.tree["data"]["validation"] == "HuggingFaceH4/aime_2024"
    assert done.tree["data"]["validation_split"] == "train"
    assert any("have different columns" in note for note in done.notes)


def test_defaults_references_and_prompt_files_are_followed(tmp_path: Path) -> None:
    (tmp_path / "examples" / "prompts").mkdir(parents=True)
    (tmp_path / "examples" / "prompts" / "cot.txt").write_text("Think in \\boxed{{}}.\n{}\nAnswer:")
    (tmp_path / "base.yaml").write_text(
        "grpo: {seed: 1, reward_shaping: {enabled: false, max_response_length: 9}}\npolicy: {model_name: m, "
        "max_total_sequence_length: 512, tokenizer: {name: '${..model_name}', use_fastokens: false}, "
        "generation: {max_new_tokens: '${..max_total_sequence_length}', vllm_cfg: {precision: '${...precision}'}}, "
        "precision: bfloat16}\ndata: {train: {dataset_name: squad}, default: {env_name: math}}\nenv: {math: {n: 1}}\n"
        "logger: {tensorboard: {}}\n"
    )
    path = tmp_path / "examples" / "grpo.yaml"
    path.write_text(
        "defaults: [../base.yaml]\ndata: {_override_: true, train: {dataset_name: gsm8k, split: train}, "
        "default: {env_name: math, prompt_file: examples/prompts/cot.txt}}\n"
    )
    done = import_config("nemo", path)
    assert done.tree["policy"] == {
        "model_name": "m", "tokenizer_name": "m", "max_total_sequence_length": 512, "precision": "bfloat16",
        "generation_precision": "bfloat16", "generation": {"max_new_tokens": "rest"},
    }  # fmt: skip
    assert done.tree["data"] == {
        "train": "openai/gsm8k", "prompt_key": "question", "train_config": "main", "train_split": "train",
        "prompt_template": "Think in \\boxed{}.\n{question}\nAnswer:",
    }  # fmt: skip
    assert "logger" not in done.tree
    assert not any("reward_shaping" in line for line in done.left_out)


@pytest.mark.parametrize("section", ["rm", "grpo", "distillation"])
def test_minus_one_step_is_no_limit(section: str) -> None:
    done = convert({f"{section}.max_num_steps": -1, f"{section}.max_num_epochs": 2})
    ours = "rm" if section == "rm" else "grpo"
    assert (done.tree[ours], done.left_out) == ({"max_num_epochs": 2}, [])


def test_checkpoints_that_are_off_stay_off() -> None:
    settings = {"checkpointing.enabled": False, "checkpointing.save_period": 5, "loss_fn.force_on_policy_ratio": True}
    assert convert(settings).tree["checkpointing"] == {"enabled": False}


def test_the_columns_and_the_part_of_a_data_set_are_carried() -> None:
    done = convert({
        "sft.seed": 1, "data.train.dataset_name": "OpenMathInstruct-2", "data.train.output_key": "generated_solution",
        "data.train.subset": "all", "data.train.mystery": 3, "data.default.env_name": "math",
    })  # fmt: skip
    assert done.tree["data"] == {
        "train": "nvidia/OpenMathInstruct-2", "train_split": "train_1M", "train_config": "all", "prompt_key": "problem",
        "completion_key": "generated_solution",
    }  # fmt: skip
    assert "data.train.mystery (3): the name is unknown" in done.left_out


def test_a_distillation_may_have_groups_of_one(tmp_path: Path) -> None:
    path = tmp_path / "distillation.yaml"
    path.write_text(
        "distillation: {num_prompts_per_step: 128, num_generations_per_prompt: 1, max_num_steps: 10}\n"
        "loss_fn: {kl_type: mixed, mixed_kl_weight: 0.25}\n"
        "policy: {model_name: org/student}\nteacher: {model_name: org/teacher}\n"
    )
    imported = import_config("nemo", path, ("data.train=org/data", "rewards=[{function: length}]"))
    assert imported.algorithm == "distillation"
    spec = parse_spec(imported.tree)
    assert (spec.grpo.num_prompts_per_step, spec.grpo.num_generations_per_prompt) == (128, 1)
    assert (spec.distillation.kl_type, spec.distillation.mixed_kl_weight) == ("mixed", 0.25)
    assert spec.distillation.teacher_model_name == "org/teacher"
