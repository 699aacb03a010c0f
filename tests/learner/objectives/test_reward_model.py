"""The reward model's loss against its closed form, and its scores against plain transformers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from preference_data import (
    log_sigmoid,
    sigmoid,
)
from ragged_batch import f64
from tiny_policy import CPU, make_judged_batch, make_spec
from transformers import AutoModelForSequenceClassification

from paceline.learner.objectives.reward_model import reward_model_loss
from paceline.learner.step.trainer import Trainer


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
    assert rejected_grad.tolist() == pytest.approx([(-s + c) / 4 for s, c in zip(slopes, centre, strict=True)])


def test_a_reward_model_without_margin_or_centring_is_bradley_terry() -> None:
    loss = reward_model_loss(f64([math.log(3)]), f64([0.0]), f64([1.0]), centring=0.0)
    assert loss.item() == pytest.approx(-math.log(0.75))


def test_a_score_is_what_transformers_gives_for_the_whole_text(model: Path) -> None:
    torch.manual_seed(3)
    trainer = Trainer(make_spec(model, "rm", sections={"rm": {"centring": 0.1}}), CPU)
    plain = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    plain.load_state_dict(trainer.model.state_dict())
    batch = make_judged_batch("rm")
    with torch.no_grad():
        scores = [float(plain(torch.from_numpy(s.prompt_ids.astype(np.int64))[None]).logits[0, 0]) for s in batch]
    pairs = [(0, 1, 1 / 8), (0, 2, 1 / 8), (3, 4, 1 / 4), (5, 6, 1 / 4), (7, 8, 1 / 4)]
    loss = sum(
        w * (-log_sigmoid(scores[c] - scores[r] - 0.5) + 0.1 * (scores[c] + scores[r]) ** 2) for c, r, w in pairs
    )
    assert trainer.evaluate(batch)["loss"] == pytest.approx(loss, rel=1e-4)
