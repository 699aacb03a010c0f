"""ORPO's loss against its closed form, from certain to impossible completions."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from preference_data import (
    BETA,
    log_sigmoid,
    sigmoid,
    sums_of,
)
from ragged_batch import f64
from tiny_policy import CPU, make_judged_batch, make_spec

from paceline.learner.objectives.orpo import orpo_loss
from paceline.learner.step.trainer import Trainer


def test_orpo() -> None:
    chosen, rejected = 0.5, 0.2  # probabilities: odds 1 and 1/4, log odds ratio log 4
    mean_chosen_P, mean_rejected_P = f64([math.log(chosen)]), f64([math.log(rejected)])
    mean_chosen_P.requires_grad_()
    mean_rejected_P.requires_grad_()
    loss = orpo_loss(mean_chosen_P, mean_rejected_P, f64([0.5]), beta=BETA)
    grads = torch.autograd.grad(loss, (mean_chosen_P, mean_rejected_P))
    # σ(log 4) = 4/5; ∂ log odds/∂ log p = 1/(1-p).
    assert loss.item() == pytest.approx(-BETA * math.log(0.8) / 2)
    assert grads[0].item() == pytest.approx(-BETA * 0.2 / (1 - chosen) / 2)
    assert grads[1].item() == pytest.approx(BETA * 0.2 / (1 - rejected) / 2)


def test_orpo_on_pairs_from_certain_to_impossible() -> None:
    chosen = [-1e-3, -0.5, -3.0, -60.0]
    rejected = [-60.0, -0.5, -1e-3, -2.0]
    weights = [0.25, 0.25, 1 / 6, 1 / 3]
    chosen_P, rejected_P = f64(chosen).requires_grad_(), f64(rejected).requires_grad_()
    loss = orpo_loss(chosen_P, rejected_P, f64(weights), beta=BETA)
    chosen_grad, rejected_grad = torch.autograd.grad(loss, (chosen_P, rejected_P))

    def log_odds(x: float) -> float:
        return x - math.log(-math.expm1(x))

    gaps = [log_odds(c) - log_odds(r) for c, r in zip(chosen, rejected, strict=True)]
    value = -BETA * math.fsum(w * log_sigmoid(gap) for w, gap in zip(weights, gaps, strict=True))
    assert loss.item() == pytest.approx(value, rel=1e-9)
    # ∂ log odds/∂ log p = 1/(1 - p); ∂(-log σ)/∂ gap = -σ(-gap).
    pulls = [BETA * w * sigmoid(-gap) for w, gap in zip(weights, gaps, strict=True)]
    assert chosen_grad.tolist() == pytest.approx(
        [-p / -math.expm1(c) for p, c in zip(pulls, chosen, strict=True)], rel=1e-8, abs=1e-12
    )
    assert rejected_grad.tolist() == pytest.approx(
        [p / -math.expm1(r) for p, r in zip(pulls, rejected, strict=True)], rel=1e-8, abs=1e-12
    )


@pytest.mark.parametrize("log_p", [0.0, -1e-9, -1e-3, -0.6931, -0.694, -50.0, -1000.0])
def test_orpo_stays_finite_at_both_ends(log_p: float) -> None:
    mean_P = torch.tensor([log_p], requires_grad=True)
    loss = orpo_loss(mean_P, torch.tensor([-1.0]), torch.ones(1), beta=BETA)
    (grad_P,) = torch.autograd.grad(loss, mean_P)
    assert loss.isfinite()
    assert grad_P.isfinite()


def test_orpo_is_its_formula_on_completions(model: Path) -> None:
    batch = make_judged_batch("orpo")
    metrics = Trainer(make_spec(model, "orpo", sections={"orpo": {"odds_ratio_weight": 0.5}}), CPU).evaluate(batch)
    means = [total / len(s.completion_ids) for total, s in zip(sums_of(model, batch), batch, strict=True)]
    odds = [mean - math.log1p(-math.exp(mean)) for mean in means]
    pairs = [(0, 1, 1 / 8), (0, 2, 1 / 8), (3, 4, 1 / 4), (5, 6, 1 / 4), (7, 8, 1 / 4)]
    term = sum(-0.5 * w * log_sigmoid(odds[c] - odds[r]) for c, r, w in pairs)
    assert metrics["preference_loss"] == pytest.approx(term, rel=1e-4)
    assert metrics["loss"] == pytest.approx(term - sum(means[p] for p in (0, 3, 5, 7)) / 4, rel=1e-4)
