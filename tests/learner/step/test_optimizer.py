"""Schedule factors by hand, and what weight decay touches."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
from pydantic import ValidationError
from tiny_policy import make_spec

from paceline.learner.step.optimizer import lr_factor, make_optimizer, set_learning_rate
from paceline.spec import OptimizerSection, SchedulerSection
from paceline.spec.sections.policy import SchedulerName

PEAK_AT_3 = {"warmup_steps": 4}
"""9 steps: rates 1/4, 2/4, 3/4, the peak at step 3, the last step is 8."""


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ({"name": "constant"}, {0: 0.25, 1: 0.5, 3: 1.0, 5: 1.0, 8: 1.0, 20: 1.0}),
        ({"name": "constant_with_warmup"}, {0: 0.25, 2: 0.75, 3: 1.0, 8: 1.0}),
        ({"name": "linear", "min_lr_ratio": 0.1}, {0: 0.25, 3: 1.0, 4: 0.82, 8: 0.1, 20: 0.1}),
        ({"name": "polynomial"}, {3: 1.0, 4: 0.8, 8: 0.0}),
        ({"name": "polynomial", "power": 2.0}, {0: 0.25, 3: 1.0, 4: 0.64, 7: 0.04, 8: 0.0, 20: 0.0}),
        ({"name": "polynomial", "power": 2.0, "min_lr_ratio": 0.5}, {4: 0.82, 8: 0.5}),
        # cos(π/5) = 0.809017, cos(2π/5) = 0.309017
        ({"name": "cosine"}, {0: 0.25, 3: 1.0, 4: 0.9045085, 5: 0.6545085, 8: 0.0}),
        ({"name": "cosine_with_min_lr", "min_lr_ratio": 0.1}, {0: 0.25, 4: 0.91405765, 8: 0.1, 20: 0.1}),
        # Two falls in five steps: x = 0.2, 0.4, then 0.6 is 0.2 of the second.
        (
            {"name": "cosine_with_restarts", "num_cycles": 2},
            {3: 1.0, 4: 0.6545085, 5: 0.0954915, 6: 0.9045085, 7: 0.3454915, 8: 0.0, 20: 0.0},
        ),
        ({"name": "inverse_sqrt"}, {0: 0.25, 3: 1.0, 15: 0.5, 63: 0.25}),
        (
            {"name": "wsd", "decay_steps": 4},
            {0: 0.25, 3: 1.0, 4: 1.0, 5: 0.75, 6: 0.5, 7: 0.25, 8: 0.0, 20: 0.0},
        ),
        ({"name": "wsd", "decay_steps": 4, "decay_type": "1-sqrt"}, {4: 1.0, 5: 0.5, 8: 0.0}),
        (
            {"name": "wsd", "decay_steps": 4, "decay_type": "cosine", "min_lr_ratio": 0.2},
            {4: 1.0, 5: 0.88284271, 6: 0.6, 8: 0.2},
        ),
    ],
)
def test_factor(schedule: dict[str, object], factors: dict[int, float]) -> None:
    config = SchedulerSection.model_validate({**PEAK_AT_3, **schedule})
    for step, factor in factors.items():
        assert lr_factor(step, 9, config) == pytest.approx(factor), step


def test_a_ratio_is_the_warm_up_of_so_many_steps() -> None:
    for schedule in ({"name": "linear"}, {"name": "constant_with_warmup"}, {"name": "cosine"}):
        by_ratio = SchedulerSection.model_validate({**schedule, "warmup_ratio": 0.4})  # 3.6 of 9 steps
        by_steps = SchedulerSection.model_validate({**schedule, **PEAK_AT_3})
        for step in range(9):
            assert lr_factor(step, 9, by_ratio) == lr_factor(step, 9, by_steps)
    with pytest.raises(ValidationError, match=r"warmup_steps 4 and warmup_ratio 0\.4"):
        SchedulerSection(warmup_steps=4, warmup_ratio=0.4)


def test_inverse_sqrt_without_warm_up_has_a_scale_of_its_own() -> None:
    config = SchedulerSection(name="inverse_sqrt")
    assert lr_factor(0, 9, config) == pytest.approx((10_000 / 10_001) ** 0.5)
    assert lr_factor(29_999, 9, config) == pytest.approx(0.5)


def test_every_schedule_is_tested_and_starts_at_the_peak_without_warm_up() -> None:
    for name in get_args(SchedulerName):
        if name == "constant_with_warmup":
            continue
        more = {"min_lr_ratio": 0.1} if name == "cosine_with_min_lr" else {}
        more |= {"decay_steps": 3} if name == "wsd" else {}
        config = SchedulerSection.model_validate({"name": name, **more})
        assert lr_factor(0, 9, config) == pytest.approx(1.0, abs=1e-4), name


@pytest.mark.parametrize(
    ("schedule", "what"),
    [
        ({"name": "constant", "min_lr_ratio": 0.1}, "min_lr_ratio 0.1 has no effect with name 'constant'"),
        ({"name": "linear", "power": 2.0}, "power 2.0 has no effect with name 'linear'"),
        ({"name": "cosine", "num_cycles": 3}, "num_cycles 3 has no effect with name 'cosine'"),
        ({"name": "linear", "decay_steps": 3}, "decay_steps 3 has no effect with name 'linear'"),
        ({"name": "wsd"}, "without decay_steps"),
        ({"name": "constant_with_warmup"}, "warmup_steps 0"),
        ({"name": "cosine_with_min_lr"}, "min_lr_ratio 0"),
    ],
)
def test_a_setting_that_no_shape_reads_is_refused(schedule: dict[str, object], what: str) -> None:
    with pytest.raises(ValidationError, match=what):
        SchedulerSection.model_validate(schedule)


def test_a_fall_longer_than_the_run_is_refused(tmp_path: Path) -> None:
    scheduler = {"name": "wsd", "warmup_steps": 4, "decay_steps": 8}
    with pytest.raises(ValidationError, match=r"4 steps of warm-up \+ decay_steps 8 exceed the run's 10 steps"):
        make_spec(tmp_path, grpo={"max_num_steps": 10}, scheduler=scheduler)
    make_spec(tmp_path, grpo={"max_num_steps": 12}, scheduler=scheduler)


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
