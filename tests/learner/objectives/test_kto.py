"""KTO's loss against its closed form, and its KL on completions of other prompts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from preference_data import (
    BETA,
    sigmoid,
    sums_of,
    trainer_of,
)
from ragged_batch import f64
from tiny_policy import make_judged_batch, make_spec

from paceline.learner.objectives.kto import kto_loss


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
    assert grad_S.tolist() == pytest.approx([-BETA * good * (1 - good) / 6, 1.5 * BETA * bad * (1 - bad) / 6, 0.0])


def test_kto_measures_its_kl_on_completions_of_other_prompts(model: Path, moved: Path) -> None:
    batch = make_judged_batch("kto")
    spec = make_spec(model, "kto", sections={"kto": {"reference_policy_kl_penalty": 0.2, "undesirable_weight": 1.5}})
    metrics = trainer_of(spec, moved).evaluate(batch)
    ratios = [c - r for c, r in zip(sums_of(moved, batch), sums_of(model, batch), strict=True)]
    labels = [s.label for s in batch if s.label is not None]
    foreign = [x for x, v in zip(ratios, labels, strict=True) if v.mismatched]
    kl = sum(foreign) / len(foreign)
    assert metrics["batch_kl"] == pytest.approx(kl, rel=1e-3, abs=1e-4)
    loss, own = 0.0, [(x, v) for x, v in zip(ratios, labels, strict=True) if not v.mismatched]
    for ratio, label in own:
        sign, weight = (1, 1.0) if label.good else (-1, 1.5)
        loss += weight * (1 - 1 / (1 + math.exp(-0.2 * sign * (ratio - max(kl, 0.0)))))
    assert metrics["loss"] == pytest.approx(loss / len(own), rel=1e-4)


def test_a_policy_that_has_not_moved_is_right_half_the_time(model: Path) -> None:
    batch = [s for s in make_judged_batch("kto") if not s.is_mismatched]
    metrics = trainer_of(make_spec(model, "kto"), model).evaluate(batch)
    assert metrics["accuracy"] == 0.5, "all log-ratios are 0"
