"""Tiny random models of the architectures of docs/use/models.md: those that work, and those that are refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
WINDOW = 5


@dataclass(frozen=True, eq=False)
class Architecture:
    """A family of models, and the config of a tiny one."""

    family: str
    class_name: str
    """Name of the class in transformers, without `ForCausalLM`."""
    config: dict[str, Any] = field(default_factory=dict)
    remark: str = ""
    config_name: str = ""
    """Name of the config's class, where it is not `class_name` with `Config`."""

    def make(self) -> Any:
        """Return the model, with weights that depend on the family alone."""
        config_class = getattr(transformers, self.config_name or f"{self.class_name}Config")
        config = config_class(**{**SIZES, **self.config})
        torch.manual_seed(0)
        model = getattr(transformers, f"{self.class_name}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # norms, biases and sinks, which are constant in a new model
                    parameter.add_(torch.randn(parameter.shape) * 0.2)
        return model.eval()


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}

WORKING = (
    Architecture("Llama 3.x", "Llama", {"rope_parameters": LLAMA3_ROPE}, "scaled rotary embedding"),
    Architecture("Qwen2, Qwen2.5", "Qwen2", {}, "biases of queries, keys and values"),
    Architecture("Qwen3", "Qwen3", {"head_dim": 8}, "norms of queries and keys"),
    Architecture("Qwen3-MoE", "Qwen3Moe", {"head_dim": 8, "num_experts": 4, **EXPERTS}, "experts"),
    Architecture("GLM-4", "Glm4", {"head_dim": 8, "partial_rotary_factor": 0.5}, "norms around each block"),
    Architecture(
        "GLM-4.5",
        "Glm4Moe",
        {
            "head_dim": 8,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            **EXPERTS,
        },
        "experts with a shared expert, dense first layers",
    ),
    Architecture("Mistral", "Mistral", {"head_dim": 8, "sliding_window": WINDOW}, "sliding window in every layer"),
    Architecture(
        "Gemma 3 (text)",
        "Gemma3",
        {"head_dim": 8, **ALTERNATING},
        "sliding windows in turn with full attention",
        config_name="Gemma3TextConfig",
    ),
    Architecture("Phi-3, Phi-4", "Phi3", {}, "joined projections"),
    Architecture("OLMo", "Olmo", {}, "norms without weights"),
    Architecture("OLMo 2", "Olmo2", {}, "norms after each block"),
    Architecture("OLMo 3", "Olmo3", ALTERNATING, "sliding windows in turn with full attention"),
    Architecture(
        "GPT-OSS",
        "GptOss",
        {"head_dim": 8, "num_local_experts": 4, "rope_parameters": PLAIN_ROPE, **ALTERNATING, **EXPERTS},
        "experts, attention sinks; attention's memory grows with the square of a sequence's length",
    ),
)

REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("DeepSeek-V2, DeepSeek-V3", {"model_type": "deepseek_v3", "kv_lora_rank": 512}),
    ("Kimi K2", {"model_type": "kimi_k2", "kv_lora_rank": 512}),
    ("Qwen3-Next", {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}),
    ("Qwen3.5", {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]}),
    ("Nemotron-H", {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-"}),
    ("Mamba, Jamba, Zamba, Bamba, Falcon-H1", {"model_type": "jamba"}),
    ("Llama 4", {"model_type": "llama4_text", "layer_types": ["chunked_attention", "full_attention"]}),
    ("Gemma 2", {"model_type": "gemma2", "attn_logit_softcapping": 50.0}),
    ("Gemma 3 with images", {"model_type": "gemma3", "vision_config": {"model_type": "siglip"}}),
    ("Qwen2.5-VL, Qwen3-VL", {"model_type": "qwen3_vl", "vision_config": {"depth": 2}}),
    ("BLOOM, MPT, Falcon with ALiBi", {"model_type": "bloom"}),
)
"""Families and the part of their config.json for which they are refused."""
