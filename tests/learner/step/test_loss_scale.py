"""Training in float16: the scale of the loss, overflows, and the step beside one in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_policy import CASES, CPU, batch_of, make_batch, make_spec

from paceline.errors import NonFiniteLoss
from paceline.learner.checkpoints import checkpoint
from paceline.learner.step import trainer as loss_scale
from paceline.learner.step.trainer import SCALE, LossScale, Trainer

FLOAT16 = {"precision": "float16"}


def trainer_of(model: Path, name: str = "dapo", **policy: Any) -> Trainer:
    torch.manual_seed(11)
    return Trainer(make_spec(model, **(CASES[name] | FLOAT16 | policy)), CPU)


def scale_of(trainer: Trainer) -> float:
    return float(trainer.optimizer.param_groups[0][SCALE])


def made(dtype: torch.dtype, **options: int) -> tuple[LossScale, torch.optim.Optimizer, torch.nn.Module]:
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    return LossScale(optimizer, dtype, **options), optimizer, model


def test_other_types_have_no_scale() -> None:
    scale, optimizer, _ = made(torch.bfloat16)
    assert (scale.factor, scale.is_dynamic, scale.lower()) == (1.0, False, False)
    scale.note_update()
    assert SCALE not in optimizer.param_groups[0]


def test_it_halves_at_overflows_and_doubles_after_many_updates() -> None:
    scale, _, model = made(torch.float16, updates_to_double=3)
    assert scale.factor == 2.0**16
    for expected in (16, 16, 17, 17, 17, 18):
        scale.note_update()
        assert scale.factor == 2.0**expected
    scale.note_update()
    assert scale.lower()
    for _ in range(2):
        scale.note_update()
    assert scale.factor == 2.0**17  # an overflow begins the count anew
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0 * scale.factor)
    scale.divide([model])
    assert all((parameter.grad == 3.0).all() for parameter in model.parameters())
    while scale.lower():
        pass
    assert scale.factor == 1.0
    for _ in range(200):
        scale.note_update()
    assert scale.factor == loss_scale.LARGEST


@pytest.mark.parametrize("name", ["dapo", "kl", "ppo", "lora", "dpo"])
def test_a_step_is_near_the_one_in_float32(name: str, model: Path) -> None:
    batch = batch_of(name)
    expected = Trainer(make_spec(model, **CASES[name]), CPU)
    exact = expected.train_step(batch, 0)
    trainer = trainer_of(model, name)
    metrics = trainer.train_step(batch, 0)
    assert metrics["loss"] == pytest.approx(exact["loss"], rel=0.02, abs=0.01)
    if name != "ppo":  # the value model's head is drawn anew
        assert metrics["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.02)
    assert 2.0**12 <= metrics["loss_scale"] <= 2.0**16
    assert "loss_scale" not in exact


@pytest.mark.parametrize("name", ["dapo", "ppo"])
def test_an_update_that_overflows_is_computed_again(name: str, model: Path) -> None:
    usual, overflowing = trainer_of(model, name), trainer_of(model, name)
    expected = usual.train_step(batch_of(name), 0)
    overflowing.optimizer.param_groups[0][SCALE] = 2.0**24
    metrics = overflowing.train_step(batch_of(name), 0)
    assert 1 < metrics["loss_scale"] < 2.0**24
    timings = {key for key in expected if key.endswith("_s")} | {"loss_scale"}
    for key in expected.keys() - timings:
        assert metrics[key] == pytest.approx(expected[key], rel=0.02, abs=1e-3), key
    assert not overflowing.skipped


def test_what_is_not_finite_at_any_scale_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(model)
    batch = [
        replace(sample, behaviour_logprobs_T=np.full(len(sample.completion_ids), np.nan, np.float32))
        for sample in make_batch()
    ]
    with pytest.raises(NonFiniteLoss):
        trainer.train_step(batch, 0)
    assert scale_of(trainer) == 2.0**16  # the loss itself was not finite
    trainer = trainer_of(model)
    monkeypatch.setattr("paceline.learner.step.trainer.gradient_norm", lambda model: float("inf"))
    with pytest.raises(NonFiniteLoss, match="every token's loss is finite"):
        trainer.train_step(make_batch(), 0)
    assert scale_of(trainer) == 1.0


def test_a_checkpoint_has_the_scale(model: Path, tmp_path: Path) -> None:
    trainer = trainer_of(model)
    trainer.optimizer.param_groups[0][SCALE] = 2.0**9
    trainer.train_step(make_batch(), 0)
    saved = checkpoint.save(tmp_path, session=1, step=1, model=trainer.model, optimizer=trainer.optimizer)
    assert saved is not None
    expected = trainer.train_step(make_batch(), 1)
    resumed = trainer_of(model)
    checkpoint.load(saved.path, expected_sha256=saved.manifest_sha256, model=resumed.model, optimizer=resumed.optimizer)
    assert scale_of(resumed) == 2.0**9
    again = resumed.train_step(make_batch(), 1)
    assert (again["loss"], again["grad_norm"]) == (expected["loss"], expected["grad_norm"])


def test_the_sampler_rounds_as_the_learner(model: Path) -> None:
    assert make_spec(model, precision="float16").policy.generation_precision == "float16"
    mixed = {"precision": "float16", "generation_precision": "float32"}
    assert make_spec(model, **mixed).policy.generation_precision == "float32"
    with pytest.raises(ValueError, match="leave generation_precision out, or set it to float16"):
        make_spec(model, precision="float16", generation_precision="bfloat16")
