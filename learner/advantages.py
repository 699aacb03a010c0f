"""Computes the advantages of a whole batch from its rewards, relative to the group or to the batch. If the spec says
so, the KL to the reference is subtracted from the rewards. Also has PPO's mathematics: generalised advantage estimation
and the clipped value loss.

Promise: the result depends only on the global batch, not on how ranks, updates or micro-batches split it; sequences
without a reward stay outside every statistic and get 0. Suffixes: S sequences (of the global batch; in `gae`, of a
micro-batch), F reward functions, N active tokens, T tokens of the longest sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.advantages import TRL_STD_EPSILON, Float64Array, group_advantages, totals
from paceline.learner.collectives import max_over_ranks, sum_over_ranks
from paceline.spec import RunSpec

TOKEN_WHITENED = ("reinforce_pp", "reinforce_pp_baseline")
MIN_VARIANCE = 1e-8


@dataclass(frozen=True)
class ScoredBatch:
    """Holds the rewards of the global batch."""

    group_ids_S: npt.NDArray[np.int64]
    rewards_SF: Float64Array
    """[S, F] rewards; NaN if the function returned None."""
    penalties_S: Float64Array
    """[S] β · the sum of the sequence's KL estimates, in units of the reward. 0 if the reward has no KL."""


def batch_advantages(batch: ScoredBatch, spec: RunSpec, step: int = 0) -> Float64Array:
    """Return the [S] advantages before clipping. For REINFORCE++, return instead the base of each sequence that
    `whitened_token_advantages` reads; NaN for a sequence without a reward. Gates are applied to the rewards first. The
    weight of each reward function is its weight at step `step`.

    - group presets: as `advantages` computes them, from reward - β·ΣKL (RLOO in TRL).
    - `trl_batch`: (r - group mean) / (std of the batch's r + 1e-4) (TRL's `scale_rewards="batch"`, Liu et al. 2025,
      arXiv 2508.08221).
    - `gdpo`: z_f = (r_f - group mean) / (group std + 1e-4) for each function; Σ_f weight_f·z_f is divided by its std
      over the batch + 1e-4 (arXiv 2601.05242; TRL's `normalize_then_sum` also subtracts the batch's mean, which is 0).
    - `reinforce_pp`: r. `reinforce_pp_baseline`: r - group mean (Hu et al. 2025, arXiv 2501.03262).
    """
    name = spec.grpo.advantage
    totals_S = totals(batch.rewards_SF, spec.rewards, step)
    if name == "reinforce_pp":
        return totals_S
    in_reward = batch.penalties_S.any() and name != "reinforce_pp_baseline"  # that one subtracts the KL of each token
    advantages_S = np.zeros_like(totals_S)
    for group_id in np.unique(batch.group_ids_S):
        of_group_S = batch.group_ids_S == group_id
        penalties_C = batch.penalties_S[of_group_S] if in_reward else None
        advantages_S[of_group_S] = group_advantages(batch.rewards_SF[of_group_S], spec, step, penalties_C)
    if name == "reinforce_pp_baseline":
        return np.where(np.isnan(totals_S), np.nan, advantages_S)
    if name == "trl_batch":
        advantages_S /= _sample_std(totals_S - batch.penalties_S) + TRL_STD_EPSILON
    if name == "gdpo":
        advantages_S /= _sample_std(advantages_S[~np.isnan(totals_S)]) + TRL_STD_EPSILON
    # A KL that is not a number must stop the step, not be taken for a missing reward.
    return np.where(np.isfinite(batch.penalties_S), advantages_S, np.nan)


def whitened_token_advantages(
    bases: list[Tensor], penalties: list[Tensor | None], sequences: list[Tensor], device: torch.device
) -> list[Tensor]:
    """Return REINFORCE++'s A_t = base - Σ_{i≥t} penalty_i, whitened over all tokens of the global batch.

    Args:
        bases: one [N] per micro-batch of this rank; NaN for tokens of sequences without a reward, which get 0.
        penalties: [N] β·KL of each token, or None.
        sequences: [N] index of the token's sequence; a sequence's tokens are neighbours.
    """
    raw = [
        base_N if penalty_N is None else base_N - _sums_to_the_end(penalty_N, sequence_N)
        for base_N, penalty_N, sequence_N in zip(bases, penalties, sequences, strict=True)
    ]
    return whitened(raw, [~base_N.isnan() for base_N in bases], device)


def whitened(raw: list[Tensor], scored: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return (A - mean) / √max(variance, 1e-8). Mean and variance are taken over the scored tokens of the global batch;
    the divisor of the variance is the number of these tokens (OpenRLHF). The result is 0 for tokens that are not
    scored, and for all tokens if all values are equal.

    Args:
        raw: one [N] per micro-batch of this rank.
        scored: [N] False if there is no reward.
    """
    values = [raw_N.double()[scored_N] for raw_N, scored_N in zip(raw, scored, strict=True)]
    count, total = sum_over_ranks(
        torch.stack([_moments(values, device, 0.0, power=0), _moments(values, device, 0.0, power=1)])
    ).tolist()
    mean = total / max(count, 1.0)
    # The mean of equal values is rounded, so it may differ from them.
    if math.isfinite(total) and _are_equal(values, device):
        return [torch.zeros_like(raw_N) for raw_N in raw]
    squares = sum_over_ranks(_moments(values, device, mean, power=2)).item()
    std = math.sqrt(max(squares / max(count, 1.0), MIN_VARIANCE))
    return [
        torch.where(scored_N, (raw_N.double() - mean) / std, 0.0).to(raw_N.dtype)
        for raw_N, scored_N in zip(raw, scored, strict=True)
    ]


def _sample_std(values_S: Float64Array) -> float:
    valid_S = values_S[~np.isnan(values_S)]
    return float(valid_S.std(ddof=1)) if len(valid_S) > 1 else 0.0


def _are_equal(values: list[Tensor], device: torch.device) -> bool:
    ends = [torch.stack((value_N.max(), (-value_N).max())) for value_N in values if len(value_N)]
    none = torch.full((2,), -math.inf, dtype=torch.float64, device=device)
    high, minus_low = max_over_ranks(torch.stack([none, *ends]).amax(dim=0)).tolist()
    return bool(high <= -minus_low)


def _moments(values: list[Tensor], device: torch.device, mean: float, power: int) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    for value_N in values:
        total = total + (value_N - mean).pow(power).sum()
    return total


def _sums_to_the_end(values_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Return [N]: the sum of the values from each token to the end of its sequence."""
    backwards_N = values_N.double().flip(0).cumsum(0).flip(0)
    # The cumulative sum right after the sequence's last token belongs to later sequences.
    ends_N = torch.searchsorted(sequence_N, sequence_N, right=True)
    padded = torch.cat((backwards_N, backwards_N.new_zeros(1)))
    return (backwards_N - padded[ends_N]).to(values_N.dtype)


def gae(
    rewards_N: Float64Array,
    values_N: Float64Array,
    final_values_S: Float64Array,
    lengths_S: npt.NDArray[np.int64],
    gamma: float,
    lam: float,
) -> tuple[Float64Array, Float64Array]:
    """Return ([N] advantages, [N] returns = advantages + values).

    δ_t = r_t + γ·V(s_{t+1}) - V(s_t), A_t = δ_t + γλ·A_{t+1} within a sequence (Schulman et al. 2016, arXiv
    1506.02438).

    Args:
        values_N: V of the state before each token.
        final_values_S: V of the state after the last token: 0 if the sequence ended, the value model's if it was
            truncated (Pardo et al. 2018, arXiv 1712.00378).
        lengths_S: tokens of each sequence, at least 1.
    """
    longest = int(lengths_S.max(initial=0))
    inside_ST = np.arange(longest) < lengths_S[:, None]
    rewards_ST, values_ST, advantages_ST = (np.zeros(inside_ST.shape) for _ in range(3))
    rewards_ST[inside_ST], values_ST[inside_ST] = rewards_N, values_N
    ahead_S, next_values_S = np.zeros(len(lengths_S)), final_values_S.astype(np.float64)
    for t in reversed(range(longest)):
        inside_S = inside_ST[:, t]
        delta_S = rewards_ST[:, t] + gamma * next_values_S - values_ST[:, t]
        ahead_S = np.where(inside_S, delta_S + gamma * lam * ahead_S, 0.0)
        next_values_S = np.where(inside_S, values_ST[:, t], next_values_S)
        advantages_ST[:, t] = ahead_S
    advantages_N = advantages_ST[inside_ST]
    return advantages_N, advantages_N + values_N


def value_losses(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, cliprange: float | None
) -> tuple[Tensor, Tensor]:
    """Return ([N] ½·max((V - R)², (clip(V, V_old - ε, V_old + ε) - R)²), [N] True if the bound removed the gradient):
    PPO's value loss with clipping (Schulman et al. 2017's code; TRL, NeMo RL); without a bound ½(V - R)²."""
    squares_N = (values_N - returns_N).square()
    if cliprange is None:
        return squares_N / 2, torch.zeros_like(squares_N, dtype=torch.bool)
    bounded_N = torch.maximum(torch.minimum(values_N, old_values_N + cliprange), old_values_N - cliprange)
    bounded_squares_N = (bounded_N - returns_N).square()
    return torch.maximum(squares_N, bounded_squares_N) / 2, bounded_squares_N > squares_N
