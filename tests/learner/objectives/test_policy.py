"""Losses and metrics against closed forms, in value and gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.learner.objectives.base import Denominators, TokenArrays, metrics_from_sums
from paceline.learner.objectives.policy import kl_to_reference, policy_loss
from paceline.spec import LossSection

ONE_TOKEN = Denominators(tokens=1, sequences=1, max_completion_tokens=4, micro_batches=1)


def logs(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def one_token(current: float, behaviour: float, advantage: float, **more: Tensor) -> TokenArrays:
    return TokenArrays(
        current_N=logs(current).requires_grad_(),
        entropy_N=torch.tensor([0.7]),
        lengths_N=torch.ones(1),
        sequence_N=torch.zeros(1, dtype=torch.int64),
        num_sequences=1,
        behaviour_N=logs(behaviour),
        advantages_N=torch.tensor([advantage], dtype=torch.float64),
        **more,
    )


def value_and_slope(tokens: TokenArrays, **config: Any) -> tuple[float, float]:
    result = policy_loss(tokens, ONE_TOKEN, LossSection(**config))
    (grad_N,) = torch.autograd.grad(result.loss, tokens.current_N)
    return result.loss.item(), grad_N.item()


@pytest.mark.parametrize(("cap", "rho"), [(2.0, 1.5), (1.25, 1.25), (None, 1.0)])
def test_one_update_is_the_truncated_policy_gradient(cap: float | None, rho: float) -> None:
    # π/μ = 0.6/0.4 = 1.5; r = 1, so loss = -ρ·A and its slope in log π is the same.
    got = value_and_slope(one_token(0.6, 0.4, 2.0), truncated_importance_sampling_ratio=cap)
    assert got == pytest.approx((-2 * rho, -2 * rho))


@pytest.mark.parametrize(
    ("current", "advantage", "value", "slope"),
    [
        (0.55, 1.0, -1.1, -1.1),  # r = 1.1, inside
        (0.7, 1.0, -1.28, 0.0),  # r = 1.4 above 1.28: clipped
        (0.7, -1.0, 1.4, 1.4),  # the pessimistic side is not clipped
        (0.3, -1.0, 0.8, 0.0),  # r = 0.6 below 0.8: clipped
        (0.3, 1.0, -0.6, -0.6),
    ],
)
def test_clip_of_the_ratio_to_the_proximal_policy(current: float, advantage: float, value: float, slope: float) -> None:
    tokens = one_token(current, 0.5, advantage, proximal_N=logs(0.5))
    got = value_and_slope(tokens, ratio_clip_min=0.2, ratio_clip_max=0.28)
    assert got == pytest.approx((value, slope), abs=1e-6)


def test_the_importance_weight_is_proximal_over_behaviour_and_outside_the_clip() -> None:
    tokens = one_token(0.7, 0.4, 1.0, proximal_N=logs(0.5))  # r = 1.4 → 1.2, ρ = 1.25
    assert value_and_slope(tokens) == pytest.approx((-1.5, 0.0), abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [
        # Δ = log(0.25/0.5) = -log 2. With one update r = 1 in value and dr/dlog π = 1.
        ("k2", math.log(2) ** 2 / 2, math.log(2)),
        # k3 = e^Δ - Δ - 1 = 0.5 + log 2 - 1; slope k3 + (1 - e^Δ) = log 2: that of the reverse KL.
        ("k3", math.log(2) - 0.5, math.log(2)),
    ],
)
def test_kl_penalty(kind: str, value: float, slope: float) -> None:
    tokens = one_token(0.5, 0.5, 0.0, reference_N=logs(0.25))
    got = value_and_slope(tokens, reference_policy_kl_penalty=0.1, reference_policy_kl_type=kind)
    assert got == pytest.approx((0.1 * value, 0.1 * slope))


def test_kl_estimators_agree_with_the_divergence_in_expectation() -> None:
    p_V, ref_V = logs(0.2, 0.3, 0.5), logs(0.4, 0.4, 0.2)
    divergence = (p_V.exp() * (p_V - ref_V)).sum()
    for kind in ("k1", "k3"):
        estimates_V = kl_to_reference(p_V, ref_V, torch.ones_like(p_V), kind)
        torch.testing.assert_close((p_V.exp() * estimates_V).sum(), divergence)


def test_expected_gradient_of_k2_and_k3_is_that_of_the_reverse_kl() -> None:
    logits_V = torch.tensor([0.1, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    ref_V = logs(0.4, 0.4, 0.2)
    p_V = logits_V.log_softmax(-1)
    (expected_V,) = torch.autograd.grad((p_V.exp() * (p_V - ref_V)).sum(), logits_V, retain_graph=True)
    for kind in ("k2", "k3"):
        ratio_V = (p_V - p_V.detach()).exp()
        sampled = (p_V.exp().detach() * kl_to_reference(p_V, ref_V, ratio_V, kind)).sum()
        (got_V,) = torch.autograd.grad(sampled, logits_V, retain_graph=True)
        torch.testing.assert_close(got_V, expected_V)


def test_metrics_by_hand() -> None:
    # π/μ = 2, 1 in the first sequence and 1/2 in the second.
    tokens = TokenArrays(
        current_N=logs(0.5, 0.5, 0.25),
        entropy_N=torch.tensor([1.0, 2.0, 3.0]),
        lengths_N=torch.tensor([2.0, 2.0, 1.0]),
        sequence_N=torch.tensor([0, 0, 1]),
        num_sequences=2,
        behaviour_N=logs(0.25, 0.5, 0.5),
        advantages_N=torch.ones(3, dtype=torch.float64),
    )
    counts = Denominators(tokens=3, sequences=2, max_completion_tokens=8, micro_batches=1)
    result = policy_loss(tokens, counts, LossSection(truncated_importance_sampling_ratio=1.5))
    metrics = metrics_from_sums({name: float(value) for name, value in result.sums.items()})
    assert metrics == pytest.approx(
        {
            "entropy": 2.0,
            "logprob": -4 * math.log(2) / 3,
            "ratio_behaviour": 3.5 / 3,
            "kl_behaviour": (1 - math.log(2) + 0 - 0.5 + math.log(2)) / 3,
            "clip_fraction": 0.0,
            "truncation_fraction": 1 / 3,
            "drop_fraction": 0.0,
            "effective_sample_size": 3.5**2 / (3 * 5.25),
            "effective_sample_size_sequence": 2.5**2 / (2 * 4.25),
        },
        abs=1e-6,
    )
    assert result.sums["loss"].item() == pytest.approx(-(1.5 + 1 + 0.5) / 3)


def test_a_sampler_that_calls_its_token_impossible_is_truncated() -> None:
    value, slope = value_and_slope(one_token(0.5, 0.0, 1.0), truncated_importance_sampling_ratio=2.0)
    assert (value, slope) == (-2.0, -2.0)


def test_the_policy_loss_asks_for_what_it_needs() -> None:
    tokens = TokenArrays(logs(0.5), torch.zeros(1), torch.ones(1), torch.zeros(1, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match="behaviour"):
        policy_loss(tokens, ONE_TOKEN, LossSection())
