"""A teacher's advantages: the gradient that they estimate, and the loss on a ragged batch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ragged_batch import COUNTS, CURRENT, LOG_RHO, SHORT_LOG_R, TOKENS, batch, f64, part_of
from tiny_policy import CPU, make_batch, make_spec

from paceline.learner.batch.samples import TrainingSample, pack_samples
from paceline.learner.objectives import objective_of
from paceline.learner.objectives.base import Denominators, TokenArrays
from paceline.learner.objectives.distillation import distillation_advantages


@pytest.mark.parametrize("kind", ["reverse", "forward", "mixed"])
def test_distillation_advantages_give_the_kls_gradient_on_average(kind: str) -> None:
    """Over all tokens v at one position, weighted by π(v): Σ_v π(v)·A(v)·∇log π(v) is minus the KL's gradient."""
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.randn(9, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher_V = torch.randn(9, generator=generator, dtype=torch.float64).log_softmax(0)
    current_V = logits_V.log_softmax(0)
    advantages_V = distillation_advantages(current_V, teacher_V, kind, 0.3, max_ratio=1e9)
    surrogate = -(current_V.detach().exp() * advantages_V * current_V).sum()
    reverse = (current_V.exp() * (current_V - teacher_V)).sum()
    forward = (teacher_V.exp() * (teacher_V - current_V)).sum()
    kl = {"reverse": reverse, "forward": forward, "mixed": 0.3 * forward + 0.7 * reverse}[kind]
    (got,) = torch.autograd.grad(surrogate, logits_V, retain_graph=True)
    (want,) = torch.autograd.grad(kl, logits_V)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)


def test_the_forward_ratio_is_bounded() -> None:
    far = distillation_advantages(torch.tensor([-20.0]), torch.tensor([-0.1]), "forward", 0.5, max_ratio=10.0)
    assert far.item() == pytest.approx(9.0)


@pytest.mark.parametrize("kind", ["reverse", "forward", "mixed"])
@pytest.mark.parametrize("parts", [[[0, 1, 2]], [[0, 2], [1]]], ids=["whole", "two micro-batches"])
def test_distillation_on_a_ragged_batch_of_older_samples(kind: str, parts: list[list[int]]) -> None:
    delta = [0.4, -0.7, 3.0, -2.0, 9.0, 0.0]
    """log π_T - log π; e^3 and e^9 are beyond the forward ratio's bound of 10."""
    forward = [min(math.exp(d), 10.0) - 1 for d in delta]
    worth = {
        "reverse": delta,
        "forward": forward,
        "mixed": [0.25 * f + 0.75 * d for f, d in zip(forward, delta, strict=True)],
    }[kind]
    # One update: r = 1, so each token's slope is -min(π/μ, 2)·A over the batch's tokens; the value is the same.
    log_rho = [r + rho for r, rho in zip(SHORT_LOG_R, LOG_RHO, strict=True)]
    slopes = [-min(math.exp(x), 2.0) * a / TOKENS for x, a in zip(log_rho, worth, strict=True)]
    section = {"teacher_model_name": "teacher", "kl_type": kind, "mixed_kl_weight": 0.25}
    objective = objective_of(make_spec(Path("none"), "distillation", sections={"distillation": section}))
    base = replace(
        batch(SHORT_LOG_R),
        reference_N=f64(CURRENT) + f64(delta),
        ages_N=torch.zeros(TOKENS),
    )
    current_N = f64(CURRENT).requires_grad_()
    packed = pack_samples(make_batch()[:1], CPU)  # nothing of it is read
    results = []
    for part in parts:
        tokens = replace(part_of(base, current_N, part), proximal_N=None)
        results.append(objective.loss(tokens, packed, COUNTS))
    loss = torch.stack([result.loss for result in results]).sum()
    (gradient_N,) = torch.autograd.grad(loss, current_N)
    assert loss.item() == pytest.approx(math.fsum(slopes), rel=1e-9)
    assert gradient_N.tolist() == pytest.approx(slopes, rel=1e-9, abs=1e-12)
    kl = sum(result.sums["kl_teacher"].item() for result in results)
    assert kl == pytest.approx(-math.fsum(delta))


def test_distillation_ignores_the_rewards(model: Path) -> None:
    packed = pack_samples(
        [
            TrainingSample(
                1,
                np.array([1, 2], np.int32),
                np.array([3, 4], np.int32),
                np.full(2, -1.0, np.float32),
                versions_T=np.zeros(2, np.int32),
            )
        ],
        CPU,
    )
    sections: dict[str, Any] = {"distillation": {"teacher_model_name": "teacher"}}
    objective = objective_of(make_spec(model, "distillation", sections=sections))
    assert packed.behaviour_N is not None
    tokens = TokenArrays(
        current_N=packed.behaviour_N.clone().requires_grad_(),
        entropy_N=torch.zeros(2),
        lengths_N=packed.lengths_N,
        sequence_N=packed.sequence_N,
        num_sequences=1,
        behaviour_N=packed.behaviour_N,
        reference_N=torch.tensor([-0.5, -2.0]),
        advantages_N=torch.full((2,), 5.0),
    )
    result = objective.loss(tokens, packed, Denominators(2, 1, 16, 1, 1))
    (gradient_N,) = torch.autograd.grad(result.loss, tokens.current_N)
    # -A/2 per token with A = log π_T - log π: 0.5 and -1.
    assert gradient_N.tolist() == pytest.approx([-0.25, 0.5])
    assert result.sums["kl_teacher"].item() == pytest.approx(0.5)
