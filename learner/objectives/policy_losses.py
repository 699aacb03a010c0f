"""Policy losses of each token from ratio and advantage, before weights, masks and reduction.

Promise: pure functions of one signature, (PolicyTerms, LossSection) → PolicyLosses, with value and gradient equal to
the formula in the docstring; the gradient is finite for any ratio. docs/use/objectives.md compares them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.learner.objectives.corrections import bounded_exp, per_sequence
from paceline.spec import LossSection

VESPO_MIN_LOG = math.log(1e-8)
VESPO_MAX_LOG = 20.0


@dataclass(frozen=True)
class PolicyTerms:
    """Values of the N active tokens of a micro-batch; log-probabilities in nats."""

    current_N: Tensor
    """[N] log-probabilities by the policy now (log π), with gradient."""
    anchor_N: Tensor
    """[N] log π_prox or log μ: the denominator of the ratio."""
    log_ratio_N: Tensor
    """[N] log r with gradient, of the token or of its sequence (loss_fn.ratio_level)."""
    advantages_N: Tensor
    weight_N: Tensor
    """[N] importance weights, detached; `vespo` includes them in its own weight."""
    sequence_N: Tensor
    """[N] index in [0, S) of the token's sequence."""
    num_sequences: int
    """Number of sequences, S."""


@dataclass(frozen=True)
class PolicyLosses:
    """Loss of each token, and True if the bound removed a part of its gradient."""

    losses_N: Tensor
    clipped_N: Tensor


def policy_losses(terms: PolicyTerms, config: LossSection) -> PolicyLosses:
    """Return the losses by the function that loss_fn.policy_loss names."""
    match config.policy_loss:
        case "clip":
            return clip(terms, config)
        case "unclipped":
            return unclipped(terms, config)
        case "cispo":
            return cispo(terms, config)
        case "sapo":
            return sapo(terms, config)
        case "dppo":
            return dppo(terms, config)
        case "vespo":
            return vespo(terms, config)
        case name:
            raise ValueError(f"unknown policy_loss {name!r}")


def clip(terms: PolicyTerms, config: LossSection) -> PolicyLosses:
    """Return -min(r·A, clip(r, 1 - ε, 1 + ε_high)·A), for A < 0 and with a dual clip c: at most -c·A. PPO (Schulman et
    al. 2017); separate bounds: DAPO (Yu et al. 2025); dual clip: Ye et al. 2020, TRL's `delta`."""
    ratio_N, advantages_N = bounded_exp(terms.log_ratio_N), terms.advantages_N
    bounded_N = ratio_N.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max) * advantages_N
    clipped_N = ratio_N * advantages_N > bounded_N
    gains_N = torch.minimum(ratio_N * advantages_N, bounded_N)
    if config.ratio_clip_c is not None:
        floor_N = config.ratio_clip_c * advantages_N
        dual_N = (advantages_N < 0) & (gains_N < floor_N)
        gains_N, clipped_N = torch.where(dual_N, floor_N, gains_N), clipped_N | dual_N
    return PolicyLosses(-gains_N, clipped_N)


def unclipped(terms: PolicyTerms, config: LossSection) -> PolicyLosses:
    """Return -r·A, the importance-weighted policy gradient, which is REINFORCE if r is 1. `config` is not read."""
    losses_N = -bounded_exp(terms.log_ratio_N) * terms.advantages_N
    return PolicyLosses(losses_N, torch.zeros_like(losses_N, dtype=torch.bool))


def cispo(terms: PolicyTerms, config: LossSection) -> PolicyLosses:
    """Return -sg(clip(r, 1 - ε, 1 + ε_high))·A·log π: every token keeps a gradient (MiniMax-M1, Chen et al. 2025). TRL
    names the bound itself, min(r, ε_high): its 5.0 is ratio_clip_max 4.0 and ratio_clip_min 1.0 here."""
    ratio_N = bounded_exp(terms.log_ratio_N.detach())
    bounded_N = ratio_N.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
    return PolicyLosses(-bounded_N * terms.advantages_N * terms.current_N, bounded_N != ratio_N)


def sapo(terms: PolicyTerms, config: LossSection) -> PolicyLosses:
    """Return -(4/τ)·σ(τ·(r - 1))·A, with one τ for A > 0 and another τ for all other tokens (Gao et al. 2025, arXiv
    2511.20347). At r = 1 the slope in r is that of -r·A; away from it the gradient falls gradually instead of being
    clipped."""
    ratio_N = bounded_exp(terms.log_ratio_N)
    temperature_N = _by_sign(terms.advantages_N > 0, config.sapo_temperature_pos, config.sapo_temperature_neg, ratio_N)
    losses_N = -torch.sigmoid(temperature_N * (ratio_N - 1)) * 4 / temperature_N * terms.advantages_N
    return PolicyLosses(losses_N, torch.zeros_like(losses_N, dtype=torch.bool))


def dppo(terms: PolicyTerms, config: LossSection) -> PolicyLosses:
    """Return -keep·r·A + c·(log r)², r = π/μ neither bounded nor detached. keep is 0 if A > 0 and π - μ >
    dppo_mask_high, or A < 0 and μ - π > dppo_mask_low: a trust region in total variation (Qi et al. 2026, arXiv
    2602.04879; in this form prime-rl, c = 1e-3)."""
    moved_N = terms.current_N.detach().exp() - terms.anchor_N.exp()
    dropped_N = ((terms.advantages_N > 0) & (moved_N > config.dppo_mask_high)) | (
        (terms.advantages_N < 0) & (-moved_N > config.dppo_mask_low)
    )
    losses_N = (-bounded_exp(terms.log_ratio_N) * terms.advantages_N).masked_fill(dropped_N, 0.0)
    return PolicyLosses(losses_N + config.dppo_square_penalty * terms.log_ratio_N.square(), dropped_N)


def vespo(terms: PolicyTerms, config: LossSection) -> PolicyLosses:
    """Return -φ(w)·A·log π with φ(w) = exp(λ)·w^k·exp(-λ·w), detached; φ(1) = 1. w = Π r·ρ over the sequence, ρ the
    token's importance weight; k and λ differ for A ≥ 0 and A < 0. Token log-ratios are clamped to ±20 and log w to
    [log 1e-8, 20] (as TRL 1.16 defines it)."""
    log_ratio_N = terms.log_ratio_N.detach().clamp(-VESPO_MAX_LOG, VESPO_MAX_LOG)
    log_rho_N = terms.weight_N.log().clamp(VESPO_MIN_LOG, VESPO_MAX_LOG)
    log_w_S = per_sequence(log_ratio_N + log_rho_N, terms.sequence_N, terms.num_sequences)
    log_w_N = log_w_S.clamp(VESPO_MIN_LOG, VESPO_MAX_LOG)[terms.sequence_N]
    positive_N = terms.advantages_N >= 0
    k_N = _by_sign(positive_N, config.vespo_k_pos, config.vespo_k_neg, log_w_N)
    lambda_N = _by_sign(positive_N, config.vespo_lambda_pos, config.vespo_lambda_neg, log_w_N)
    phi_N = (lambda_N + k_N * log_w_N - lambda_N * log_w_N.exp()).exp()
    losses_N = -phi_N * terms.advantages_N * terms.current_N
    return PolicyLosses(losses_N, torch.zeros_like(losses_N, dtype=torch.bool))


def _by_sign(positive_N: Tensor, positive: float, other: float, like_N: Tensor) -> Tensor:
    """Return [N] `positive` where `positive_N`, else `other`, in `like_N`'s type; `torch.where` rounds to float32."""
    return torch.where(positive_N, torch.full_like(like_N, positive), torch.full_like(like_N, other))
