"""Preference losses against their closed forms, in value and gradient, on pairs of unequal length."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from learner.objectives.dpo import PairLogRatios, preference_loss
from learner.objectives.kto import kto_loss
from learner.objectives.orpo import orpo_loss
from learner.objectives.reward_model import reward_model_loss

BETA, EPSILON = 0.5, 0.1
CHOSEN = [1.2, -0.8, 300.0, 0.0]
REJECTED = [0.2, 1.7, -300.0, 0.0]
CHOSEN_LENGTHS = [4, 1, 10, 0]
REJECTED_LENGTHS = [2, 5, 3, 0]
WEIGHTS = [0.5, 0.25, 0.125, 0.125]


def f64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_pairs() -> PairLogRatios:
    return PairLogRatios(
        f64(CHOSEN).requires_grad_(),
        f64(REJECTED).requires_grad_(),
        f64(CHOSEN_LENGTHS),
        f64(REJECTED_LENGTHS),
        f64(WEIGHTS),
    )


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else math.exp(x)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > -30 else x


Form = Callable[[float], tuple[float, float]]
"""d → (value, slope in d)."""

FORMS: dict[str, Form] = {
    "sigmoid": lambda d: (-log_sigmoid(BETA * d), -BETA * sigmoid(-BETA * d)),
    "conservative": lambda d: (
        -(1 - EPSILON) * log_sigmoid(BETA * d) - EPSILON * log_sigmoid(-BETA * d),
        -BETA * (1 - EPSILON) * sigmoid(-BETA * d) + BETA * EPSILON * sigmoid(BETA * d),
    ),
    "robust": lambda d: (
        (-(1 - EPSILON) * log_sigmoid(BETA * d) + EPSILON * log_sigmoid(-BETA * d)) / 0.8,
        (-BETA * (1 - EPSILON) * sigmoid(-BETA * d) - BETA * EPSILON * sigmoid(BETA * d)) / 0.8,
    ),
    "hinge": lambda d: (max(0.0, 1 - BETA * d), -BETA if BETA * d < 1 else 0.0),
    "ipo": lambda d: ((d - 1.0) ** 2, 2 * (d - 1.0)),
}


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("average", [False, True])
def test_pairs(kind: Any, average: bool) -> None:
    pairs = make_pairs()
    smoothing = EPSILON if kind in ("conservative", "robust") else 0.0
    loss = preference_loss(pairs, kind, beta=BETA, label_smoothing=smoothing, average=average)
    chosen_grad, rejected_grad = torch.autograd.grad(loss, (pairs.chosen_P, pairs.rejected_P))
    divide = average or kind == "ipo"
    value, chosen_slopes, rejected_slopes = 0.0, [], []
    for chosen, rejected, a, b, weight in zip(
        CHOSEN, REJECTED, CHOSEN_LENGTHS, REJECTED_LENGTHS, WEIGHTS, strict=True
    ):
        # An empty completion has the log-ratio 0 and counts as one token.
        chosen_tokens, rejected_tokens = (max(a, 1), max(b, 1)) if divide else (1, 1)
        form_value, slope = FORMS[kind](chosen / chosen_tokens - rejected / rejected_tokens)
        value += weight * form_value
        chosen_slopes.append(weight * slope / chosen_tokens)
        rejected_slopes.append(-weight * slope / rejected_tokens)
    assert loss.item() == pytest.approx(value, rel=1e-9)
    assert chosen_grad.tolist() == pytest.approx(chosen_slopes, rel=1e-9, abs=1e-12)
    assert rejected_grad.tolist() == pytest.approx(rejected_slopes, rel=1e-9, abs=1e-12)


def test_robust_is_unbiased_under_flipped_labels() -> None:
    """(1-ε)·robust(d) + ε·robust(-d) is the loss without flips."""
    for d in (-2.0, 0.3, 4.0):
        value = 0.9 * FORMS["robust"](d)[0] + 0.1 * FORMS["robust"](-d)[0]
        assert value == pytest.approx(FORMS["sigmoid"](d)[0])


def shares(kind: str, pairs: PairLogRatios) -> Callable[[slice], Tensor]:
    """The loss of a part of the pairs; of all of them with `slice(None)`."""

    def share(part: slice) -> Tensor:
        one = PairLogRatios(*(getattr(pairs, name)[part] for name in PairLogRatios.__dataclass_fields__))
        match kind:
            case "kto":
                good_S = torch.tensor([True, False, False, True])
                return kto_loss(one.chosen_P, good_S[part], 0.2, 4, beta=BETA, undesirable_weight=1.5)
            case "orpo":
                return orpo_loss(
                    -one.chosen_P.abs() - 0.1, -one.rejected_P.abs() - 0.1, one.weights_P, beta=BETA
                )
            case "rm":
                margins_P = f64([0.5, 0.0, 1.0, 0.0])[part]
                return reward_model_loss(
                    one.chosen_P, one.rejected_P, one.weights_P, margins_P=margins_P, centring=0.01
                )
            case _:
                smoothing = EPSILON if kind in ("conservative", "robust") else 0.0
                return preference_loss(one, kind, beta=BETA, label_smoothing=smoothing)  # type: ignore[arg-type]

    return share


@pytest.mark.parametrize("kind", [*FORMS, "kto", "orpo", "rm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shares_of_micro_batches_add_up(kind: str, dtype: torch.dtype) -> None:
    pairs = PairLogRatios(
        *(
            getattr(make_pairs(), name).detach().to(dtype).requires_grad_()
            for name in PairLogRatios.__dataclass_fields__
        )
    )
    share = shares(kind, pairs)
    whole, parts = share(slice(None)), share(slice(0, 1)) + share(slice(1, 4))
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(parts, whole, **tolerance)
    leaves = (pairs.chosen_P,) if kind == "kto" else (pairs.chosen_P, pairs.rejected_P)
    for one, other in zip(
        torch.autograd.grad(parts, leaves), torch.autograd.grad(whole, leaves), strict=True
    ):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize(
    ("kind", "smoothing", "match"),
    [("sigmoid", 0.1, "'sigmoid'"), ("robust", 0.5, r"0\.5"), ("aot", 0.0, "'aot'")],
)
def test_what_has_no_meaning_is_refused(kind: Any, smoothing: float, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        preference_loss(make_pairs(), kind, beta=BETA, label_smoothing=smoothing)


@pytest.mark.parametrize(("batch_kl", "z"), [(0.3, 0.3), (-2.0, 0.0)])
def test_kto(batch_kl: float, z: float) -> None:
    log_ratios_S = f64([0.9, -0.4, 800.0]).requires_grad_()
    loss = kto_loss(
        log_ratios_S,
        torch.tensor([True, False, True]),
        batch_kl,
        num_sequences=6,
        beta=BETA,
        undesirable_weight=1.5,
    )
    (grad_S,) = torch.autograd.grad(loss, log_ratios_S)
    good, bad = sigmoid(BETA * (0.9 - z)), sigmoid(-BETA * (-0.4 - z))
    assert loss.item() == pytest.approx((1 - good + 1.5 * (1 - bad)) / 6)
    assert grad_S.tolist() == pytest.approx(
        [-BETA * good * (1 - good) / 6, 1.5 * BETA * bad * (1 - bad) / 6, 0.0]
    )


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


def test_reward_model() -> None:
    chosen_P, rejected_P = f64([2.0, -1.0]).requires_grad_(), f64([0.5, 900.0]).requires_grad_()
    margins_P = f64([0.5, 1.0])
    loss = reward_model_loss(chosen_P, rejected_P, f64([0.25, 0.25]), margins_P=margins_P, centring=0.01)
    chosen_grad, rejected_grad = torch.autograd.grad(loss, (chosen_P, rejected_P))
    values = [-log_sigmoid(1.0) + 0.01 * 2.5**2, 902.0 + 0.01 * 899.0**2]
    assert loss.item() == pytest.approx(sum(values) / 4)
    slopes = [-sigmoid(-1.0), -1.0]
    centre = [0.02 * 2.5, 0.02 * 899.0]
    assert chosen_grad.tolist() == pytest.approx([(s + c) / 4 for s, c in zip(slopes, centre, strict=True)])
    assert rejected_grad.tolist() == pytest.approx(
        [(-s + c) / 4 for s, c in zip(slopes, centre, strict=True)]
    )


def test_a_reward_model_without_margin_or_centring_is_bradley_terry() -> None:
    loss = reward_model_loss(f64([math.log(3)]), f64([0.0]), f64([1.0]), centring=0.0)
    assert loss.item() == pytest.approx(-math.log(0.75))
