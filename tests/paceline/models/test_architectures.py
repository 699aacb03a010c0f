"""Architectures are refused by name, from the content of config.json alone."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import InvalidInput
from paceline.models.architectures import check_architecture, check_positions

NAME = "policy.model_name 'm'"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "glm_moe_dsa", "kv_lora_rank": 512, "index_topk": 2048}, "sparse attention"),
        ({"model_type": "xlstm"}, "does not support their layers"),
        (
            {"model_type": "new", "layer_types": ["full_attention", "linear_attention"]},
            r"\(linear_attention\)",
        ),
        ({"model_type": "new", "layer_types": ["compressed_attention"]}, r"\(compressed_attention\)"),
        (
            {
                "model_type": "qwen3_5",
                "text_config": {"layer_types": ["linear_attention"]},
                "vision_config": {"depth": 2},
            },
            "vision_config",
        ),
        (
            {"model_type": "gemma3", "vision_config": {"depth": 2}, "text_config": {}},
            r"modality \(vision_config\)",
        ),
        (
            {"model_type": "kimi_k25", "vision_config": {"depth": 2}, "text_config": {"kv_lora_rank": 512}},
            "vision_config",
        ),
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
    ],
)
def test_an_architecture_that_would_train_on_wrong_numbers_is_refused_by_name(
    config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidInput, match=reason) as caught:
        check_architecture(config, NAME)
    assert f"models of type {config['model_type']!r} are not supported" in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3"},
        {"model_type": "gemma3_text", "layer_types": ["full_attention", "sliding_attention"]},
        {"model_type": "gemma2", "attn_logit_softcapping": 50.0},
        {"model_type": "deepseek_v3", "kv_lora_rank": 512},
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"},
        {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
        {"model_type": "falcon", "alibi": False, "layer_types": "garbage"},
        {},
    ],
)
def test_others_pass(config: dict[str, Any]) -> None:
    check_architecture(config, NAME)


def test_frequencies_that_depend_on_the_row_are_refused_beyond_the_trained_length() -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    check_positions({"rope_parameters": rope}, NAME, 4096)
    check_positions({"rope_parameters": {"rope_type": "yarn"}, "max_position_embeddings": 8}, NAME, 4096)
    with pytest.raises(InvalidInput, match=r"'longrope' changes if a sequence has over 4096 tokens"):
        check_positions({"rope_parameters": rope}, NAME, 4097)
    old = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 2048}
    with pytest.raises(InvalidInput, match=r"max_total_sequence_length 2049 to at most 2048"):
        check_positions(old, NAME, 2049)
