"""prime-rl's settings in our units and by our names."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.apps.importers.prime_rl import convert
from paceline.errors import SpecError


@pytest.mark.parametrize(
    ("settings", "section", "expected"),
    [
        (  # 512 completions, 16 of each prompt
            {"orchestrator.batch_size": 512, "orchestrator.rollouts_per_example": 16},
            "grpo",
            {"num_prompts_per_step": 32, "num_generations_per_prompt": 16},
        ),
        ({"batch_size": 64, "group_size": 8}, "grpo", {"num_prompts_per_step": 8, "num_generations_per_prompt": 8}),
        ({"max_steps": 100}, "grpo", {"max_num_steps": 100}),
        ({"max_async_level": 2}, "async_grpo", {"max_trajectory_age_steps": 2}),
        (
            {"orchestrator.seq_len": 2048, "trainer.model.seq_len": 4096, "orchestrator.sampling.max_tokens": 512},
            "policy",
            {"max_total_sequence_length": 2048, "train_mb_tokens": 4096},
        ),
        ({"seq_len": 1024, "sampling.max_tokens": 2048}, "policy", {"generation": {"max_new_tokens": "rest", "backend": "vllm"}}),
        ({"orchestrator.batch_size": 512}, "grpo", {"num_prompts_per_step": 64, "num_generations_per_prompt": 8}),
        ({"orchestrator.max_off_policy_steps": 8}, "async_grpo", {"hard_max_age": 8}),
        ({"orchestrator.batch_size": 8, "trainer.loss.dppo_mask_low": 0.1}, "loss_fn",
         {"preset": "dppo", "dppo_mask_low": 0.1}),
        ({"inference.vllm.tensor_parallel_size": 4}, "policy",
         {"generation": {"backend": "vllm", "vllm_cfg": {"tensor_parallel_size": 4}}}),
        ({"trainer.model.ac": {}, "trainer.model.lora.rank": 32}, "policy",
         {"activation_checkpointing": True, "lora_cfg": {"enabled": True, "dim": 32}}),
        ({"optim.lr": 1e-5, "optim.betas1": 0.9, "optim.betas2": 0.95, "optim.type": "adamw"}, "policy",
         {"optimizer": {"lr": 1e-5, "betas": [0.9, 0.95]}}),
        ({"trainer.optim.lr": 1e-5, "trainer.scheduler.type": "cosine", "trainer.scheduler.min_lr": 1e-6}, "policy",
         {"scheduler": {"name": "cosine", "min_lr_ratio": 0.1}}),
        ({"deployment.num_train_gpus": 2, "deployment.num_infer_gpus": 4, "inference.parallel.tp": 2}, "cluster",
         {"learner_gpus": [0, 1], "learner_ranks": 2, "rollout_gpus": [2, 3, 4, 5], "rollout_workers": 2}),
        ({"trainer_gpu_ids": [1], "inference_gpu_ids": [0]}, "cluster", {"learner_gpus": [1], "rollout_gpus": [0]}),
    ],
)  # fmt: skip
def test_a_setting_in_our_units(settings: dict[str, Any], section: str, expected: dict[str, Any]) -> None:
    tree = convert(settings).tree[section]
    assert {name: tree[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("environment", "data"),
    [
        (
            {"name": "train", "env": {"taskset": {"id": "math-env", "dataset_name": "org/other"}}},
            {"train": "org/other", "prompt_key": "question"},
        ),
        (
            {"id": "primeintellect/gsm8k"},
            {"train": "openai/gsm8k", "prompt_key": "question", "train_config": "main"},
        ),
        (
            {
                "name": "hendrycks-math",
                "taskset": {"id": "math-env", "dataset_name": "org/data", "dataset_subset": "default"},
            },
            {"train": "org/data", "prompt_key": "question"},
        ),
    ],
)
def test_an_environment_that_compares_answers_is_a_data_set_and_a_reward(
    environment: dict[str, Any], data: dict[str, str]
) -> None:
    done = convert({"orchestrator.train.env": [environment]})
    assert (done.tree["data"], done.tree["rewards"], done.left_out) == (
        data,
        [{"function": "math_accuracy"}],
        [],
    )


def test_other_environments_are_left_out() -> None:
    done = convert({"orchestrator.env": [{"id": "alphabet-sort", "args": {"max_turns": 2}}]})
    assert "rewards" not in done.tree
    (line,) = done.left_out
    assert line.startswith("orchestrator.env (alphabet-sort): the environment is not carried over")


def test_a_supervised_file_is_sft() -> None:
    tree = convert({"data.source": [{"dataset": "org/data"}], "data.batch_size": 32, "data.seq_len": 4096, "optim.lr": 2e-5,
                    "max_steps": 7, "model.name": "org/model"}).tree  # fmt: skip
    assert (tree["algorithm"], tree["data"]) == ("sft", {"train": "org/data"})
    assert tree["sft"] == {"num_examples_per_step": 32, "max_num_steps": 7}
    assert tree["policy"] == {
        "max_total_sequence_length": 4096,
        "optimizer": {"lr": 2e-5},
        "model_name": "org/model",
    }


@pytest.mark.parametrize("kind", ["max_rl", "echo", "rae", "opsd", "sft", "hierarchical_grpo", "tomorrow"])
def test_an_algorithm_without_a_counterpart_is_refused_by_name(kind: str) -> None:
    with pytest.raises(SpecError, match=f"orchestrator.algo.type '{kind}'"):
        convert({"orchestrator.batch_size": 8, "orchestrator.algo.type": kind})


def test_sources_with_different_algorithms_are_refused() -> None:
    sources = [{"name": "a", "algo": {"type": "opd", "teacher": {"name": "org/teacher"}}}]
    with pytest.raises(SpecError, match="a run of Paceline has one algorithm"):
        convert({"orchestrator.algo.type": "grpo", "orchestrator.train.source": sources})
    done = convert({"orchestrator.train.source": sources})
    assert (done.algorithm, done.tree["distillation"]) == ("distillation", {"teacher_model_name": "org/teacher"})


def test_another_optimizer_is_noted() -> None:
    done = convert({"orchestrator.batch_size": 8, "trainer.optim.type": "muon", "trainer.optim.lr": 0.02})
    assert "the optimizer muon became AdamW; choose policy.optimizer.lr for it" in done.notes
