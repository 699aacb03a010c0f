"""Weights, masks, KL and entropy against their closed forms, and the promises of every objective: gradients stay
finite, no mask hides NaN, and shares of micro-batches add up."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from ragged_batch import (
    ADVANTAGE,
    COUNTS,
    CURRENT,
    LENGTHS,
    SEQUENCE,
    SHORT_LOG_R,
    TOKENS,
    B,
    batch,
    check,
    clip_form,
    f64,
    part_of,
    solve,
)

from paceline.learner.objectives.base import Denominators, TokenArrays
from paceline.learner.objectives.corrections import m2_limit_of
from paceline.learner.objectives.policy import policy_loss
from paceline.spec import LossSection
from paceline.spec.sections.loss import PresetName

SUMS_OF_LOG_RHO = [0.9, -5.7, 0.0]
WEIGHTS: dict[str, tuple[dict[str, Any], list[float]]] = {
    "tis": ({}, [math.exp(0.1), 2.0, math.exp(-0.4), math.exp(0.3), math.exp(-6.0), 1.0]),
    "tis with a floor": (
        {"truncated_importance_sampling_ratio_min": 0.5},
        [math.exp(0.1), 2.0, math.exp(-0.4), math.exp(0.3), 0.5, 1.0],
    ),
    "icepop": (
        {"preset": "icepop", "truncated_importance_sampling_ratio": 2.0},
        [math.exp(0.1), 0.0, math.exp(-0.4), math.exp(0.3), 0.0, 1.0],
    ),
    "sequence_tis": (
        {"truncated_importance_sampling_type": "sequence_tis"},
        [2.0] * 3 + [math.exp(-5.7)] * 2 + [1.0],
    ),
    "sequence_mask": (
        {"truncated_importance_sampling_type": "sequence_mask"},
        [0.0] * 3 + [math.exp(-5.7)] * 2 + [1.0],
    ),
    # Means 0.3, -2.85 and 0: only the last is within 1 %.
    "geometric": (
        {"geometric_mask": (0.99, 1.01), "truncated_importance_sampling_ratio": None},
        [0.0] * 5 + [1.0],
    ),
    # e^-6 = 0.0025 is below the bound: its whole sequence goes.
    "veto": ({"veto": (1e-2, 1e2), "truncated_importance_sampling_ratio": None}, [1.0] * 3 + [0, 0, 1.0]),
    "none": ({"truncated_importance_sampling_ratio": None}, [1.0] * 6),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_and_masks_act_outside_the_ratio_and_not_on_the_denominators(name: str) -> None:
    config, weights = WEIGHTS[name]
    forms = [clip_form(math.exp(x), a, 0.8, 1.2) for x, a in zip(SHORT_LOG_R, ADVANTAGE, strict=True)]
    check(
        batch(SHORT_LOG_R),
        [w * value / TOKENS for w, (value, _) in zip(weights, forms, strict=True)],
        [w * slope / TOKENS for w, (_, slope) in zip(weights, forms, strict=True)],
        **{**config, "reduction": "dapo"},
    )


def test_the_kl_acts_on_dropped_tokens_too() -> None:
    # Every sequence is vetoed; what is left is β·k2 = β·Δ²/2 with slope -β·Δ, Δ = log π_ref - log π = 0.5.
    tokens = replace(batch(SHORT_LOG_R), reference_N=f64(CURRENT) + 0.5)
    check(
        tokens,
        [0.1 * 0.125] * 1,
        [-0.1 * 0.5 / TOKENS] * TOKENS,
        veto=(1e3, 1e4),
        reference_policy_kl_penalty=0.1,
        reference_policy_kl_type="k2",
    )


DELTA = [0.5, -0.3, 4.0, -25.0, 25.0, 0.0]
"""log π_ref - log π; `k3` clamps it beyond ±20."""


def kl_form(kind: str, delta: float, log_r: float) -> tuple[float, float]:
    """(value, slope in log π) of the estimator; log r = log π - log π_prox has slope 1, Δ has -1."""
    if kind == "k2":
        return delta**2 / 2, -delta
    held, r = min(max(delta, -20.0), 20.0), math.exp(log_r)
    k3 = math.exp(held) - held - 1
    return r * k3, r * (k3 + (1 - math.exp(held) if held == delta else 0.0))


@pytest.mark.parametrize("kind", ["k2", "k3"])
@pytest.mark.parametrize(
    ("reduction", "weights"),
    [
        ("grpo", [1 / (B * LENGTHS[s]) for s in SEQUENCE]),
        ("dapo", [1 / TOKENS] * TOKENS),
        ("dr_grpo", [1 / (B * 8)] * TOKENS),
    ],
)
def test_the_kl_on_a_ragged_batch_after_an_update(kind: str, reduction: str, weights: list[float]) -> None:
    tokens = replace(batch(SHORT_LOG_R), reference_N=f64(CURRENT) + f64(DELTA))
    none = {"truncated_importance_sampling_ratio": None, "reduction": reduction}
    policy = [clip_form(math.exp(x), a, 0.8, 1.2) for x, a in zip(SHORT_LOG_R, ADVANTAGE, strict=True)]
    kl = [kl_form(kind, d, x) for d, x in zip(DELTA, SHORT_LOG_R, strict=True)]
    rows = list(zip(weights, policy, kl, strict=True))
    result = check(
        tokens,
        [w * (value + 0.1 * penalty) for w, (value, _), (penalty, _) in rows],
        [w * (slope + 0.1 * pull) for w, (_, slope), (_, pull) in rows],
        reference_policy_kl_penalty=0.1,
        reference_policy_kl_type=kind,
        **none,
    )
    assert result.sums["kl_reference"].item() == pytest.approx(math.fsum(value for value, _ in kl))


def test_decoupled_ppo_drops_tokens_that_are_too_far_from_the_sampler() -> None:
    # ρ = e^1.7 = 5.47 is above 5, e^1.5 = 4.48 is not and weighs as it is; so does e^-6.
    log_rho = [0.1, 1.7, -0.4, 1.5, -6.0, 0.0]
    weights = [0.0 if x == 1.7 else math.exp(x) for x in log_rho]
    forms = [clip_form(math.exp(x), a, 0.8, 1.2) for x, a in zip(SHORT_LOG_R, ADVANTAGE, strict=True)]
    result = check(
        batch(SHORT_LOG_R, log_rho),
        [w * value / TOKENS for w, (value, _) in zip(weights, forms, strict=True)],
        [w * slope / TOKENS for w, (_, slope) in zip(weights, forms, strict=True)],
        preset="decoupled_ppo",
    )
    assert result.sums["truncated"].item() == 1


def test_the_off_policy_mask_drops_bad_sequences_that_the_policy_left() -> None:
    # log μ - log π = -(log r + log ρ); means: good -0.35, bad (−0.6 + 6.5)/2 = 2.95, the last −0.2.
    unmasked = solve(batch(SHORT_LOG_R))[1]
    kept = solve(batch(SHORT_LOG_R), off_policy_mask_threshold=3.0)[1]
    dropped = solve(batch(SHORT_LOG_R), off_policy_mask_threshold=2.9)[1]
    assert kept == unmasked
    assert dropped == [*unmasked[:3], 0.0, 0.0, unmasked[5]]


def test_entropy_bonus_is_the_mean_per_token_of_the_batch() -> None:
    entropy_N = f64([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]).requires_grad_()
    plain = policy_loss(batch(), COUNTS, LossSection(reduction="grpo")).loss
    tokens = replace(batch(), entropy_N=entropy_N)
    result = policy_loss(tokens, COUNTS, LossSection(reduction="grpo", entropy_bonus=0.01))
    (grad_N,) = torch.autograd.grad(result.loss, entropy_N)
    assert (result.loss - plain).item() == pytest.approx(-0.01 * 2.1 / 6)
    assert grad_N.tolist() == pytest.approx([-0.01 / 6] * 6)


@pytest.mark.parametrize(
    "preset",
    ["grpo", "dr_grpo", "dapo", "gspo", "luspo", "cispo", "sapo", "vespo", "rloo", "icepop", "dppo", "m2po"],
)
@pytest.mark.parametrize("log_r", [-200.0, -30.0, 30.0, 200.0])
def test_gradients_stay_finite_in_float32(preset: str, log_r: float) -> None:
    current_N = torch.tensor([-0.5, -1.0], requires_grad=True)
    tokens = TokenArrays(
        current_N=current_N,
        entropy_N=torch.zeros(2),
        lengths_N=torch.tensor([1.0, 1.0]),
        sequence_N=torch.tensor([0, 1]),
        num_sequences=2,
        behaviour_N=current_N.detach() - log_r,
        proximal_N=current_N.detach() - log_r,
        advantages_N=torch.tensor([1.0, -1.0]),
        m2_limit=0.04 if preset == "m2po" else None,
    )
    result = policy_loss(tokens, Denominators(2, 2, 4, 1), LossSection(preset=preset))
    (grad_N,) = torch.autograd.grad(result.loss, current_N)
    assert result.loss.isfinite()
    assert grad_N.isfinite().all()


@pytest.mark.parametrize(
    "mask",
    [
        {"geometric_mask": (0.9, 1.1)},
        {"veto": (1e-4, 1e2)},
        {"preset": "m2po"},
        {"off_policy_mask_threshold": 0.5},
        {"preset": "icepop"},
        {"truncated_importance_sampling_type": "sequence_mask"},
    ],
)
def test_no_mask_hides_what_is_not_a_number(mask: dict[str, Any]) -> None:
    tokens = batch(SHORT_LOG_R)
    assert tokens.behaviour_N is not None
    tokens.behaviour_N[3] = math.nan
    result = policy_loss(replace(tokens, m2_limit=0.1), COUNTS, LossSection(**mask))
    assert result.loss.isnan()
    assert result.token_losses_N[3].isnan()


SPLIT: dict[str, dict[str, Any]] = {
    **{name: {"preset": name} for name in get_args(PresetName) if name != "bnpo"},
    **{name: config for name, (config, _) in WEIGHTS.items() if name != "icepop"},
    "off-policy mask": {"off_policy_mask_threshold": 2.9},
    "k2": {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": "k2"},
    "k3": {"reference_policy_kl_penalty": 0.1},
    "dual clip": {"ratio_clip_c": 1.3},
    "log-linear": {"proximal_policy": "log_linear"},
}


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shares_of_micro_batches_add_up(name: str, dtype: torch.dtype) -> None:
    config = LossSection.model_validate({**SPLIT[name], "entropy_bonus": 0.01})
    base = replace(batch(SHORT_LOG_R), ages_N=torch.arange(TOKENS), m2_limit=1.0 if name == "m2po" else None)
    if config.reference_policy_kl_penalty > 0:
        base = replace(base, reference_N=f64(CURRENT) + 0.3)
    tokens = replace(
        base,
        **{
            name: getattr(base, name).to(dtype)
            for name in ("entropy_N", "lengths_N", "behaviour_N", "proximal_N", "advantages_N")
        },
    )
    current_N = f64(CURRENT).to(dtype).requires_grad_()
    whole = policy_loss(replace(tokens, current_N=current_N), COUNTS, config)
    parts = [policy_loss(part_of(tokens, current_N, part), COUNTS, config) for part in ([0, 2], [1])]
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss, **tolerance)
    torch.testing.assert_close(
        torch.autograd.grad(parts[0].loss + parts[1].loss, current_N)[0],
        torch.autograd.grad(whole.loss, current_N)[0],
        **tolerance,
    )
    assert {name: float(parts[0].sums[name] + parts[1].sums[name]) for name in whole.sums} == pytest.approx(
        {name: float(value) for name, value in whole.sums.items()}, rel=1e-5, abs=1e-6
    )


@pytest.mark.parametrize(
    ("values", "threshold", "limit"),
    [
        ([0.01, 0.02, 0.03], 0.04, math.inf),
        ([0.01, 0.02, 0.09, 4.0], 0.04, 0.09),  # mean of the first three is 0.04
        ([0.01, 0.02, 0.09, 4.0], 0.039, 0.02),
        ([0.5, 0.5, 0.01], 0.04, 0.01),  # equal values go together
        ([0.5, 0.7], 0.04, None),  # nothing may stay
        ([], 0.04, math.inf),
    ],
)
def test_m2po_limit(values: list[float], threshold: float, limit: float | None) -> None:
    got = m2_limit_of(torch.tensor(values), threshold + 1e-9, lambda sums: sums)
    kept = [value for value in torch.tensor(values).tolist() if value <= got]
    expected = [] if limit is None else [value for value in torch.tensor(values).tolist() if value <= limit + 1e-8]
    assert kept == expected
