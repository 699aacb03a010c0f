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
SHARED_EXPERT = {"num_experts": 4, "shared_expert_intermediate_size": 24, **EXPERTS}
GROUPED_EXPERTS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, **EXPERTS}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "num_key_value_heads": 4}
LATENT_QUERIES = {"q_lora_rank": 12, **LATENT}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 3,
    "head_dim": 8,
    **MIXED,
}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
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
    always: bool = False
    """True if `make test` checks the family; CI checks all."""

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
    Architecture("Qwen2, Qwen2.5", "Qwen2", {}, "biases of queries, keys and values", always=True),
    Architecture("Qwen3", "Qwen3", {"head_dim": 8}, "norms of queries and keys", always=True),
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
    Architecture("Granite 3", "Granite", {"logits_scaling": 4.0, "residual_multiplier": 0.5}, "scaled logits"),
    Architecture("Command R7B, Command A", "Cohere2", ALTERNATING, "scaled logits, parallel blocks"),
    Architecture("SmolLM3", "SmolLM3", {"no_rope_layers": [1, 0]}, "layers without rotary embedding"),
    Architecture("EXAONE 4", "Exaone4", ALTERNATING, "norms after each block"),
    Architecture("Apertus", "Apertus", {}, "xIELU activation"),
    Architecture("ERNIE 4.5", "Ernie4_5", {"head_dim": 8}, "none"),
    Architecture("Hunyuan dense", "HunYuanDenseV1", {"head_dim": 8}, "norms of queries and keys"),
    Architecture("MiniMax M2", "MiniMaxM2", {"head_dim": 8, "num_local_experts": 4, **EXPERTS}, "experts"),
    Architecture("dots.llm1", "Dots1", {"n_shared_experts": 1, **GROUPED_EXPERTS}, "experts with a shared expert"),
    Architecture("Seed-OSS", "SeedOss", {"head_dim": 8, "residual_dropout": 0.5}, "dropout, which is off"),
    Architecture("DiffLlama", "DiffLlama", {"head_dim": 8}, "differences of two attentions"),
    Architecture("Phi-1, Phi-2", "Phi", {}, "a head with a bias"),
    Architecture(
        "Gemma 2",
        "Gemma2",
        {"head_dim": 8, "query_pre_attn_scalar": 8, **ALTERNATING},
        "soft caps of scores and logits; attention's memory grows with the square of a sequence's length",
        always=True,
    ),
    Architecture(
        "Gemma 3n (text)",
        "Gemma3n",
        {
            "head_dim": 8,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 23,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 4,
            "layer_types": ALTERNATING["layer_types"] * 2,
            "sliding_window": WINDOW,
        },
        "layers that share keys and values",
        config_name="Gemma3nTextConfig",
    ),
    Architecture(
        "Gemma 4 (text)",
        "Gemma4",
        {
            "head_dim": 8,
            "global_head_dim": 16,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 23,
            "layer_types": ALTERNATING["layer_types"] * 2,
            "sliding_window": WINDOW,
        },
        "layers that share keys and values, heads of two widths",
        config_name="Gemma4TextConfig",
    ),
    Architecture(
        "Llama 4 (text)",
        "Llama4",
        {
            "head_dim": 8,
            "layer_types": ["chunked_attention", "full_attention"],
            "attention_chunk_size": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            "no_rope_layers": [1, 0],
            "attn_temperature_tuning": True,
            "floor_scale": 3,
        },
        "chunked attention, scales by position",
        config_name="Llama4TextConfig",
    ),
    Architecture("DeepSeek-V2", "DeepseekV2", {**LATENT_QUERIES, **GROUPED_EXPERTS}, "latent attention, experts"),
    Architecture(
        "DeepSeek-V3, Kimi K2",
        "DeepseekV3",
        {**LATENT_QUERIES, **GROUPED_EXPERTS},
        "latent attention, experts",
        always=True,
    ),
    Architecture("GLM-4.7-Flash", "Glm4MoeLite", {**LATENT_QUERIES, **GROUPED_EXPERTS}, "latent attention, experts"),
    Architecture("MiniCPM3", "MiniCPM3", LATENT_QUERIES, "latent attention, scaled logits"),
    Architecture("Youtu", "Youtu", LATENT_QUERIES, "latent attention"),
    Architecture("Qwen3.5 (text)", "Qwen3_5", DELTA, "linear attention", config_name="Qwen3_5TextConfig", always=True),
    Architecture(
        "Qwen3.5-MoE (text)",
        "Qwen3_5Moe",
        {**DELTA, **SHARED_EXPERT},
        "linear attention, experts",
        config_name="Qwen3_5MoeTextConfig",
    ),
    Architecture("Qwen3-Next", "Qwen3Next", {**DELTA, **SHARED_EXPERT}, "linear attention, experts"),
    Architecture("OLMo Hybrid", "OlmoHybrid", DELTA, "linear attention"),
    Architecture(
        "Kimi Linear",
        "KimiLinear",
        {
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "linear_conv_kernel_dim": 3,
            "num_experts": 4,
            "mlp_layer_types": ["dense", "sparse"],
            "n_group": 1,
            "topk_group": 1,
            **LATENT,
            **MIXED,
            **EXPERTS,
        },
        "linear and latent attention, experts",
    ),
    Architecture(
        "Nemotron-H, Nemotron 3",
        "NemotronH",
        {
            "layers_block_type": ["mamba", "attention", "mlp"],
            "num_hidden_layers": 3,
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "conv_kernel": 3,
            "chunk_size": 8,
        },
        "Mamba 2",
        always=True,
    ),
    Architecture(
        "Granite 4",
        "GraniteMoeHybrid",
        {
            "layer_types": ["mamba", "attention"],
            "mamba_d_conv": 3,
            "mamba_expand": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
            "logits_scaling": 4.0,
            **MAMBA2,
        },
        "Mamba 2, experts, scaled logits",
    ),
    Architecture("Bamba", "Bamba", {"attn_layer_indices": [1], **MAMBA2}, "Mamba 2"),
    Architecture(
        "Falcon-H1",
        "FalconH1",
        {"head_dim": 8, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5, **MAMBA2},
        "Mamba 2 beside attention in each layer, scaled logits",
    ),
    Architecture(
        "Jamba",
        "Jamba",
        {
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
        "Mamba, experts",
    ),
    Architecture(
        "LFM2",
        "Lfm2",
        {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
        "short convolutions",
    ),
    Architecture(
        "LFM2-MoE",
        "Lfm2Moe",
        {
            "layer_types": ["conv", "full_attention"],
            "conv_L_cache": 3,
            "num_experts": 4,
            "num_dense_layers": 1,
            **EXPERTS,
        },
        "short convolutions, experts",
    ),
    Architecture(
        "RecurrentGemma",
        "RecurrentGemma",
        {"block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": 8, "head_dim": 8},
        "linear recurrence, soft-capped logits",
    ),
    Architecture("Mamba", "Mamba", {"state_size": 8, "conv_kernel": 3, "time_step_rank": 4}, "no attention"),
    Architecture(
        "Falcon Mamba", "FalconMamba", {"state_size": 8, "conv_kernel": 3, "time_step_rank": 4}, "no attention"
    ),
    Architecture(
        "Mamba 2, Codestral Mamba",
        "Mamba2",
        {"state_size": 8, "conv_kernel": 3, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8, "expand": 2},
        "no attention",
    ),
)

REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("DeepSeek-V3.2", {"model_type": "deepseek_v32", "kv_lora_rank": 512, "index_topk": 2048}),
    ("GLM-5", {"model_type": "glm_moe_dsa", "kv_lora_rank": 512, "index_topk": 2048}),
    ("MiniMax-Text-01, MiniMax M1, xLSTM, RWKV, Zamba, Zamba2", {"model_type": "minimax"}),
    ("Gemma 3 with images", {"model_type": "gemma3", "vision_config": {"model_type": "siglip"}}),
    ("Qwen2.5-VL, Qwen3-VL, Qwen3.5 with images", {"model_type": "qwen3_vl", "vision_config": {"depth": 2}}),
    ("BLOOM, MPT, Falcon with ALiBi", {"model_type": "bloom"}),
)
"""Families and the part of their config.json for which they are refused."""
