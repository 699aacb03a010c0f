"""Base of the objectives: a loss's arrays, result and reduction, and the interface for samples and metrics.

Promise: with denominators counted over the global batch, the losses of all micro-batches on all ranks add up to the
loss of the batch, however it was split (except for the reduction `bnpo`, by its definition). The sums of metrics add up
in the same way.

All arrays are flat over the active tokens of a micro-batch: N tokens that train, S the sequences they belong to. A
token that must not train (a tool's output, an over-long completion) is not among them; its sequence still counts in the
denominators. μ is the behaviour policy (the sampler), π_prox the learner at the start of the step, π the learner now.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.learner.batch.encoding import ExampleEncoder, Row
from paceline.learner.batch.samples import PackedBatch, PreferenceLabel, TrainingSample
from paceline.learner.model.policy import load_policy
from paceline.spec import PolicySection


@dataclass(frozen=True)
class TokenArrays:
    """Inputs of a loss. Log-probabilities are in nats, at the sampler's temperature."""

    current_N: Tensor
    """[N] log-probabilities by the policy now (log π), with gradient."""
    entropy_N: Tensor
    """[N] entropy of π at each token in nats; with gradient if an entropy bonus is on."""
    lengths_N: Tensor
    """[N] number of active tokens in the token's sequence, as float."""
    sequence_N: Tensor
    """[N] index in [0, S) of the token's sequence."""
    num_sequences: int
    """Number of sequences, S."""
    behaviour_N: Tensor | None = None
    """[N] log-probabilities by the sampler (log μ). None for supervised data."""
    proximal_N: Tensor | None = None
    """[N] log-probabilities before the step (log π_prox). None if the step has only this update: π_prox is π."""
    reference_N: Tensor | None = None
    """[N] log-probabilities by the reference (log π_ref). None if not needed."""
    advantages_N: Tensor | None = None
    """[N] advantages. None for supervised data."""
    ages_N: Tensor | None = None
    """[N] steps between the version that sampled the token and this step; only the log-linear π_prox reads them."""
    m2_limit: float | None = None
    """Largest (log ρ)² that is kept (`m2_limit_of`). None keeps all."""
    batch_kl: float | None = None
    """KTO's KL, measured over the global batch before its first update."""
    sample_lengths_N: Tensor | None = None
    """[N] number of active tokens in the token's sample. None if each sequence is a sample."""

    @property
    def weight_lengths_N(self) -> Tensor:
        """[N] number of active tokens in the token's sample, by which a mean over samples divides."""
        return self.lengths_N if self.sample_lengths_N is None else self.sample_lengths_N


@dataclass(frozen=True)
class Denominators:
    """Counts over the whole batch of one update: all micro-batches, all ranks."""

    tokens: int
    """Number of active tokens."""
    sequences: int
    """Number of sequences, those without active tokens included."""
    max_completion_tokens: int
    """The longest completion that sampling allows, in tokens (`dr_grpo`)."""
    micro_batches: int
    """Number of micro-batches that have tokens (`bnpo`)."""
    prompts: int = 0
    """Number of prompts, for objectives on pairs: sequences that share a group id count once."""


@dataclass(frozen=True)
class LossResult:
    """A micro-batch's share of the loss."""

    loss: Tensor
    """Scalar with gradient; shares add up to the loss of the batch."""
    sums: dict[str, Tensor]
    """Scalars that add up over micro-batches and ranks; `metrics_from_sums` reads them."""
    token_losses_N: Tensor
    """[N] detached losses before the reduction. They show which sequence has a loss that is not finite."""


class Objective(ABC):
    """One algorithm: its samples, its loss and its metrics. The defaults fit training on single texts."""

    temperature: float = 1.0
    """Temperature of all log-probabilities."""
    with_entropy_gradient: bool = False
    """True if the loss reads the entropy's gradient."""
    keeps_prompts_whole: bool = False
    """True if all sequences of a prompt must be in one micro-batch."""
    measures_mismatched: bool = False
    """True if the batch has samples that do not train, whose mean Σ_t log π - log π_ref is `TokenArrays.batch_kl`."""

    def load_model(self, policy: PolicySection, device: torch.device, seed: int) -> PreTrainedModel:
        """Return the model that trains."""
        return load_policy(policy, device, seed)

    def samples(
        self, row: Row, number: int, encoder: ExampleEncoder, reference_S: Sequence[float] | None
    ) -> list[TrainingSample]:
        """Return the samples of a data set's row, `number` as group id; `reference_S`: precomputed Σ_t log π_ref."""
        raise ValueError(f"{type(self).__name__} trains on rollouts and reads no examples")

    def mismatched_sample(
        self, row: Row, other: Row, number: int, encoder: ExampleEncoder, reference_S: Sequence[float] | None
    ) -> TrainingSample:
        """Return the sample of the prompt of `row` with the completion of `other`, if `measures_mismatched`."""
        raise ValueError(f"{type(self).__name__} measures nothing on mismatched completions")

    @abstractmethod
    def dummy(self) -> list[TrainingSample]:
        """Return samples of one token with everything that the loss or a reference reads; their weight is zero."""

    @abstractmethod
    def loss(self, tokens: TokenArrays, packed: PackedBatch, counts: Denominators) -> LossResult:
        """Return the micro-batch's share of the loss."""

    def metrics(self, sums: dict[str, float], num_updates: int = 1) -> dict[str, float]:
        """Return the metrics of a batch, from the sums of its micro-batches and ranks over `num_updates` updates."""
        return metrics_from_sums(sums)


def dummy_sample(label: PreferenceLabel | None = None) -> TrainingSample:
    """Return a sample with a completion of one token, as a data set would give it."""
    zero = np.zeros(1, np.int32)
    return TrainingSample(-1, zero, zero, label=label)


def token_sums(tokens: TokenArrays) -> dict[str, Tensor]:
    """Return the number of tokens and the sums of their entropies and log-probabilities."""
    return {
        "tokens": torch.ones_like(tokens.current_N).sum(),
        "entropy": detached_sum(tokens.entropy_N),
        "logprob": detached_sum(tokens.current_N),
    }


def detached_sum(values_N: Tensor) -> Tensor:
    """Return the sum in float64, without gradient."""
    return values_N.detach().sum(dtype=torch.float64)


def metrics_from_sums(sums: dict[str, float]) -> dict[str, float]:
    """Return the metrics of a batch from the sums of all its micro-batches and ranks.

    `ratio_behaviour` mean of π/μ; `kl_behaviour` k3 estimate of KL(μ‖π) from μ's samples: mean of ratio - 1 - log
    ratio; `effective_sample_size` (Σw)²/(N·Σw²) with w = π_prox/μ, not truncated, per token and per sequence;
    `clip_fraction`, `truncation_fraction` (a weight reached its bound) and `drop_fraction` (masked) of tokens;
    `entropy`, `logprob` and `kl_reference` means, in nats.
    """
    tokens = sums["tokens"]
    if tokens == 0:
        return {}
    means = {
        "entropy": "entropy",
        "logprob": "logprob",
        "ratio_behaviour": "ratio",
        "kl_behaviour": "kl_behaviour",
        "kl_reference": "kl_reference",
        "clip_fraction": "clipped",
        "truncation_fraction": "truncated",
        "drop_fraction": "dropped",
    }
    metrics = {name: sums[key] / tokens for name, key in means.items() if key in sums}
    if "weight" in sums:
        metrics["effective_sample_size"] = sums["weight"] ** 2 / (tokens * sums["weight_squared"])
        metrics["effective_sample_size_sequence"] = sums["sequence_weight"] ** 2 / (
            sums["sequences_with_tokens"] * sums["sequence_weight_squared"]
        )
    return metrics


def labeled_dummies() -> list[TrainingSample]:
    """Return a good and a bad completion of one token, with the reference's log-probability."""
    return [dummy_sample(PreferenceLabel(good, reference_logprob=0.0)) for good in (True, False)]


def completion_sums(values_N: Tensor, tokens: TokenArrays) -> Tensor:
    """Return [S] the sum over each sequence's tokens."""
    return values_N.new_zeros(tokens.num_sequences).index_add(0, tokens.sequence_N, values_N)


def completion_lengths(tokens: TokenArrays) -> Tensor:
    """Return [S] number of tokens of each sequence, as float."""
    return completion_sums(torch.ones_like(tokens.current_N), tokens)


def reference_sums(tokens: TokenArrays, packed: PackedBatch) -> Tensor:
    """Return [S] Σ_t log π_ref of each sequence: precomputed, or from the reference's log-probabilities."""
    sums = [label.reference_logprob for label in packed.labels_S]
    if sums and all(value is not None for value in sums):
        return torch.tensor(sums, dtype=torch.float32, device=packed.targets_N.device)
    if tokens.reference_N is None:
        raise ValueError("the loss needs the reference's log-probabilities, but this batch has none")
    return completion_sums(tokens.reference_N, tokens)


def completion_result(loss: Tensor, sums: dict[str, Tensor], tokens: TokenArrays, per_sequence_S: Tensor) -> LossResult:
    """Return the result of a loss that has one number for each sequence; every token of a sequence gets the number."""
    losses_N = per_sequence_S.detach()[tokens.sequence_N]
    return LossResult(loss, {"loss": loss.detach().double(), **sums}, losses_N)


def token_weights(lengths_N: Tensor, denominators: Denominators, reduction: str) -> Tensor:
    """Return [N] weight of each token's loss, so that a reduction is Σ_t weight_t · loss_t.

    `lengths_N` are those of samples: an episode's transcripts are one sample, so their number does not matter.

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
            return torch.full_like(lengths_N, 1.0 / (max(len(lengths_N), 1) * max(denominators.micro_batches, 1)))
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
