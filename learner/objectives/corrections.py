"""Ratios of policies, and the corrections for the sampler's age: weights and masks from log ρ = log π_prox - log μ.

Promise: for any log-probabilities, even infinite ones, no ratio is infinite, and no gradient is NaN if a bound or a
mask drops the token; weights and masks are detached. All arrays are flat over the N active tokens of a micro-batch; S
stands for its sequences, which are never split over micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from paceline.spec import LossSection

MAX_EXPONENT = 80.0
"""Largest exponent, because exp(80) = 5.5e34 still fits into float32. With infinity, 0 · inf would make NaN gradients.
"""


def bounded_exp(log_N: Tensor) -> Tensor:
    """Return exp with its exponent clipped to ±80."""
    return log_N.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()


def per_sequence(values_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """Return [S] the sums over each sequence's tokens."""
    return values_N.new_zeros(num_sequences).index_add(0, sequence_N, values_N)


def at_level(log_ratio_N: Tensor, level: str, sequence_N: Tensor, lengths_N: Tensor, num_sequences: int) -> Tensor:
    """Return [N] log-ratios unchanged (`token`), or at each token the value of its sequence: the mean over its tokens
    (`sequence`, GSPO: Zheng et al. 2025) or the sum (`sequence_product`, RLOO in TRL)."""
    if level == "token":
        return log_ratio_N
    # Each token is clamped, because inf - inf in a sum would make NaN of a sequence that is only improbable.
    log_ratio_N = log_ratio_N.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    summed_N = per_sequence(log_ratio_N, sequence_N, num_sequences)[sequence_N]
    return summed_N if level == "sequence_product" else summed_N / lengths_N


def log_linear_proximal(current_N: Tensor, behaviour_N: Tensor, ages_N: Tensor) -> Tensor:
    """Return [N] log π_prox without a forward pass: log μ + α·(log π - log μ), detached. α = (v_prox - v_μ)/(v_θ - v_μ)
    in [0, 1]. Step s trains from v_prox = s to v_θ = s + 1, so with age = s - v_μ, α is age/(age + 1): 0 for a token of
    the newest version (A-3PO, arXiv 2512.06547; AReaL's `loglinear`)."""
    ages_N = ages_N.clamp(min=0).to(current_N.dtype)
    return (behaviour_N + ages_N / (ages_N + 1) * (current_N.detach() - behaviour_N)).detach()


def importance_weights(
    log_rho_N: Tensor, sequence_N: Tensor, num_sequences: int, config: LossSection
) -> tuple[Tensor, Tensor]:
    """Return ([N] weights, [N] True if a bound acted), from ρ or its product over the sequence, within [min, max].

    - `tis`: clip(ρ, min, max) (Yao et al. 2025).
    - `icepop`: ρ if it is within, else 0 (Ling team 2025); the token stays in the denominators.
    - `sequence_tis`, `sequence_mask`: the same with Πρ over the sequence (TRL's modes of these names).

    Without truncated_importance_sampling_ratio every weight is 1.
    """
    high, low = config.truncated_importance_sampling_ratio, config.truncated_importance_sampling_ratio_min
    if high is None:
        return torch.ones_like(log_rho_N), torch.zeros_like(log_rho_N, dtype=torch.bool)
    kind = config.truncated_importance_sampling_type
    level = "sequence_product" if kind.startswith("sequence") else "token"
    # only level `sequence` divides by lengths
    rho_N = bounded_exp(at_level(log_rho_N, level, sequence_N, log_rho_N, num_sequences)).detach()
    outside_N = (rho_N < low) | (rho_N > high)
    if kind in ("tis", "sequence_tis"):
        return rho_N.clamp(low, high), outside_N
    return rho_N.masked_fill(outside_N, 0.0), outside_N


def kept_tokens(
    log_rho_N: Tensor,
    behind_N: Tensor,
    advantages_N: Tensor,
    sequence_N: Tensor,
    lengths_N: Tensor,
    num_sequences: int,
    m2_limit: float | None,
    config: LossSection,
) -> Tensor:
    """Return [N] False if a mask drops the token from the policy loss (not from the KL, nor from the denominators).

    - geometric_mask: exp(mean log ρ) of the sequence outside its bounds (SkyRL, NeMo RL).
    - veto: any ρ of the sequence outside its bounds.
    - m2_limit: (log ρ)² above it (M2PO; `m2_limit_of` computes it over the global batch).
    - off_policy_mask_threshold: A < 0 and the mean of log μ - log π above it (DeepSeek-V3.2, equation 9).

    A token whose value is not a number is always kept, because it must stop the step. `behind_N` is log μ - log π, in
    nats.
    """
    keep_N = torch.ones_like(log_rho_N, dtype=torch.bool)
    log_rho_N = log_rho_N.detach()
    if config.geometric_mask is not None:
        geometric_N = bounded_exp(at_level(log_rho_N, "sequence", sequence_N, lengths_N, num_sequences))
        keep_N &= (geometric_N >= config.geometric_mask[0]) & (geometric_N <= config.geometric_mask[1])
    if config.veto is not None:
        rho_N = bounded_exp(log_rho_N)
        outside_N = (rho_N < config.veto[0]) | (rho_N > config.veto[1])
        keep_N &= per_sequence(outside_N.float(), sequence_N, num_sequences)[sequence_N] == 0
    if m2_limit is not None:
        keep_N &= second_moments(log_rho_N) <= m2_limit
    if config.off_policy_mask_threshold is not None:
        mean_N = at_level(behind_N.detach(), "sequence", sequence_N, lengths_N, num_sequences)
        keep_N &= (advantages_N >= 0) | (mean_N <= config.off_policy_mask_threshold)
    return keep_N | log_rho_N.isnan() | behind_N.isnan()


def second_moments(log_rho_N: Tensor) -> Tensor:
    """Return [N] (log ρ)², which M2PO's threshold bounds, in float32; finite for any ρ."""
    return log_rho_N.detach().clamp(-MAX_EXPONENT, MAX_EXPONENT).float().square()


def m2_limit_of(values_N: Tensor, threshold: float, total: Callable[[Tensor], Tensor]) -> float:
    """Return the largest limit such that the mean of the values up to it is at most `threshold`; inf if all may stay.

    M2PO (Zheng et al. 2025, arXiv 2510.01161) drops the largest (log ρ)² until the mean of the rest is within the
    threshold. Equal values stay or go together, so the split over ranks cannot matter. The limit is found by bisecting
    the bit patterns of non-negative float32 numbers, which are in the numbers' order: 32 sums of two floats. `values_N`
    are this rank's float32 values, at least 0; `total` adds tensors up over ranks, in place.
    """

    def mean_up_to(limit: float) -> float:
        within_N = values_N[values_N <= limit].double()
        sums = torch.stack([within_N.sum(), torch.full_like(within_N.sum(), len(within_N))])
        value, count = total(sums).tolist()
        return float(value / max(count, 1.0))

    if mean_up_to(np.inf) <= threshold:
        return float("inf")
    low, high = 0, int(np.float32(np.inf).view(np.int32))
    while high - low > 1:
        middle = (low + high) // 2
        if mean_up_to(float(np.int32(middle).view(np.float32))) <= threshold:
            low = middle
        else:
            high = middle
    return float(np.int32(low).view(np.float32))
