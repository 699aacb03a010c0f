"""Tiny models of several architectures in folders, and the comparison of a loaded one with transformers' own loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_models import SIZES, tiny_qwen3
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def save_model(kind: str, folder: Path) -> Path:
    """Write a tiny model with random weights; its experts are single tensors in the files, its shards several files."""
    torch.manual_seed(7)
    model: Any
    if kind == "moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=5))
    elif kind == "bias":  # a buffer that is saved: the router's correction
        more = {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_shared_experts": 1}
        model = Glm4MoeForCausalLM(Glm4MoeConfig(**SIZES, **EXPERTS, **more))
        model.model.layers[1].mlp.gate.e_score_correction_bias.uniform_(1, 2)
    elif kind == "scaled":  # buffers that are not saved
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, sliding_window=8))
    elif kind == "stretched":
        original = {"original_max_position_embeddings": 64}
        model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=ROPE | original))
    else:
        model = tiny_qwen3(tie_word_embeddings=kind == "tied")
    model.bfloat16().save_pretrained(folder, max_shard_size="16KB")
    return folder


def differing(loaded: torch.nn.Module, folder: Path, dtype: torch.dtype) -> list[str]:
    """Return the parameters and buffers of which this rank's part has other bits than transformers' loading gives them."""
    auto: Any = AutoModelForCausalLM
    expected = auto.from_pretrained(folder, dtype=dtype)
    tensors = dict(expected.named_parameters(remove_duplicate=False)) | dict(expected.named_buffers())
    found = dict(loaded.named_parameters(remove_duplicate=False)) | dict(loaded.named_buffers())
    found = {name.replace(".base_layer.", "."): kept for name, kept in found.items() if ".lora_" not in name}
    names = sorted(tensors.keys() ^ found.keys())
    for name in tensors.keys() & found.keys():
        here, whole = found[name].detach(), tensors[name].detach()
        if isinstance(here, DTensor):
            shape, offset = compute_local_shape_and_global_offset(here.shape, here.device_mesh, here.placements)
            whole, here = whole[offset[0] : offset[0] + shape[0]], here.to_local()
        if here.dtype != whole.dtype or not torch.equal(here.cpu(), whole):
            names.append(name)
    return names
