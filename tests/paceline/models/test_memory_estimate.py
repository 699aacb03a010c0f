"""The estimate against sizes worked out by hand for the shape of Qwen2.5-0.5B."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_shapes import HALF_BILLION, PARAMETERS, spec_of

from paceline.models.memory_estimate import PROCESS_BYTES, SAMPLER_BYTES, estimate, shortage
from paceline.models.shape import shape_of

GB = 10**9


def test_a_rank_holds_weights_gradients_moments_and_the_published_version() -> None:
    shape = shape_of(HALF_BILLION)
    assert shape is not None
    needed = estimate(spec_of(), shape)
    holes = needed.learner["holes in the heap"]
    assert holes == int(1.3 * 24 * 2048 * (10 * 896 + 2 * 128) * 4)  # all but the MLP's have less than 8 MiB
    assert needed.learner == {
        "process": PROCESS_BYTES,
        "weights": 4 * PARAMETERS,
        "gradients": 4 * PARAMETERS,
        "moments": 8 * PARAMETERS,
        "published": 4 * PARAMETERS,
        "older versions": 4 * PARAMETERS,
        "holes in the heap": holes,
    }
    assert needed.sampler == {
        "process": SAMPLER_BYTES,
        "weights": 4 * PARAMETERS,
        "incoming": 4 * PARAMETERS,
        "key-value cache": 8 * 256 * 2 * 128 * 24 * 4,
    }
    assert needed.micro_batch_tokens == 2048


def test_settings_that_save_memory_are_in_the_estimate() -> None:
    shape = shape_of(HALF_BILLION)
    assert shape is not None
    usual = estimate(spec_of(), shape)
    small = estimate(
        spec_of(
            policy={
                "optimizer": {"state_dtype": "bfloat16"},
                "activation_checkpointing": True,
                "logprob_chunk_tokens": 256,
            }
        ),
        shape,
    )
    assert small.learner["moments"] == usual.learner["moments"] // 2
    assert usual.activations - small.activations > 3 * GB
    assert small.activations == 2 * 4 * 151_936 * 896  # the embedding's gradients; the others take its place
    selective = estimate(spec_of(policy={"activation_checkpointing": "selective"}), shape)
    assert small.activations < selective.activations < usual.activations
    lora = estimate(spec_of(policy={"lora_cfg": {"enabled": True, "dim": 8}}), shape)
    assert lora.learner["gradients"] < 0.05 * GB
    ranks = estimate(spec_of(cluster={"learner_ranks": 2}), shape)
    assert ranks.learner["moments"] == usual.learner["moments"] // 2
    assert ranks.micro_batch_tokens == 4 * 256
    with_reference = estimate(spec_of(loss_fn={"reference_policy_kl_penalty": 0.1}), shape)
    assert with_reference.learner["reference"] == 4 * PARAMETERS
    on_gpus = estimate(spec_of(cluster={"learner_gpus": [0], "rollout_gpus": [0], "rollout_workers": 1}), shape)
    assert on_gpus.learner_on_gpu
    assert on_gpus.sampler["weights"] == 2 * PARAMETERS


def test_a_sampler_holds_the_sequences_of_its_run_alone() -> None:
    shape = shape_of(HALF_BILLION)
    assert shape is not None
    policy = {"generation": {"max_new_tokens": 32, "max_batch_size": 256}}
    evaluated = {
        "data": {"train": "d", "validation": "v"},
        "grpo": {
            "num_prompts_per_step": 2,
            "num_generations_per_prompt": 4,
            "val_at_end": True,
            "max_val_samples": 30,
            "val_samples_per_prompt": 2,
        },
    }
    agent = {"environment": {"agent": "a.py:solve"}}
    for rows, sections in (
        (16, {}),  # 2 groups of 4 of a step and of the next one
        (8, {"async_grpo": {"max_trajectory_age_steps": 0}}),
        (128, evaluated),  # 16 + 60
        (256, agent),  # it may send any number of requests
        (256, {"grpo": {"num_prompts_per_step": 64}}),
    ):
        needed = estimate(spec_of(policy=policy, **sections), shape)
        assert needed.sampler["key-value cache"] == rows * 256 * 2 * 128 * 24 * 4


def test_copies_of_shared_prompts_on_gpus_are_in_the_estimate() -> None:
    shape = shape_of(HALF_BILLION)
    assert shape is not None
    for max_new_tokens in (32, "rest"):  # a completion may end before its limit, so a prompt is bounded by the total
        taken = {}
        for learner_gpus in ([], [0]):
            for kind, precision in (("none", "bfloat16"), ("full", "bfloat16"), ("none", "float32")):
                for share in (False, True):
                    policy = {
                        "shared_prompts": share,
                        "activation_checkpointing": kind,
                        "precision": precision,
                        "generation": {"max_new_tokens": max_new_tokens},
                    }
                    cluster = {"learner_gpus": learner_gpus, "rollout_workers": 1}
                    grpo = {"num_prompts_per_step": 32, "num_generations_per_prompt": 4}
                    needed = estimate(spec_of(policy=policy, cluster=cluster, grpo=grpo), shape)
                    taken[bool(learner_gpus), kind, precision, share] = needed.activations
        copied = {key[:3]: taken[*key[:3], True] - taken[*key[:3], False] for key in taken}
        assert not any(size for (on_gpu, *_), size in copied.items() if not on_gpu)
        copies = 3 * 2048  # of each token of a row once more for each further completion
        assert copied[True, "none", "bfloat16"] == copies * 25 * 2 * 128 * 2
        assert copied[True, "full", "bfloat16"] == copies * 2 * 2 * 128 * 2
        assert copied[True, "none", "float32"] == copies * 25 * 2 * (896 + 128) * 4


def test_a_host_with_too_little_is_warned_of_with_numbers_and_remedies(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HALF_BILLION))
    spec = spec_of(str(tmp_path))
    text = shortage(spec, 12 * GB)
    assert text.startswith("a model of 494 M parameters takes an estimated 1 learner rank with ")
    assert "in a full micro-batch of 2,048 tokens and 1 rollout worker with " in text
    assert "12.0 GB are free here" in text
    assert "policy.optimizer.state_dtype=bfloat16" in text
    assert shortage(spec, 100 * GB) == ""


@pytest.mark.parametrize("text", ["{}", "[]", "no json", '{"num_hidden_layers": "many"}'])
def test_a_config_that_tells_nothing_gives_no_warning(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert shortage(spec_of(str(tmp_path)), 0) == ""
