"""The estimate against sizes worked out by hand for the shape of Qwen2.5-0.5B."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_shapes import HALF_BILLION, PARAMETERS, spec_of

from paceline.models.memory_estimate import PROCESS_BYTES, estimate, read_config, shape_of, shortage

GB = 10**9


def test_parameters_are_those_of_the_shape() -> None:
    shape = shape_of(HALF_BILLION)
    assert shape is not None
    assert shape.parameters == PARAMETERS
    assert 493 < shape.parameters / 1e6 < 495
    untied = shape_of({**HALF_BILLION, "tie_word_embeddings": False})
    assert untied is not None
    assert untied.parameters == PARAMETERS + 151_936 * 896
    experts = shape_of(
        {**HALF_BILLION, "num_experts": 8, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
    )
    assert experts is not None
    assert experts.mlp == 128
    assert experts.parameters == PARAMETERS + 24 * (3 * 896 * (512 - 4_864) + 8 * 896)


def test_a_rank_holds_weights_gradients_moments_and_the_published_version() -> None:
    shape = shape_of(HALF_BILLION)
    assert shape is not None
    needed = estimate(spec_of(), shape)
    assert needed.learner == {
        "process": PROCESS_BYTES,
        "weights": 4 * PARAMETERS,
        "gradients": 4 * PARAMETERS,
        "moments": 8 * PARAMETERS,
        "published": 8 * PARAMETERS,
    }
    assert needed.sampler == {
        "process": PROCESS_BYTES,
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
    assert usual.activations - small.activations > 4 * GB
    lora = estimate(spec_of(policy={"lora_cfg": {"enabled": True, "dim": 8}}), shape)
    assert lora.learner["gradients"] < 0.05 * GB
    ranks = estimate(spec_of(cluster={"learner_ranks": 2}), shape)
    assert ranks.learner["moments"] == usual.learner["moments"] // 2
    assert ranks.micro_batch_tokens == 4 * 256
    with_reference = estimate(spec_of(loss_fn={"reference_policy_kl_penalty": 0.1}), shape)
    assert with_reference.learner["reference"] == 4 * PARAMETERS
    on_gpus = estimate(
        spec_of(cluster={"learner_gpus": [0], "rollout_gpus": [0], "rollout_workers": 1}), shape
    )
    assert on_gpus.learner_on_gpu
    assert on_gpus.sampler["weights"] == 2 * PARAMETERS


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


def test_a_name_on_the_hub_that_is_not_cached_gives_no_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.models.memory_estimate._cached_config", lambda name: None)
    assert read_config("org/model") is None
