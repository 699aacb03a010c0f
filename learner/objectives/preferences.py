"""Preference and reward-model losses: pure functions from log-probabilities or scores of whole completions.

Promise: each equals the formula in its docstring in value and gradient, and with `weights_P` (pairs) or denominators
counted over the global batch, shares of micro-batches add up to the loss of the batch.

Suffixes: P pairs of a chosen and a rejected completion, S single completions. `log-ratio` is Σ_t log π - log π_ref of a
completion, in nats. `learner.objectives.per_algorithm` makes the arguments from a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

PairLoss = Literal["sigmoid", "conservative", "robust", "hinge", "ipo"]


@dataclass(frozen=True)
class PairLogRatios:
    """P pairs; a prompt with K rejected completions is K pairs of weight 1/K (`pair_weights`)."""

    chosen_P: Tensor
    """log π - log π_ref of the chosen completion, summed over its tokens; with gradient."""
    rejected_P: Tensor
    chosen_lengths_P: Tensor
    """Tokens, as float; only `ipo` and `average` read it."""
    rejected_lengths_P: Tensor
    weights_P: Tensor
    """Share of each pair in the batch's mean; they add up to 1 over the global batch."""


def pair_weights(rejected_per_prompt: list[int]) -> list[float]:
    """One weight per pair, prompt by prompt: 1/(prompts · K) for each of a prompt's K rejected completions.

    A prompt counts once, however many completions it rejects. ValueError for a prompt without any.
    """
    if any(count < 1 for count in rejected_per_prompt):
        raise ValueError(
            f"rejected completions per prompt are {rejected_per_prompt}; each needs at least one"
        )
    return [1 / (len(rejected_per_prompt) * count) for count in rejected_per_prompt for _ in range(count)]


def preference_loss(
    pairs: PairLogRatios,
    kind: PairLoss,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    average: bool = False,
) -> Tensor:
    """Σ weight · loss(d), d = chosen - rejected log-ratio; with `average`, each divided by its length first.

    - `sigmoid`: -log σ(βd) (DPO, Rafailov et al. 2023).
    - `conservative`: -(1-ε)·log σ(βd) - ε·log σ(-βd), ε the chance of a flipped label (Mitchell 2023).
    - `robust`: [-(1-ε)·log σ(βd) + ε·log σ(-βd)] / (1-2ε), unbiased under flips (Chowdhury et al. 2024).
    - `hinge`: max(0, 1 - βd) (SLiC, Zhao et al. 2023).
    - `ipo`: (d̄ - 1/2β)², d̄ from per-token means always (Azar et al. 2023; per token as TRL, with its authors).

    Raises:
        ValueError: label_smoothing outside [0, 0.5), or set for a loss that has none; TRL ignores it there.
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be in [0, 0.5)")
    if label_smoothing and kind not in ("conservative", "robust"):
        raise ValueError(
            f"label_smoothing {label_smoothing} has no meaning for {kind!r}: use conservative or robust"
        )
    chosen_P, rejected_P = pairs.chosen_P, pairs.rejected_P
    if average or kind == "ipo":
        chosen_P = chosen_P / pairs.chosen_lengths_P.clamp(min=1)
        rejected_P = rejected_P / pairs.rejected_lengths_P.clamp(min=1)
    margin_P = beta * (chosen_P - rejected_P)
    won_P, lost_P = F.logsigmoid(margin_P), F.logsigmoid(-margin_P)
    match kind:
        case "sigmoid":
            losses_P = -won_P
        case "conservative":
            losses_P = -(1 - label_smoothing) * won_P - label_smoothing * lost_P
        case "robust":
            losses_P = (-(1 - label_smoothing) * won_P + label_smoothing * lost_P) / (1 - 2 * label_smoothing)
        case "hinge":
            losses_P = torch.relu(1 - margin_P)
        case "ipo":
            losses_P = (chosen_P - rejected_P - 1 / (2 * beta)).square()
        case _:
            raise ValueError(f"unknown preference loss {kind!r}")
    return (pairs.weights_P * losses_P).sum()


def kto_loss(
    log_ratios_S: Tensor,
    desirable_S: Tensor,
    batch_kl: float,
    num_sequences: int,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Mean over the global batch of weight · (1 - σ(±β·(log-ratio - z))), + where desirable (Ethayarajh et al. 2024).

    Args:
        batch_kl: mean log-ratio of mismatched prompts and completions over the global batch; z = max(0, batch_kl) is
            a constant of the loss.
        num_sequences: completions in the global batch.
    """
    sign_S = torch.where(desirable_S, torch.ones_like(log_ratios_S), -torch.ones_like(log_ratios_S))
    weight_S = torch.where(
        desirable_S,
        torch.full_like(log_ratios_S, desirable_weight),
        torch.full_like(log_ratios_S, undesirable_weight),
    )
    # 1 - σ(x) = σ(-x), without the cancellation.
    losses_S = torch.sigmoid(-beta * sign_S * (log_ratios_S - max(batch_kl, 0.0)))
    return (weight_S * losses_S).sum() / num_sequences


def orpo_loss(mean_chosen_P: Tensor, mean_rejected_P: Tensor, weights_P: Tensor, *, beta: float) -> Tensor:
    """Σ weight · [-β·log σ(log odds(chosen) - log odds(rejected))] (Hong et al. 2024), odds(p) = p/(1-p).

    Args:
        mean_chosen_P: mean log π over the completion's tokens, below 0: p is a per-token geometric mean.
        weights_P: share of each pair in the batch's mean (`pair_weights`).
    """
    log_odds_P = mean_chosen_P - mean_rejected_P - (_log1mexp(mean_chosen_P) - _log1mexp(mean_rejected_P))
    return -beta * (weights_P * F.logsigmoid(log_odds_P)).sum()


def reward_model_loss(
    chosen_P: Tensor,
    rejected_P: Tensor,
    weights_P: Tensor,
    *,
    margins_P: Tensor | None = None,
    centring: float = 0.01,
) -> Tensor:
    """Σ weight · [-log σ(r_c - r_r - margin) + centring·(r_c + r_r)²], weights as for the other pairs.

    Bradley and Terry 1952; margins: Touvron et al. 2023 (Llama 2); centring: Eisenstein et al. 2023, so that scores of
    different models are comparable.
    """
    gap_P = chosen_P - rejected_P if margins_P is None else chosen_P - rejected_P - margins_P
    losses_P = -F.logsigmoid(gap_P) + centring * (chosen_P + rejected_P).square()
    return (weights_P * losses_P).sum()


def _log1mexp(log_p: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, accurate at both ends (Mächler 2012); x is held below -1e-7, where float32 ends."""
    log_p = log_p.clamp(max=-1e-7)
    near_zero = log_p > -0.6931471805599453
    # Each branch gets an argument that is safe for it, or its unused gradient would be NaN.
    small = torch.log(-torch.expm1(torch.where(near_zero, log_p, -torch.ones_like(log_p))))
    large = torch.log1p(-torch.exp(torch.where(near_zero, -torch.ones_like(log_p), log_p)))
    return torch.where(near_zero, small, large)
