"""Every policy objective against its closed form, in value and in the gradient at each token, on a ragged batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from ragged_batch import (
    ADVANTAGE,
    COUNTS,
    CURRENT,
    LENGTHS,
    LOG_R,
    LOG_RHO,
    SEQUENCE,
    SHORT_LOG_R,
    TOKENS,
    B,
    batch,
    check,
    clip_form,
    f64,
    solve,
)

from paceline.learner.objectives.base import Denominators, TokenArrays
from paceline.learner.objectives.policy import policy_loss
from paceline.spec import LossSection

Form = Callable[[float, float, float], tuple[float, float]]
"""(log r, A, log π) → (value, slope in log π)."""


def sapo_form(log_r: float, advantage: float, _: float) -> tuple[float, float]:
    temperature = 1.0 if advantage > 0 else 1.05
    # σ(x) for x very negative, without overflow: 1/(1 + e^-x).
    x = temperature * (math.exp(log_r) - 1)
    sigmoid = 1 / (1 + math.exp(-x)) if x > -700 else 0.0
    value = -4 / temperature * sigmoid * advantage
    return value, -4 * sigmoid * (1 - sigmoid) * math.exp(log_r) * advantage


def cispo_form(log_r: float, advantage: float, current: float) -> tuple[float, float]:
    bounded = min(max(math.exp(log_r), 0.0), 5.0)
    return -bounded * advantage * current, -bounded * advantage


TOKEN_FORMS: dict[str, tuple[dict[str, Any], Form]] = {
    "clip": (
        {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28},
        lambda log_r, advantage, _: clip_form(math.exp(log_r), advantage, 0.8, 1.28),
    ),
    "unclipped": (
        {"policy_loss": "unclipped"},
        lambda log_r, advantage, _: (-math.exp(log_r) * advantage,) * 2,
    ),
    "cispo": ({"preset": "cispo"}, cispo_form),
    "sapo": ({"policy_loss": "sapo"}, sapo_form),
}


@pytest.mark.parametrize("name", TOKEN_FORMS)
@pytest.mark.parametrize(
    ("reduction", "weights"),
    [
        ("grpo", [1 / (B * LENGTHS[s]) for s in SEQUENCE]),
        ("dapo", [1 / TOKENS] * TOKENS),
        ("dr_grpo", [1 / (B * 8)] * TOKENS),
        ("bnpo", [1 / TOKENS] * TOKENS),
        ("sequence_sum", [1 / B] * TOKENS),
    ],
)
def test_objectives_of_token_ratios(name: str, reduction: str, weights: list[float]) -> None:
    config, form = TOKEN_FORMS[name]
    forms = [form(*token) for token in zip(LOG_R, ADVANTAGE, CURRENT, strict=True)]
    # ρ capped at 2 multiplies value and slope: e^1.2 is above it.
    rho = [min(math.exp(x), 2.0) for x in LOG_RHO]
    values = [w * rho_t * value for w, rho_t, (value, _) in zip(weights, rho, forms, strict=True)]
    slopes = [w * rho_t * slope for w, rho_t, (_, slope) in zip(weights, rho, forms, strict=True)]
    check(batch(), values, slopes, **{**config, "reduction": reduction})


def test_dual_clip_bounds_what_a_bad_token_can_do() -> None:
    # Token 3: A = -0.7, r = e^0.9 = 2.46 > c = 2: the loss is c·0.7, without slope. Only the bad sequence differs.
    plain = [clip_form(math.exp(x), a, 0.8, 1.2) for x, a in zip(LOG_R, ADVANTAGE, strict=True)]
    forms = [*plain[:3], (1.4, 0.0), *plain[4:]]
    result = check(
        batch(),
        [value / TOKENS for value, _ in forms],
        [slope / TOKENS for _, slope in forms],
        ratio_clip_c=2.0,
        truncated_importance_sampling_ratio=None,
    )
    # Clipped: tokens 1 and 2 (good, too high), 4 (bad, too low), 3 (dual).
    assert result.sums["clipped"].item() == 4


def test_the_ratio_may_be_anchored_at_the_sampler() -> None:
    log_r = [r + rho for r, rho in zip(LOG_R, LOG_RHO, strict=True)]
    forms = [clip_form(math.exp(x), a, 0.8, 1.2) for x, a in zip(log_r, ADVANTAGE, strict=True)]
    check(
        batch(),
        [value / TOKENS for value, _ in forms],
        [slope / TOKENS for _, slope in forms],
        ratio_anchor="behaviour",
        truncated_importance_sampling_ratio=None,
    )


def test_dppo() -> None:
    log_r = [0.3, 0.6, -0.1, 0.9, -3.0, 0.2]
    # π - μ = π·(1 - 1/r): token 0: 0.6703·0.2592 = 0.174; 1: 0.3679·0.4512 = 0.166; 4 (bad): 0.0498·(1 - e^3) = -0.950,
    # so it alone is dropped; 3 (bad) rose, which is never dropped.
    kept = [1, 1, 1, 1, 0, 1]
    values = [(-k * math.exp(x) * a + 1e-3 * x * x) / TOKENS for k, x, a in zip(kept, log_r, ADVANTAGE, strict=True)]
    slopes = [(-k * math.exp(x) * a + 2e-3 * x) / TOKENS for k, x, a in zip(kept, log_r, ADVANTAGE, strict=True)]
    result = check(batch(log_r, [0.0] * TOKENS), values, slopes, preset="dppo")
    assert result.sums["clipped"].item() == 1


def test_dppo_drops_a_good_token_that_rose_too_far() -> None:
    # Token 0: π = 0.6703, r = e^0.4: π - μ = 0.2210 > 0.2.
    log_r = [0.4, 0.0, 0.0, 0.0, 0.0, 0.0]
    _, grads = solve(batch(log_r, [0.0] * TOKENS), preset="dppo")
    assert grads[0] == pytest.approx(2e-3 * 0.4 / TOKENS)


@pytest.mark.parametrize(
    ("preset", "low", "high"),
    [("gspo", 1 - 3e-4, 1 + 4e-4), ("luspo", 1 - 2e-3, 1 + 2.5e-3), ("rloo", 0.8, 1.2)],
)
@pytest.mark.parametrize("bounds", ["as published", "wide"])
def test_objectives_of_sequence_ratios(preset: str, low: float, high: float, bounds: str) -> None:
    config: dict[str, Any] = {"truncated_importance_sampling_ratio": None}
    if bounds == "wide":
        low, high = 0.5, 1.5
        config |= {"ratio_clip_min": 0.5, "ratio_clip_max": 0.5}
    values, slopes = [], []
    for length, total, advantage in zip(LENGTHS, [0.15, -0.2, 0.2], [1.5, -0.7, 0.0], strict=True):
        log_s = total if preset == "rloo" else total / length
        value, slope = clip_form(math.exp(log_s), advantage, low, high)
        # GSPO: f(s)/B with ∂ log s/∂ log π_t = 1/T. LUSPO: T times that. RLOO: f(R)/B with ∂ log R/∂ log π_t = 1.
        values.append((length if preset == "luspo" else 1) * value / B)
        slopes += [slope / B / (length if preset == "gspo" else 1)] * length
    check(batch(SHORT_LOG_R, [0.0] * TOKENS), values, slopes, preset=preset, **config)


def phi(w: float, advantage: float) -> float:
    k, decay = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
    return math.exp(decay) * w**k * math.exp(-decay * w)


@pytest.mark.parametrize("cap", [2.0, None])
def test_vespo(cap: float | None) -> None:
    assert phi(1.0, 1.0) == pytest.approx(1.0)
    rho = [1.0 if cap is None else min(math.exp(x), cap) for x in LOG_RHO]
    values, slopes = [], []
    for s, advantage in enumerate([1.5, -0.7, 0.0]):
        tokens = [t for t in range(TOKENS) if SEQUENCE[t] == s]
        w = math.prod(math.exp(SHORT_LOG_R[t]) * rho[t] for t in tokens)
        values += [-phi(w, advantage) * advantage * CURRENT[t] / TOKENS for t in tokens]
        slopes += [-phi(w, advantage) * advantage / TOKENS for _ in tokens]
    check(batch(SHORT_LOG_R), values, slopes, preset="vespo", truncated_importance_sampling_ratio=cap)


def test_vespo_lets_an_impossible_sequence_go() -> None:
    tokens = batch([60.0] * TOKENS, [60.0] * TOKENS)
    result, grads = solve(tokens, preset="vespo")
    assert result.loss.item() == 0
    assert grads == [0.0] * TOKENS


def test_m2po_drops_what_is_above_the_limit_of_the_batch() -> None:
    # (log ρ)² = 0.01, 1.44, 0.16, 0.09, 36, 0.
    tokens = replace(batch(SHORT_LOG_R), m2_limit=0.17)
    log_r = [r + rho for r, rho in zip(SHORT_LOG_R, LOG_RHO, strict=True)]
    kept = [1, 0, 1, 1, 0, 1]
    slopes = [-k * math.exp(x) * a / TOKENS for k, x, a in zip(kept, log_r, ADVANTAGE, strict=True)]
    result = check(tokens, slopes, slopes, preset="m2po")
    assert result.sums["dropped"].item() == 2


def test_log_linear_proximal_policy() -> None:
    # log π - log μ = 0.6 at age 2: α = 2/3, so log r = 0.6 - 0.4 and log ρ = 0.4; at age 0 π_prox = μ.
    tokens = TokenArrays(
        current_N=f64([-0.5, -0.5]).requires_grad_(),
        entropy_N=torch.zeros(2),
        lengths_N=f64([2, 2]),
        sequence_N=torch.zeros(2, dtype=torch.int64),
        num_sequences=1,
        behaviour_N=f64([-1.1, -1.1]),
        advantages_N=f64([1.0, 1.0]),
        ages_N=f64([2.0, 0.0]),
    )
    config = LossSection(proximal_policy="log_linear", ratio_clip_max=1.0)
    result = policy_loss(tokens, Denominators(2, 1, 8, 1), config)
    (grad_N,) = torch.autograd.grad(result.loss, tokens.current_N)
    # r = e^0.2 times ρ = e^0.4, and r = e^0.6 times ρ = 1: both e^0.6.
    assert result.loss.item() == pytest.approx(-math.exp(0.6))
    assert grad_N.tolist() == pytest.approx([-math.exp(0.6) / 2] * 2)
    # The clip sees r alone.
    tight = LossSection(proximal_policy="log_linear", ratio_clip_max=0.5)
    losses_N = policy_loss(tokens, Denominators(2, 1, 8, 1), tight).token_losses_N
    assert losses_N.tolist() == pytest.approx([-math.exp(0.6), -1.5])


def test_log_linear_needs_ages() -> None:
    with pytest.raises(ValueError, match="ages"):
        policy_loss(batch(), COUNTS, LossSection(proximal_policy="log_linear"))


def test_no_token_at_all_is_a_loss_of_zero() -> None:
    empty = torch.zeros(0, requires_grad=True)
    for preset in ("grpo", "gspo", "rloo", "vespo", "cispo", "sapo", "dppo", "bnpo", "luspo"):
        tokens = TokenArrays(empty, empty, empty, torch.zeros(0, dtype=torch.int64), 0, empty, empty, None, empty)
        result = policy_loss(tokens, Denominators(0, 3, 8, 0), LossSection(preset=preset))
        assert result.loss.item() == 0
