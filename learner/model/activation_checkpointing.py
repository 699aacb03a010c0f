"""Activation checkpointing of decoder layers: what the backward pass computes again in place of keeping it (Chen et al. 2016,
arXiv 1604.06174).

Promise: losses and gradients do not change. `full` keeps the input of a layer and computes all of it again. `selective`
keeps the results of matrix products and attention besides, so that only norms, rotations and activation functions are
computed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

KEPT_OPERATIONS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::_grouped_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "mkldnn::_linear_pointwise",
        "torch_attn::_varlen_attn",
    }
)
"""Operations whose results `selective` keeps, by their names in the dispatcher."""


def recompute_activations(layers: Iterable[torch.nn.Module], how: str) -> None:
    """Give the layers a forward that keeps less for the backward pass.

    `how` is `policy.activation_checkpointing`; `auto`, which is replaced when a run is submitted, is `full` here.
    """
    if how == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if how == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_or_recompute)
    for layer in layers:
        # Around the layer's forward, so that FSDP's hooks stay outside and do not run again in the recomputation.
        layer.forward = partial(checkpoint, layer.forward, **options)


def _keep_or_recompute(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    schema = getattr(operation, "_schema", None)
    if schema is not None and schema.name in KEPT_OPERATIONS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
