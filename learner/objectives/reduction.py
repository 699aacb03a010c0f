"""Reduction of token losses to one number, always over the global batch (`bnpo` excepted)."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.learner.objectives.base import Denominators, LossResult, TokenArrays


def token_weights(lengths_N: Tensor, denominators: Denominators, reduction: str) -> Tensor:
    """Return [N] weight of each token's loss, so that a reduction is Σ_t weight_t · loss_t.

    `lengths_N` are those of samples: the rows of an episode are one sample, so that none counts more for having more rows.

    - `grpo`: 1 / (B · length of the sequence): mean over sequences of the mean over tokens (Shao et al. 2024).
    - `dapo`: 1 / tokens of the batch (Yu et al. 2025).
    - `dr_grpo`: 1 / (B · max_completion_tokens): no length in the denominator (Liu et al. 2025).
    - `sequence_sum`: 1 / B: mean over sequences of the sum over tokens (LUSPO).
    - `bnpo`: token mean of the micro-batch, averaged over micro-batches (TRL); depends on the split.
    """
    sequences = max(denominators.sequences, 1)
    match reduction:
        case "grpo":
            return 1.0 / (sequences * lengths_N)
        case "dapo":
            return torch.full_like(lengths_N, 1.0 / max(denominators.tokens, 1))
        case "dr_grpo":
            return torch.full_like(lengths_N, 1.0 / (sequences * denominators.max_completion_tokens))
        case "sequence_sum":
            return torch.full_like(lengths_N, 1.0 / sequences)
        case "bnpo":
            return torch.full_like(
                lengths_N, 1.0 / (max(len(lengths_N), 1) * max(denominators.micro_batches, 1))
            )
        case _:
            raise ValueError(f"unknown reduction {reduction!r}")


def reduced(
    losses_N: Tensor,
    sums: dict[str, Tensor],
    tokens: TokenArrays,
    denominators: Denominators,
    reduction: str,
    entropy_bonus: float = 0.0,
) -> LossResult:
    """Return Σ_t weight_t · loss_t, minus entropy_bonus · mean entropy."""
    loss = (losses_N * token_weights(tokens.weight_lengths_N, denominators, reduction)).sum()
    if entropy_bonus:
        loss = loss - entropy_bonus * tokens.entropy_N.sum() / max(denominators.tokens, 1)
    return LossResult(loss, {"loss": loss.detach().double(), **sums}, losses_N.detach())
