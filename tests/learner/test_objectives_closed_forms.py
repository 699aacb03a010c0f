"""Every policy objective against its closed form, in value and in the gradient at each token.

The batch is ragged: sequences of 3, 2, 1 and 0 tokens (the empty one counts in B), a good one, a bad one and one of a
group without contrast, with log-ratios from ordinary to e^±30.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from learner.objectives import Denominators, LossResult, TokenArrays, policy_loss
from paceline.loss_presets import PresetName
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
    values = [
        (-k * math.exp(x) * a + 1e-3 * x * x) / TOKENS for k, x, a in zip(kept, log_r, ADVANTAGE, strict=True)
    ]
    slopes = [
        (-k * math.exp(x) * a + 2e-3 * x) / TOKENS for k, x, a in zip(kept, log_r, ADVANTAGE, strict=True)
    ]
    result = check(batch(log_r, [0.0] * TOKENS), values, slopes, preset="dppo")
    assert result.sums["clipped"].item() == 1


def test_dppo_drops_a_good_token_that_rose_too_far() -> None:
    # Token 0: π = 0.6703, r = e^0.4: π - μ = 0.2210 > 0.2.
    log_r = [0.4, 0.0, 0.0, 0.0, 0.0, 0.0]
    _, grads = solve(batch(log_r, [0.0] * TOKENS), preset="dppo")
    assert grads[0] == pytest.approx(2e-3 * 0.4 / TOKENS)


SHORT_LOG_R = [0.05, -0.02, 0.12, 0.3, -0.5, 0.2]
"""Without the extremes: sums over sequences are 0.15, -0.2 and 0.2."""


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


def test_the_off_policy_mask_drops_bad_sequences_that_the_policy_left() -> None:
    # log μ - log π = -(log r + log ρ); means: good -0.35, bad (−0.6 + 6.5)/2 = 2.95, the last −0.2.
    unmasked = solve(batch(SHORT_LOG_R))[1]
    kept = solve(batch(SHORT_LOG_R), off_policy_mask_threshold=3.0)[1]
    dropped = solve(batch(SHORT_LOG_R), off_policy_mask_threshold=2.9)[1]
    assert kept == unmasked
    assert dropped == [*unmasked[:3], 0.0, 0.0, unmasked[5]]


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


def test_no_token_at_all_is_a_loss_of_zero() -> None:
    empty = torch.zeros(0, requires_grad=True)
    for preset in ("grpo", "gspo", "rloo", "vespo", "cispo", "sapo", "dppo", "bnpo", "luspo"):
        tokens = TokenArrays(
            empty, empty, empty, torch.zeros(0, dtype=torch.int64), 0, empty, empty, None, empty
        )
        result = policy_loss(tokens, Denominators(0, 3, 8, 0), LossSection(preset=preset))
        assert result.loss.item() == 0


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


@pytest.mark.parametrize("preset", [name for name in get_args(PresetName) if name != "bnpo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shares_of_micro_batches_add_up(preset: str, dtype: torch.dtype) -> None:
    config = LossSection.model_validate({"preset": preset, "entropy_bonus": 0.01})
    base = replace(
        batch(SHORT_LOG_R), ages_N=torch.arange(TOKENS), m2_limit=1.0 if preset == "m2po" else None
    )
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
