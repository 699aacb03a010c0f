"""Models of a wanted size: a Qwen3 configuration, and its tensors with realistic magnitudes."""

from __future__ import annotations

from typing import Any

import torch

from paceline.weights.format.manifest import TensorPlan, WeightManifest
from paceline.weights.format.packing import empty_flat, views

SHAPES = {
    # name: hidden, layers, vocabulary
    "1M": (128, 3, 2048),
    "10M": (256, 8, 8192),
    "50M": (512, 12, 16384),
    "100M": (768, 11, 32768),
    "250M": (1024, 14, 65536),
    "500M": (1280, 20, 131072),
    "1B": (2048, 16, 131072),
}
"""Sizes by name; the result says how many parameters each really has."""


def configuration(size: str) -> Any:
    """The Qwen3 configuration of a size, embeddings tied."""
    from transformers import Qwen3Config

    hidden, layers, vocabulary = SHAPES[size]
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
    )


def shapes(size: str) -> dict[str, torch.Tensor]:
    """Names and shapes as tensors of the meta device; tied names are the identical object."""
    from transformers import Qwen3ForCausalLM

    with torch.device("meta"):
        module = Qwen3ForCausalLM(configuration(size))
    module.tie_weights()
    state: dict[str, torch.Tensor] = module.state_dict(keep_vars=True)
    return state


def random_weights(size: str, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Normal weights of standard deviation 0.02 and norms of 1, views of one run of bytes, tied names sharing theirs."""
    short = str(dtype).removeprefix("torch.")
    first: dict[int, str] = {}
    plans = []
    for name, tensor in shapes(size).items():
        owner = first.setdefault(id(tensor), name)
        plans.append(TensorPlan(name, short, tuple(tensor.shape), None if owner == name else owner))
    layout = WeightManifest.plan(plans, bucket_bytes=1 << 28)
    tensors = views(empty_flat(layout).zero_(), layout)
    generator = torch.Generator().manual_seed(seed)
    for plan in plans:
        if len(plan.shape) == 1:
            tensors[plan.name].fill_(1.0)
        elif plan.same_as is None:
            tensors[plan.name].normal_(0.0, 0.02, generator=generator)
    return tensors
