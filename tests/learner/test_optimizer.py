"""Schedule factors by hand, and what weight decay touches."""

from __future__ import annotations

import pytest
import torch

from learner.optimizer import lr_factor, make_optimizer, set_learning_rate
from paceline.spec import OptimizerSection, SchedulerSection


@pytest.mark.parametrize(
    ("name", "factors"),
    [
        # 9 steps, 4 of warm-up (peak at step 3, end at step 8), floor 0.1
        ("constant", {0: 0.25, 1: 0.5, 3: 1.0, 5: 1.0, 8: 1.0, 20: 1.0}),
        ("linear", {0: 0.25, 3: 1.0, 4: 0.82, 8: 0.1, 20: 0.1}),
        ("cosine", {0: 0.25, 3: 1.0, 8: 0.1, 20: 0.1}),
    ],
)
def test_factor(name: str, factors: dict[int, float]) -> None:
    config = SchedulerSection.model_validate({"name": name, "warmup_steps": 4, "min_lr_ratio": 0.1})
    for step, factor in factors.items():
        assert lr_factor(step, 9, config) == pytest.approx(factor), step


def test_cosine_is_half_way_in_the_middle() -> None:
    config = SchedulerSection(name="cosine", min_lr_ratio=0.2)
    assert lr_factor(0, 11, config) == 1.0
    assert lr_factor(5, 11, config) == pytest.approx(0.6)


def test_a_single_step_has_the_peak() -> None:
    assert lr_factor(0, 1, SchedulerSection(name="linear")) == 1.0


def test_decay_on_matrices_only() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    optimizer = make_optimizer(model, OptimizerSection(lr=0.1, weight_decay=0.5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # Without gradient only the decay moves a weight: 1 - lr · decay.
    assert model[0].weight[0, 0].item() == pytest.approx(0.95)
    assert model[0].bias[0].item() == 1.0
    assert model[1].weight[0].item() == 1.0
    set_learning_rate(optimizer, 0.2)
    optimizer.step()
    assert model[0].weight[0, 0].item() == pytest.approx(0.95 * 0.9)
