"""Floating-point operations of training a model, and the largest number per second of known GPUs.

Counted are the products of the forward and backward pass, as for the model FLOPs utilisation of PaLM (Chowdhery et al. 2022,
arXiv 2204.02311, appendix B): 2 for each weight and token forward, 4 backward, with LoRA 2, and the products of causal attention.
Recomputed activations and frozen policies do not count, so the utilisation falls where time is spent on them.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.models.shape import ModelShape

DENSE_BFLOAT16_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}
"""Products in bfloat16, without sparsity, of GPUs whose names contain the key; NVIDIA's data sheets."""


def training_flops(
    shape: ModelShape, runs: Iterable[tuple[int, int]], predicted: int, *, frozen_base: bool = False
) -> float:
    """Return the operations of one forward and backward pass.

    Args:
        shape: the model.
        runs: (count, length) of the sequences, as in a packed row.
        predicted: tokens whose logits are computed.
        frozen_base: the gradients of the model's own weights are not computed (LoRA).
    """
    layer = 2 * shape.hidden * (shape.attention + shape.key_value) + 3 * shape.hidden * shape.mlp
    passes = 4 if frozen_base else 6
    total = 0.0
    for count, length in runs:
        # Scores and values: 2 products of 2·width operations for each pair, half of which are masked; thrice with backward.
        attention = 6 * shape.attention * length * length
        total += count * shape.layers * (passes * layer * length + attention)
    return total + passes * shape.embedding * predicted


def peak_flops(device_name: str) -> float | None:
    """Return the most operations of a GPU in a second; None for one that is not known."""
    return next((peak for name, peak in DENSE_BFLOAT16_FLOPS.items() if name in device_name), None)
