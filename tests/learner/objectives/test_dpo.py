"""DPO's losses of pairs against their closed forms, and a step's against plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from preference_data import (
    BETA,
    CHOSEN,
    CHOSEN_LENGTHS,
    EPSILON,
    FORMS,
    REJECTED,
    REJECTED_LENGTHS,
    WEIGHTS,
    log_sigmoid,
    make_pairs,
    sums_of,
    trainer_of,
)
from tiny_policy import make_judged_batch, make_spec

from paceline.learner.objectives.dpo import preference_loss


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("average", [False, True])
def test_pairs(kind: Any, average: bool) -> None:
    pairs = make_pairs()
    smoothing = EPSILON if kind in ("conservative", "robust") else 0.0
    loss = preference_loss(pairs, kind, beta=BETA, label_smoothing=smoothing, average=average)
    chosen_grad, rejected_grad = torch.autograd.grad(loss, (pairs.chosen_P, pairs.rejected_P))
    divide = average or kind == "ipo"
    value, chosen_slopes, rejected_slopes = 0.0, [], []
    for chosen, rejected, a, b, weight in zip(CHOSEN, REJECTED, CHOSEN_LENGTHS, REJECTED_LENGTHS, WEIGHTS, strict=True):
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


@pytest.mark.parametrize(
    ("kind", "smoothing", "match"),
    [("sigmoid", 0.1, "'sigmoid'"), ("robust", 0.5, r"0\.5"), ("aot", 0.0, "'aot'")],
)
def test_what_has_no_meaning_is_refused(kind: Any, smoothing: float, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        preference_loss(make_pairs(), kind, beta=BETA, label_smoothing=smoothing)


def test_dpo_is_its_formula_on_completions(model: Path, moved: Path) -> None:
    section = {"reference_policy_kl_penalty": 0.4, "sft_loss_weight": 0.25, "preference_loss_weight": 2.0}
    batch = make_judged_batch("dpo")
    metrics = trainer_of(make_spec(model, "dpo", sections={"dpo": section}), moved).evaluate(batch)
    current, reference = sums_of(moved, batch), sums_of(model, batch)
    ratios = [c - r for c, r in zip(current, reference, strict=True)]
    # Group 100 has indices 0 (chosen), 1 and 2 (rejected); the others are pairs.
    pairs = [(0, 1, 1 / 8), (0, 2, 1 / 8), (3, 4, 1 / 4), (5, 6, 1 / 4), (7, 8, 1 / 4)]
    preference = sum(-w * log_sigmoid(0.4 * (ratios[c] - ratios[r])) for c, r, w in pairs)
    likelihood = -sum(current[place] for place in (0, 3, 5, 7)) / 4
    assert metrics["preference_loss"] == pytest.approx(preference, rel=1e-4)
    assert metrics["sft_loss"] == pytest.approx(likelihood, rel=1e-4)
    assert metrics["loss"] == pytest.approx(2 * preference + 0.25 * likelihood, rel=1e-4)
    margin = sum(w * 0.4 * (ratios[c] - ratios[r]) for c, r, w in pairs)
    assert metrics["margin"] == pytest.approx(margin, rel=1e-3, abs=1e-5)
    assert metrics["accuracy"] == pytest.approx(sum(w * (ratios[c] > ratios[r]) for c, r, w in pairs))
