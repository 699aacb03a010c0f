"""A tiny Qwen3 with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}


def tiny_qwen3(*, seed: int = 0, **config: Any) -> Qwen3ForCausalLM:
    """Seed torch, and return a model of `SIZES` with the changes of `config`."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **config}))
