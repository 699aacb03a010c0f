"""The ragged batch that the objectives are tested on: sequences of 3, 2, 1 and 0 tokens (the empty one counts in B), a good
one, a bad one and one of a group without contrast, with log-ratios from ordinary to e^±30."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.learner.objectives.base import Denominators, LossResult, TokenArrays
from paceline.learner.objectives.policy import policy_loss
from paceline.spec import LossSection

LENGTHS = [3, 2, 1]
SEQUENCE = [0, 0, 0, 1, 1, 2]
ADVANTAGE = [1.5, 1.5, 1.5, -0.7, -0.7, 0.0]
CURRENT = [-0.4, -1.0, -2.0, -0.3, -3.0, -0.9]
LOG_R = [0.05, 0.6, 30.0, 0.9, -30.0, 0.2]
"""log π - log π_prox."""
LOG_RHO = [0.1, 1.2, -0.4, 0.3, -6.0, 0.0]
"""log π_prox - log μ."""
B, TOKENS = 4, 6
COUNTS = Denominators(tokens=TOKENS, sequences=B, max_completion_tokens=8, micro_batches=1)


def f64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def batch(log_r: list[float] = LOG_R, log_rho: list[float] = LOG_RHO) -> TokenArrays:
    current_N = f64(CURRENT)
    return TokenArrays(
        current_N=current_N.clone().requires_grad_(),
        entropy_N=torch.zeros(TOKENS),
        lengths_N=f64([LENGTHS[s] for s in SEQUENCE]),
        sequence_N=torch.tensor(SEQUENCE),
        num_sequences=len(LENGTHS),
        behaviour_N=current_N - f64(log_r) - f64(log_rho),
        proximal_N=current_N - f64(log_r),
        advantages_N=f64(ADVANTAGE),
    )


def solve(tokens: TokenArrays, **config: Any) -> tuple[LossResult, list[float]]:
    result = policy_loss(tokens, COUNTS, LossSection(**config))
    (grad_N,) = torch.autograd.grad(result.loss, tokens.current_N)
    return result, grad_N.tolist()


def check(tokens: TokenArrays, values: list[float], slopes: list[float], **config: Any) -> LossResult:
    result, grads = solve(tokens, **config)
    assert result.loss.item() == pytest.approx(math.fsum(values), rel=1e-9, abs=1e-9)
    assert grads == pytest.approx(slopes, rel=1e-9, abs=1e-9)
    return result


def clip_form(r: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """(value, slope in log r) of -min(rA, clip(r)A), by cases."""
    if advantage > 0 and r > high:
        return -high * advantage, 0.0
    if advantage < 0 and r < low:
        return -low * advantage, 0.0
    return -r * advantage, -r * advantage


SHORT_LOG_R = [0.05, -0.02, 0.12, 0.3, -0.5, 0.2]
"""Without the extremes: sums over sequences are 0.15, -0.2 and 0.2."""


def part_of(tokens: TokenArrays, current_N: Tensor, sequences: list[int]) -> TokenArrays:
    """The micro-batch of some of the sequences, as views of the same leaf."""
    chosen_N = torch.isin(tokens.sequence_N, torch.tensor(sequences))
    fields = {
        name: getattr(tokens, name)[chosen_N]
        for name in ("entropy_N", "lengths_N", "behaviour_N", "proximal_N", "advantages_N", "ages_N")
    }
    places = torch.searchsorted(torch.tensor(sequences), tokens.sequence_N[chosen_N])
    return replace(
        tokens,
        current_N=current_N[chosen_N],
        sequence_N=places,
        num_sequences=len(sequences),
        reference_N=None if tokens.reference_N is None else tokens.reference_N[chosen_N],
        **fields,
    )
