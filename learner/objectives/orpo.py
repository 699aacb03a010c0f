"""`orpo`: odds-ratio preference optimisation, without a reference. Suffixes: S sequences, P pairs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.learner.batch.samples import PackedBatch
from paceline.learner.objectives.base import (
    Denominators,
    LossResult,
    TokenArrays,
    completion_lengths,
    completion_result,
    completion_sums,
    token_sums,
)
from paceline.learner.objectives.pairs import PairObjective, pair_sums, pairs_of
from paceline.spec import RunSpec


class Orpo(PairObjective):
    """ORPO; the reward of a completion is β · its mean log π."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec.data)
        self._beta = spec.orpo.odds_ratio_weight

    def loss(self, tokens: TokenArrays, packed: PackedBatch, counts: Denominators) -> LossResult:
        """Return the mean over prompts of the chosen completion's mean -log π per token, plus the odds-ratio term."""
        pairs = pairs_of(packed, counts.prompts)
        means_S = completion_sums(tokens.current_N, tokens) / completion_lengths(tokens)
        likelihood = -(pairs.weights_P * means_S[pairs.chosen_P]).sum()
        odds = orpo_loss(means_S[pairs.chosen_P], means_S[pairs.rejected_P], pairs.weights_P, beta=self._beta)
        sums = {"sft_loss": likelihood.detach().double(), "preference_loss": odds.detach().double()}
        rewards_S = self._beta * means_S.detach()
        sums |= {**token_sums(tokens), **pair_sums(rewards_S, pairs, counts)}
        return completion_result(likelihood + odds, sums, tokens, means_S)


def orpo_loss(mean_chosen_P: Tensor, mean_rejected_P: Tensor, weights_P: Tensor, *, beta: float) -> Tensor:
    """Return Σ weight · [-β·log σ(log odds(chosen) - log odds(rejected))] (Hong et al. 2024), odds(p) = p/(1-p). The
    means are those of log π over the completion's tokens and below 0; p is the exponential of such a mean. `weights_P`:
    shares in the mean."""
    log_odds_P = mean_chosen_P - mean_rejected_P - (_log1mexp(mean_chosen_P) - _log1mexp(mean_rejected_P))
    return -beta * (weights_P * F.logsigmoid(log_odds_P)).sum()


def _log1mexp(log_p: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x < 0, accurate at both ends (Mächler 2012); x is clamped below -1e-7."""
    log_p = log_p.clamp(max=-1e-7)
    near_zero = log_p > -0.6931471805599453
    # Each branch gets an argument that is safe for it; otherwise its unused gradient would be NaN.
    small = torch.log(-torch.expm1(torch.where(near_zero, log_p, -torch.ones_like(log_p))))
    large = torch.log1p(-torch.exp(torch.where(near_zero, -torch.ones_like(log_p), log_p)))
    return torch.where(near_zero, small, large)
