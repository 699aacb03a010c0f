"""The shape of Qwen2.5-0.5B as a config.json, and a spec for it."""

from __future__ import annotations

from typing import Any

from paceline.spec import RunSpec
from paceline.spec.reading import parse_spec

HALF_BILLION: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4_864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
LAYER = 2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4_864 + 2 * 896
PARAMETERS = 24 * LAYER + 151_936 * 896 + 896
GB = 10**9


def spec_of(model: str = "m", **sections: Any) -> RunSpec:
    policy = {
        "model_name": model,
        "max_total_sequence_length": 256,
        "train_mb_tokens": 2048,
        "generation": {"max_new_tokens": 32, "max_batch_size": 8},
    }
    tree: dict[str, Any] = {
        "data": {"train": "d"},
        "rewards": [{"function": "length"}],
        "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4},
        "cluster": {"rollout_workers": 1},
    }
    return parse_spec(tree | sections | {"policy": policy | sections.get("policy", {})})
