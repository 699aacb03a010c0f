"""Losses: pure functions from log-probabilities to one number, with the sums that metrics are made of.

Promise: with denominators counted over the global batch, the losses of all micro-batches on all ranks add up to the
loss of the batch, however it was split (`bnpo` excepted, by its definition), and so do the metric sums.

All arrays are flat over the active tokens of a micro-batch: N tokens that train, S the sequences they belong to.
A token that must not train (a tool's output, an over-long row) is simply not among them; its sequence still counts
in the denominators. μ is the behaviour policy (the sampler), π_prox the learner at the start of the step, π the
learner now.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.objectives.corrections import (
    at_level,
    bounded_exp,
    importance_weights,
    kept_tokens,
    log_linear_proximal,
)
from learner.objectives.policy_losses import PolicyTerms, policy_losses
from paceline.spec import LossSection

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within ±20 where they are exponentiated without a bound (k3 and metrics), as in NeMo RL."""


@dataclass(frozen=True)
class TokenArrays:
    """What a loss is computed from. Log-probabilities are in nats, at the sampler's temperature."""

    current_N: Tensor
    """log π, with gradient."""
    entropy_N: Tensor
    """Entropy of π at each token in nats; with gradient where an entropy bonus is on."""
    lengths_N: Tensor
    """Active tokens of the sequence that the token belongs to, as float."""
    sequence_N: Tensor
    """Index in [0, S) of that sequence."""
    num_sequences: int
    """S."""
    behaviour_N: Tensor | None = None
    """log μ; None for supervised data."""
    proximal_N: Tensor | None = None
    """log π_prox; None means this is the only update of the step, so π_prox is π, detached."""
    reference_N: Tensor | None = None
    """log π_ref; None unless the KL penalty is on."""
    advantages_N: Tensor | None = None
    """Advantage of the token; None for supervised data."""
    ages_N: Tensor | None = None
    """Steps between the version that sampled the token and the step; only the log-linear π_prox reads it."""
    m2_limit: float | None = None
    """Tokens with a larger (log ρ)² are dropped (`m2_limit_of`); None keeps all."""
    batch_kl: float | None = None
    """KTO's KL, measured over the global batch before its first update."""


@dataclass(frozen=True)
class Denominators:
    """Counts over the whole batch of one update: all micro-batches, all ranks."""

    tokens: int
    """Active tokens."""
    sequences: int
    """Sequences, those without active tokens included."""
    max_completion_tokens: int
    """The longest completion that sampling allows, in tokens (`dr_grpo`)."""
    micro_batches: int
    """Micro-batches that hold tokens (`bnpo`)."""
    prompts: int = 0
    """Prompts (preference pairs): sequences that share a group id count once."""


@dataclass(frozen=True)
class LossResult:
    """A micro-batch's share of the loss."""

    loss: Tensor
    """Scalar with gradient; shares add up to the loss of the batch."""
    sums: dict[str, Tensor]
    """Scalars that add up over micro-batches and ranks; `metrics_from_sums` reads them."""
    token_losses_N: Tensor
    """Detached, before the reduction: tells which sequence went wrong."""


def token_weights(lengths_N: Tensor, denominators: Denominators, reduction: str) -> Tensor:
    """[N] weight of each token's loss, so that a reduction is Σ_t weight_t · loss_t.

    - `grpo`: 1 / (B · length of the sequence): mean over sequences of the mean over tokens (Shao et al. 2024).
    - `dapo`: 1 / tokens of the batch (Yu et al. 2025).
    - `dr_grpo`: 1 / (B · max_completion_tokens): no length in the denominator (Liu et al. 2025).
    - `sequence_sum`: 1 / B: mean over sequences of the sum over tokens (LUSPO).
    - `bnpo`: token mean of the micro-batch, averaged over micro-batches (TRL); depends on the split.
    """
    match reduction:
        case "grpo":
            return 1.0 / (denominators.sequences * lengths_N)
        case "dapo":
            return torch.full_like(lengths_N, 1.0 / max(denominators.tokens, 1))
        case "dr_grpo":
            return torch.full_like(
                lengths_N, 1.0 / (denominators.sequences * denominators.max_completion_tokens)
            )
        case "sequence_sum":
            return torch.full_like(lengths_N, 1.0 / denominators.sequences)
        case "bnpo":
            return torch.full_like(
                lengths_N, 1.0 / (max(len(lengths_N), 1) * max(denominators.micro_batches, 1))
            )
        case _:
            raise ValueError(f"unknown reduction {reduction!r}")


def policy_loss(tokens: TokenArrays, denominators: Denominators, config: LossSection) -> LossResult:
    """The policy loss that the config describes.

    loss_t = keep · w · f(r, A) + β·KL_t, reduced by `token_weights`, minus entropy_bonus · mean entropy, where
    f is `policy_losses`' (config.policy_loss), r = π/π_prox or π/μ (config.ratio_anchor), w and keep come from
    ρ = π_prox/μ (`importance_weights`, `kept_tokens`), detached. `vespo` takes w into f. The KL acts on dropped tokens
    too, as in TRL.

    Sources: group-relative advantages (Shao et al. 2024), the anchor π_prox with ρ outside the clip (Hilton et al. 2022;
    AReaL, Fu et al. 2025). With one update per step and a proximal anchor r is 1 and no clip acts: the loss is then
    w·A·∇log π, a truncated importance-weighted policy gradient.

    Raises:
        ValueError: an array that the config needs is missing.
    """
    if tokens.behaviour_N is None or tokens.advantages_N is None:
        raise ValueError("policy_loss needs behaviour log-probabilities and advantages")
    proximal_N = proximal_logprobs(tokens, config)
    anchor_N = proximal_N if config.ratio_anchor == "proximal" else tokens.behaviour_N
    sequence_N, num_sequences = tokens.sequence_N, tokens.num_sequences
    log_ratio_N = tokens.current_N - anchor_N
    log_rho_N = (proximal_N - tokens.behaviour_N).detach()
    weight_N, truncated_N = importance_weights(log_rho_N, sequence_N, num_sequences, config)
    terms = PolicyTerms(
        current_N=tokens.current_N,
        anchor_N=anchor_N,
        log_ratio_N=at_level(log_ratio_N, config.ratio_level, sequence_N, tokens.lengths_N, num_sequences),
        advantages_N=tokens.advantages_N,
        weight_N=weight_N,
        sequence_N=sequence_N,
        num_sequences=num_sequences,
    )
    policy = policy_losses(terms, config)
    losses_N = policy.losses_N if config.policy_loss == "vespo" else policy.losses_N * weight_N
    keep_N = kept_tokens(
        log_rho_N,
        tokens.behaviour_N - tokens.current_N,
        tokens.advantages_N,
        sequence_N,
        tokens.lengths_N,
        num_sequences,
        tokens.m2_limit,
        config,
    )
    losses_N = losses_N.masked_fill(~keep_N, 0.0)
    sums = {
        "clipped": policy.clipped_N.sum(),
        "truncated": truncated_N.sum(),
        "dropped": (~keep_N).sum(),
        **_common_sums(tokens),
        **_behaviour_sums(tokens.current_N.detach() - tokens.behaviour_N),
        **_weight_sums(log_rho_N, tokens),
    }
    if tokens.reference_N is not None:
        kl_N = kl_to_reference(
            tokens.current_N, tokens.reference_N, bounded_exp(log_ratio_N), config.reference_policy_kl_type
        )
        sums["kl_reference"] = _sum(kl_N)
        if not config.use_kl_in_reward:
            losses_N = losses_N + config.reference_policy_kl_penalty * kl_N
    return _reduced(losses_N, sums, tokens, denominators, config.reduction, config.entropy_bonus)


def proximal_logprobs(tokens: TokenArrays, config: LossSection) -> Tensor:
    """[N] log π_prox, detached: given, interpolated (`log_linear`), or π itself where this is the only update."""
    if config.proximal_policy == "log_linear":
        if tokens.behaviour_N is None or tokens.ages_N is None:
            raise ValueError("the log-linear proximal policy needs behaviour log-probabilities and ages")
        return log_linear_proximal(tokens.current_N, tokens.behaviour_N, tokens.ages_N)
    return tokens.current_N.detach() if tokens.proximal_N is None else tokens.proximal_N


def sft_loss(tokens: TokenArrays, denominators: Denominators, config: LossSection) -> LossResult:
    """Negative log-likelihood of the completions, mean over the tokens of the global batch.

    loss = -Σ_t log π_t / tokens of the batch: maximum likelihood, as in every language model since Bengio et al. 2003.
    `config` is part of the common signature; nothing in it applies.
    """
    return _reduced(-tokens.current_N, _common_sums(tokens), tokens, denominators, "dapo")


def kl_to_reference(current_N: Tensor, reference_N: Tensor, ratio_N: Tensor, kind: str) -> Tensor:
    """[N] estimates of KL(π‖π_ref) from samples of π, with Δ = log π_ref - log π (Schulman 2020).

    - `k1` = -Δ. No gradient on average as a loss: the spec refuses it with β > 0.
    - `k2` = Δ²/2. Its on-policy gradient is that of the reverse KL.
    - `k3` = r·(exp(Δ) - Δ - 1). The factor r = π/π_prox, 1 in value on-policy, is what makes the gradient that of
      the reverse KL; without it, k3 pulls along the forward KL (TRL's default has the factor as well).
    """
    delta_N = reference_N - current_N
    match kind:
        case "k1":
            return -delta_N
        case "k2":
            return delta_N.square() / 2
        case "k3":
            delta_N = delta_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            return ratio_N * (delta_N.exp() - delta_N - 1)
        case _:
            raise ValueError(f"unknown KL estimator {kind!r}")


def metrics_from_sums(sums: dict[str, float]) -> dict[str, float]:
    """Metrics of a batch from the sums of all its micro-batches and ranks.

    `ratio_behaviour` mean of π/μ; `kl_behaviour` k3 estimate of KL(μ‖π) from μ's samples: mean of ratio - 1 - log
    ratio; `effective_sample_size` (Σw)²/(N·Σw²) with w = π_prox/μ, not truncated, per token and per sequence;
    `clip_fraction`, `truncation_fraction` (a weight's bound acted) and `drop_fraction` (a mask) of tokens; `entropy`, `logprob` and `kl_reference` means, in nats.
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


def _reduced(
    losses_N: Tensor,
    sums: dict[str, Tensor],
    tokens: TokenArrays,
    denominators: Denominators,
    reduction: str,
    entropy_bonus: float = 0.0,
) -> LossResult:
    loss = (losses_N * token_weights(tokens.lengths_N, denominators, reduction)).sum()
    if entropy_bonus:
        loss = loss - entropy_bonus * tokens.entropy_N.sum() / max(denominators.tokens, 1)
    return LossResult(loss, {"loss": loss.detach().double(), **sums}, losses_N.detach())


def _common_sums(tokens: TokenArrays) -> dict[str, Tensor]:
    return {
        "tokens": torch.ones_like(tokens.current_N).sum(),
        "entropy": _sum(tokens.entropy_N),
        "logprob": _sum(tokens.current_N),
    }


def _behaviour_sums(log_ratio_N: Tensor) -> dict[str, Tensor]:
    log_ratio_N = log_ratio_N.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_N = log_ratio_N.exp()
    return {"ratio": ratio_N.sum(), "kl_behaviour": (ratio_N - 1 - log_ratio_N).sum()}


def _weight_sums(log_weight_N: Tensor, tokens: TokenArrays) -> dict[str, Tensor]:
    log_weight_N = log_weight_N.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight_N = log_weight_N.exp()
    log_weight_S = log_weight_N.new_zeros(tokens.num_sequences).index_add_(0, tokens.sequence_N, log_weight_N)
    weight_S = log_weight_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return {
        "weight": weight_N.sum(),
        "weight_squared": weight_N.square().sum(),
        "sequence_weight": weight_S.sum(),
        "sequence_weight_squared": weight_S.square().sum(),
        "sequences_with_tokens": torch.ones_like(weight_S).sum(),
    }


def _sum(values_N: Tensor) -> Tensor:
    return values_N.detach().sum(dtype=torch.float64)
