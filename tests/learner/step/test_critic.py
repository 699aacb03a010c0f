"""The value model in a training step: its advantages, its learning, its limits, and that a checkpoint holds it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tiny_policy import CPU, make_batch, make_spec

from paceline.errors import Conflict, NonFiniteLoss
from paceline.learner.batch.samples import TrainingSample, pack_samples
from paceline.learner.checkpoints import checkpoint
from paceline.learner.step.trainer import Trainer
from paceline.spec import RunSpec

PPO = {"preset": "ppo"}
FAST = {"optimizer": {"lr": 1e-2, "weight_decay": 0.0}}


def make_ppo(model: Path, value: dict[str, object] | None = None, **options: object) -> RunSpec:
    spec = make_spec(model, loss_fn=PPO, **options)  # type: ignore[arg-type]
    tree = spec.model_dump(exclude_unset=True)
    return RunSpec.model_validate({**tree, "value": {**FAST, **(value or {})}})


def plain_values(trainer: Trainer, sequence: TrainingSample) -> torch.Tensor:
    """[T + 1] the value model's answers from the modules themselves, one sequence alone."""
    assert trainer.critic is not None
    whole = np.concatenate((sequence.completion_ids, [0])).astype(np.int32)
    packed = pack_samples([TrainingSample(1, sequence.prompt_ids, whole)], CPU)
    model = trainer.critic.model
    with torch.no_grad():
        hidden = model.base_model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            use_cache=False,
            layout=packed.layout,
        ).last_hidden_state[0]
        return model.score(hidden)[len(sequence.prompt_ids) - 1 :, 0]


def test_advantages_are_gae_of_the_value_models_answers_whitened_over_the_batch(model: Path) -> None:
    torch.manual_seed(3)
    trainer = Trainer(make_ppo(model, {"gae_lambda": 0.9, "gae_gamma": 0.98}, train_mb_tokens=25), CPU)
    batch = make_batch()
    expected = []
    for sequence in batch:
        values = plain_values(trainer, sequence).double().tolist()
        running, advantages = 0.0, []
        final = values[-1] if sequence.truncated else 0.0
        for t in reversed(range(len(sequence.completion_ids))):
            last = t == len(sequence.completion_ids) - 1
            reward = float(sequence.rewards_F[0]) if last else 0.0
            delta = reward + 0.98 * (final if last else values[t + 1]) - values[t]
            running = delta + 0.98 * 0.9 * running
            advantages.insert(0, running)
        expected += advantages
    white = (np.array(expected) - np.mean(expected)) / np.std(expected)

    seen: dict[int, torch.Tensor] = {}
    loss = trainer.objective.loss

    def spy(tokens, *others):  # type: ignore[no-untyped-def]
        seen[len(seen)] = tokens.advantages_N.clone()
        return loss(tokens, *others)

    trainer.objective.loss = spy  # type: ignore[method-assign]
    trainer.train_step(batch, 0)
    got = np.sort(torch.cat(list(seen.values())).numpy())
    np.testing.assert_allclose(got, np.sort(white), atol=2e-5)


def test_the_value_model_learns_the_returns(model: Path) -> None:
    torch.manual_seed(0)
    trainer = Trainer(make_ppo(model, {"cliprange": None, "gae_lambda": 1.0}), CPU)
    # λ = 1 and no value of its own in the return: a fixed target.
    batch = [replace(s, truncated=False) for s in make_batch()]
    steps = [trainer.train_step(batch, step) for step in range(12)]
    assert steps[-1]["value_loss"] < 0.1 * steps[0]["value_loss"]
    assert steps[-1]["explained_variance"] > 0.8 > steps[0]["explained_variance"]
    assert steps[-1]["return"] == pytest.approx(steps[0]["return"])
    assert steps[0]["value_grad_norm"] > 0


def test_a_tight_bound_clips_later_updates_only(model: Path) -> None:
    torch.manual_seed(0)
    first = Trainer(make_ppo(model, {"cliprange": 1e-6}), CPU).train_step(make_batch(), 0)
    assert first["value_clip_fraction"] == 0  # one update: no value has moved yet
    spec = make_ppo(model, {"cliprange": 1e-6}, num_updates_per_step=2)
    assert Trainer(spec, CPU).train_step(make_batch(), 0)["value_clip_fraction"] > 0


def test_a_completion_without_reward_trains_neither(model: Path) -> None:
    batch = make_batch()
    unscored = [replace(s, rewards_F=np.array([np.nan], np.float32)) for s in batch]
    torch.manual_seed(0)
    trainer = Trainer(make_ppo(model), CPU)
    metrics = trainer.train_step(unscored, 0)
    assert metrics["grad_norm"] == 0
    assert "value_loss" not in metrics


def test_groups_of_equal_rewards_still_teach(model: Path) -> None:
    batch = [replace(s, rewards_F=np.ones(1, np.float32)) for s in make_batch()]
    metrics = Trainer(make_ppo(model), CPU).train_step(batch, 0)
    assert metrics["grad_norm"] > 0
    assert metrics["value_grad_norm"] > 0


def test_the_policy_waits_for_its_first_step(model: Path) -> None:
    trainer = Trainer(make_ppo(model, {"policy_training_start_step": 2}), CPU)
    assert trainer.critic is not None
    for step in range(3):
        before = [p.detach().clone() for p in trainer.model.parameters()]
        values = [p.detach().clone() for p in trainer.critic.model.parameters()]
        trainer.train_step(make_batch(), step)
        moved = any(not torch.equal(p, b) for p, b in zip(trainer.model.parameters(), before, strict=True))
        assert moved == (step == 2)
        assert any(not torch.equal(p, b) for p, b in zip(trainer.critic.model.parameters(), values, strict=True))


def test_a_nan_in_the_value_model_stops_both_optimizers(model: Path) -> None:
    trainer = Trainer(make_ppo(model, train_mb_tokens=12), CPU)
    assert trainer.critic is not None
    kept = trainer.critic.model.score.weight.detach().clone()
    with torch.no_grad():
        trainer.critic.model.score.weight[0, 0] = math.nan
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(NonFiniteLoss, match="the value model's") as caught:
        trainer.train_step(make_batch(), 0)
    assert caught.value.group_ids == (100, 101, 102, 103)
    assert all(torch.equal(p, b) for p, b in zip(trainer.model.parameters(), before, strict=True))
    assert trainer.optimizer.state == {}
    assert trainer.critic.optimizer.state == {}
    with torch.no_grad():
        trainer.critic.model.score.weight.copy_(kept)
    assert math.isfinite(trainer.train_step(make_batch(), 0)["value_loss"])


def test_a_value_gradient_that_overflows_stops_both_optimizers(model: Path) -> None:
    trainer = Trainer(make_ppo(model), CPU)
    huge = [replace(s, rewards_F=np.array([3e38], np.float32)) if i == 2 else s for i, s in enumerate(make_batch())]
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(NonFiniteLoss):
        trainer.train_step(huge, 0)
    assert all(torch.equal(p, b) for p, b in zip(trainer.model.parameters(), before, strict=True))


def test_a_checkpoint_holds_the_value_model_and_its_optimizer(model: Path, tmp_path: Path) -> None:
    batch = make_batch()
    torch.manual_seed(1)
    trainer = Trainer(make_ppo(model), CPU)
    trainer.train_step(batch, 0)
    saved = checkpoint.save(
        tmp_path, session=1, step=1, model=trainer.model, optimizer=trainer.optimizer, critic=trainer.critic
    )
    assert saved is not None
    torch.manual_seed(2)  # another head, were it not read back
    resumed = Trainer(make_ppo(model), CPU)
    checkpoint.load(
        saved.path,
        expected_sha256=saved.manifest_sha256,
        model=resumed.model,
        optimizer=resumed.optimizer,
        critic=resumed.critic,
    )
    same = ("loss", "value_loss", "grad_norm", "value_grad_norm", "explained_variance")
    for step in (1, 2):
        one, other = (t.train_step(batch, step) for t in (trainer, resumed))
        assert [one[name] for name in same] == [other[name] for name in same]
    assert trainer.critic is not None
    assert resumed.critic is not None
    for one, other in zip(trainer.critic.model.parameters(), resumed.critic.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_without_a_value_model_is_refused(model: Path, tmp_path: Path) -> None:
    plain = Trainer(make_spec(model), CPU)
    saved = checkpoint.save(tmp_path, session=1, step=0, model=plain.model, optimizer=plain.optimizer)
    assert saved is not None
    trainer = Trainer(make_ppo(model), CPU)
    with pytest.raises(Conflict, match="does not fit"):
        checkpoint.load(
            saved.path,
            expected_sha256=saved.manifest_sha256,
            model=trainer.model,
            optimizer=trainer.optimizer,
            critic=trainer.critic,
        )


def test_settings_that_contradict_each_other_are_refused(model: Path) -> None:
    tree = make_spec(model).model_dump(exclude_unset=True)
    with pytest.raises(ValidationError, match=r"value is set with grpo\.advantage 'trl'"):
        RunSpec.model_validate({**tree, "value": {"gae_lambda": 0.9}})
    with pytest.raises(ValidationError, match="policy_training_start_step 7 leaves no step"):
        make_ppo(model, {"policy_training_start_step": 7}, grpo={"max_num_steps": 7})
    with pytest.raises(ValidationError, match=r"num_generations_per_prompt 1 with grpo\.advantage 'trl'"):
        make_spec(model, grpo={"num_generations_per_prompt": 1})
    assert make_ppo(model, grpo={"num_generations_per_prompt": 1}).uses_value_model


@pytest.mark.parametrize("reward", [0.1, 1000.1, 3e6])
def test_returns_that_are_equal_but_for_rounding_explain_nothing(model: Path, reward: float) -> None:
    spec = make_ppo(model, {"gae_lambda": 1.0, "gae_gamma": 1.0})
    batch = [replace(s, rewards_F=np.full(1, reward, np.float32), truncated=False) for s in make_batch()]
    assert "explained_variance" not in Trainer(spec, CPU).train_step(batch, 0)
