"""Sums over whole completions, from a micro-batch's tokens, for the losses of labeled completions."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.learner.batch.samples import PackedBatch, PreferenceLabel, TrainingSample
from paceline.learner.objectives.base import LossResult, TokenArrays, dummy_sample


def labeled_dummies() -> list[TrainingSample]:
    """Return a good and a bad completion of one token, with the reference's log-probability."""
    return [dummy_sample(PreferenceLabel(good, reference_logprob=0.0)) for good in (True, False)]


def completion_sums(values_N: Tensor, tokens: TokenArrays) -> Tensor:
    """Return [S] sum over each sequence's tokens."""
    return values_N.new_zeros(tokens.num_sequences).index_add(0, tokens.sequence_N, values_N)


def completion_lengths(tokens: TokenArrays) -> Tensor:
    """Return [S] tokens of each sequence, as float."""
    return completion_sums(torch.ones_like(tokens.current_N), tokens)


def reference_sums(tokens: TokenArrays, packed: PackedBatch) -> Tensor:
    """Return [S] Σ_t log π_ref of each sequence: precomputed, or from the reference's log-probabilities."""
    sums = [label.reference_logprob for label in packed.labels_S]
    if sums and all(value is not None for value in sums):
        return torch.tensor(sums, dtype=torch.float32, device=packed.targets_N.device)
    if tokens.reference_N is None:
        raise ValueError("the loss needs the reference's log-probabilities; this batch has none")
    return completion_sums(tokens.reference_N, tokens)


def completion_result(
    loss: Tensor, sums: dict[str, Tensor], tokens: TokenArrays, per_sequence_S: Tensor
) -> LossResult:
    """Return the result of a loss with one number for each sequence, which shows the sequence that is not finite."""
    losses_N = per_sequence_S.detach()[tokens.sequence_N]
    return LossResult(loss, {"loss": loss.detach().double(), **sums}, losses_N)
