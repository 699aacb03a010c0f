"""`grpo`, and the policy loss of rollouts: ratio, corrections for the sampler's age, clip, masks and the KL to a
reference. Suffixes and symbols are those of `paceline.learner.objectives.base`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.learner.batch.samples import PackedBatch, TrainingSample
from paceline.learner.objectives.base import (
    Denominators,
    LossResult,
    Objective,
    TokenArrays,
    detached_sum,
    reduced,
    token_sums,
)
from paceline.learner.objectives.corrections import (
    at_level,
    bounded_exp,
    importance_weights,
    kept_tokens,
    log_linear_proximal,
)
from paceline.learner.objectives.policy_losses import PolicyTerms, policy_losses
from paceline.spec import LossSection, RunSpec

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 before an exponential without a bound (k3 and metrics), as in NeMo RL."""


def policy_loss(tokens: TokenArrays, denominators: Denominators, config: LossSection) -> LossResult:
    """Return the policy loss that the config describes.

    loss_t = keep · w · f(r, A) + β·KL_t, reduced by `token_weights`, minus entropy_bonus · mean entropy. f is
    `policy_losses`' (config.policy_loss), r = π/π_prox or π/μ (config.ratio_anchor), w and keep come from ρ = π_prox/μ
    (`importance_weights`, `kept_tokens`), detached. `vespo` takes w into f. As in TRL, the KL also acts on tokens that
    a mask drops.

    Sources: group-relative advantages (Shao et al. 2024), the anchor π_prox with ρ outside the clip (Hilton et al.
    2022; AReaL, Fu et al. 2025). With one update per step and a proximal anchor r is 1 and no clip acts: the loss is
    then w·A·∇log π, a truncated importance-weighted policy gradient. Raises ValueError for a missing array.
    """
    if tokens.behaviour_N is None or tokens.advantages_N is None:
        raise ValueError("policy_loss needs behaviour log-probabilities and advantages, but this batch lacks them")
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
        **token_sums(tokens),
        **_behaviour_sums(tokens.current_N.detach() - tokens.behaviour_N),
        **_weight_sums(log_rho_N, tokens),
    }
    if tokens.reference_N is not None:
        kl_N = kl_to_reference(
            tokens.current_N, tokens.reference_N, bounded_exp(log_ratio_N), config.reference_policy_kl_type
        )
        sums["kl_reference"] = detached_sum(kl_N)
        if not config.use_kl_in_reward:
            losses_N = losses_N + config.reference_policy_kl_penalty * kl_N
    return reduced(losses_N, sums, tokens, denominators, config.reduction, config.entropy_bonus)


def proximal_logprobs(tokens: TokenArrays, config: LossSection) -> Tensor:
    """Return [N] log π_prox, detached: given, interpolated (`log_linear`), or π itself if this is the only update."""
    if config.proximal_policy == "log_linear":
        if tokens.behaviour_N is None or tokens.ages_N is None:
            raise ValueError(
                "the log-linear proximal policy needs behaviour log-probabilities and ages, but this batch lacks them"
            )
        return log_linear_proximal(tokens.current_N, tokens.behaviour_N, tokens.ages_N)
    return tokens.current_N.detach() if tokens.proximal_N is None else tokens.proximal_N


def kl_to_reference(current_N: Tensor, reference_N: Tensor, ratio_N: Tensor, kind: str) -> Tensor:
    """Return [N] estimates of KL(π‖π_ref) from samples of π, with Δ = log π_ref - log π (Schulman 2020).

    - `k1` = -Δ. As a loss it has no gradient on average, so the spec refuses it with β > 0.
    - `k2` = Δ²/2. Its on-policy gradient is that of the reverse KL.
    - `k3` = r·(exp(Δ) - Δ - 1). The factor r = π/π_prox, 1 in value on-policy, makes the gradient that of the reverse
      KL; without it, k3 pulls along the forward KL (TRL's default has the factor as well).
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


class Grpo(Objective):
    """GRPO and its relatives. Samples come from groups (`paceline.learner.batch.samples.sequences_from_groups`)."""

    def __init__(self, spec: RunSpec) -> None:
        self._loss_fn = spec.loss_fn
        self.temperature = spec.policy.generation.temperature
        self.with_entropy_gradient = spec.loss_fn.entropy_bonus > 0

    def dummy(self) -> list[TrainingSample]:
        zero, zeros_T = np.zeros(1, np.int32), np.zeros(1, np.float32)
        return [TrainingSample(-1, zero, zero, zeros_T, versions_T=zero, reference_logprobs_T=zeros_T)]

    def loss(self, tokens: TokenArrays, packed: PackedBatch, counts: Denominators) -> LossResult:
        return policy_loss(tokens, counts, self._loss_fn)
