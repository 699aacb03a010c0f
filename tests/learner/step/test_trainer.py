"""The training step in one process: invariance, correctness of its numbers, refusal of what is not finite."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_policy import CASES, CPU, VOCABULARY, batch_of, make_batch, make_spec, run_case
from transformers import Qwen3ForCausalLM

from paceline.advantages import advantages
from paceline.errors import NonFiniteLoss
from paceline.learner.batch.samples import TrainingSample
from paceline.learner.step import plan
from paceline.learner.step.trainer import Trainer


@pytest.mark.parametrize("name", CASES)
def test_any_split_into_micro_batches_gives_the_same_step(name: str, model: Path) -> None:
    batch = batch_of(name)
    metrics, tensors = run_case(model, CASES[name], batch, budget=1000)
    # Rounding grows in Adam's first updates, which are near the gradients' signs; those of the very first are compared below.
    tolerance = 1e-3 if "num_updates_per_step" in CASES[name] else 1e-5
    for budget in (1, 12, 25):
        split_metrics, split_tensors = run_case(model, CASES[name], batch[::-1], budget)
        assert split_metrics["micro_batches"] > metrics["micro_batches"]
        for key in {
            "loss",
            "grad_norm",
            "entropy",
            "logprob",
            "tokens",
            "accuracy",
            "margin",
        } & metrics.keys():
            assert split_metrics[key] == pytest.approx(metrics[key], rel=tolerance, abs=tolerance), key
        for key, tensor in tensors.items():
            if key.startswith("grad."):
                torch.testing.assert_close(split_tensors[key], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["dapo", "sft"])
def test_micro_batches_of_even_cost_give_the_same_step(name: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(name)
    metrics, tensors = run_case(model, CASES[name], batch, budget=25)
    monkeypatch.setattr(plan, "EVEN_COST_TOKENS", 1)
    monkeypatch.setattr(plan, "max_over_ranks", lambda sizes_U2: sizes_U2 + torch.tensor([2, 0]))
    split_metrics, split_tensors = run_case(model, CASES[name], batch, budget=25)
    assert split_metrics["micro_batches"] == metrics["micro_batches"] + 2
    assert split_metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-5, abs=1e-5)
    for key, tensor in tensors.items():
        if key.startswith("grad."):
            torch.testing.assert_close(split_tensors[key], tensor, rtol=1e-4, atol=1e-5)


def test_bnpo_depends_on_the_split_and_agrees_with_dapo_without_one(model: Path) -> None:
    bnpo = {"loss_fn": {"reduction": "bnpo"}}
    whole_loss = run_case(model, bnpo, make_batch(), budget=1000)[0]["loss"]
    assert whole_loss == pytest.approx(run_case(model, CASES["dapo"], make_batch(), budget=1000)[0]["loss"])
    assert run_case(model, bnpo, make_batch(), budget=12)[0]["loss"] != pytest.approx(whole_loss, rel=1e-3)


def reference_logprobs(model: Path, sequence: TrainingSample, temperature: float) -> torch.Tensor:
    """[T] by an unpacked forward of the model as transformers has it."""
    plain = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.from_numpy(np.concatenate((sequence.prompt_ids, sequence.completion_ids)).astype(np.int64))
    with torch.no_grad():
        logp_RV = (plain(ids[None]).logits[0] / temperature).log_softmax(-1)
    predictors_T = torch.arange(len(sequence.prompt_ids) - 1, len(ids) - 1)
    return logp_RV[predictors_T, ids[predictors_T + 1]]


def on_policy(model: Path, batch: list[TrainingSample], temperature: float) -> list[TrainingSample]:
    return [replace(s, behaviour_logprobs_T=reference_logprobs(model, s, temperature).numpy()) for s in batch]


def given_rewards(sequence: TrainingSample) -> np.ndarray:
    assert sequence.rewards_F is not None
    return sequence.rewards_F


def with_nan(sequence: TrainingSample) -> TrainingSample:
    return replace(sequence, behaviour_logprobs_T=np.full(len(sequence.completion_ids), math.nan, np.float32))


def test_equal_weights_give_ratio_one_and_the_policy_gradient_loss(model: Path) -> None:
    batch = on_policy(model, make_batch(), temperature=0.8)
    trainer = Trainer(make_spec(model, loss_fn={"reduction": "dapo"}), CPU)
    metrics = trainer.train_step(batch, 1)
    assert metrics["ratio_behaviour"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["kl_behaviour"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["effective_sample_size"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["clip_fraction"] == 0
    tokens = [len(s.completion_ids) for s in batch]
    rewards_SF = np.stack([given_rewards(s) for s in batch])
    advantages_S = np.concatenate([advantages(pair_C, "trl") for pair_C in rewards_SF.reshape(4, 2)])
    assert metrics["loss"] == pytest.approx(-np.dot(tokens, advantages_S) / sum(tokens), abs=1e-5)
    assert metrics["tokens"] == 40
    assert metrics["sequences"] == 8
    assert metrics["row_tokens"] == 40 + (3 + 3 + 5 + 2 + 2 + 4 + 4) - 7
    assert metrics["age"] == pytest.approx((14 * 1 + 26 * 0) / 40)


def test_the_share_of_tokens_without_advantage(model: Path) -> None:
    batch = make_batch()
    zero = np.zeros(1, np.float32)
    first = batch[0].group_id
    some_equal = [replace(s, rewards_F=zero) if s.group_id == first else s for s in batch]
    all_equal = [replace(s, rewards_F=zero) for s in batch]
    for sequences, share in ((batch, 0.0), (some_equal, (9 + 4) / 40), (all_equal, 1.0)):
        metrics = Trainer(make_spec(model), CPU).train_step(sequences, 1)
        assert metrics["zero_advantage_fraction"] == pytest.approx(share)
    supervised = Trainer(make_spec(model, "sft"), CPU).train_step(make_batch(supervised=True), 0)
    assert "zero_advantage_fraction" not in supervised


def test_supervised_loss_is_the_token_mean_at_temperature_one(model: Path) -> None:
    batch = make_batch(supervised=True)
    metrics = Trainer(make_spec(model, algorithm="sft"), CPU).train_step(batch, 0)
    logprobs = torch.cat([reference_logprobs(model, s, 1.0) for s in batch])
    assert metrics["loss"] == pytest.approx(-logprobs.mean().item(), abs=1e-5)
    assert "ratio_behaviour" not in metrics


def test_several_updates_move_away_from_the_proximal_policy(model: Path) -> None:
    batch = on_policy(model, make_batch(), temperature=0.8)
    spec = make_spec(model, num_updates_per_step=2, loss_fn={"ratio_clip_min": 0.001, "ratio_clip_max": 0.001})
    metrics = Trainer(spec, CPU).train_step(batch, 0)
    assert metrics["clip_fraction"] > 0  # only the second update can clip
    assert metrics["effective_sample_size"] == pytest.approx(1.0, abs=1e-5)  # the proximal policy is the sampler
    assert abs(metrics["ratio_behaviour"] - 1) > 1e-4  # the current one no longer is


def test_the_reference_stays_where_training_began(model: Path) -> None:
    spec = make_spec(model, loss_fn={"reference_policy_kl_penalty": 0.1})
    trainer = Trainer(spec, CPU)
    first, second = (trainer.train_step(make_batch(), step) for step in range(2))
    assert first["kl_reference"] == pytest.approx(0, abs=1e-7)
    assert second["kl_reference"] > 1e-4


def test_same_seed_same_loss(model: Path) -> None:
    losses = []
    for _ in range(2):
        trainer = Trainer(make_spec(model, train_mb_tokens=20), CPU)
        losses.append([trainer.train_step(make_batch(), step)["loss"] for step in range(3)])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3


def test_training_raises_the_probability_of_what_was_good(model: Path) -> None:
    rng = np.random.default_rng(0)
    prompt, good, bad = (rng.integers(0, VOCABULARY, n).astype(np.int32) for n in (4, 5, 5))
    pair = [
        TrainingSample(1, prompt, ids, np.full(5, -3, np.float32), rewards_F=np.array([reward], np.float32))
        for ids, reward in ((good, 1.0), (bad, 0.0))
    ]
    trainer = Trainer(make_spec(model), CPU)
    losses = [trainer.train_step(pair, step)["loss"] for step in range(5)]
    assert losses[-1] < losses[0]


def test_the_gradient_is_clipped_to_its_norm(model: Path) -> None:
    trainer = Trainer(make_spec(model, max_grad_norm=0.125), CPU)
    norms = []
    trainer.optimizer.register_step_pre_hook(
        lambda *_: norms.append(torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()]).item())
    )
    assert trainer.train_step(make_batch(), 0)["grad_norm"] > 0.2
    assert norms == [pytest.approx(0.125, rel=1e-4)]


def test_the_learning_rate_follows_the_step(model: Path) -> None:
    trainer = Trainer(make_spec(model, scheduler={"name": "linear", "warmup_steps": 4}), CPU)
    assert trainer.train_step(make_batch(), 1)["lr"] == pytest.approx(1e-2 * 2 / 4)


def test_a_nan_names_its_group_and_moves_nothing(model: Path) -> None:
    trainer = Trainer(make_spec(model, train_mb_tokens=12), CPU)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    batch = make_batch()
    broken = [with_nan(s) if i == 4 else s for i, s in enumerate(batch)]
    with pytest.raises(NonFiniteLoss, match="102") as caught:
        trainer.train_step(broken, 0)
    assert caught.value.group_ids == (102,)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
    assert trainer.optimizer.state == {}
    assert math.isfinite(trainer.train_step(batch, 0)["loss"])


def test_a_broken_update_may_be_left_out_and_the_others_of_its_step_train(model: Path) -> None:
    def train(batch: list[TrainingSample]) -> tuple[dict[str, float], Trainer]:
        spec = make_spec(model, num_updates_per_step=2, skip_non_finite_updates=True)
        trainer = Trainer(spec, CPU)
        return trainer.train_step(batch, 0), trainer

    batch = make_batch()
    broken = [with_nan(s) if i == 1 else s for i, s in enumerate(batch)]
    metrics, trainer = train(broken)
    assert [error.group_ids for error in trainer.skipped] == [(100,)]
    assert metrics["skipped_updates"] == 1
    assert math.isfinite(metrics["loss"])
    # Groups 102 and 103 are the second update, and all that was trained.
    alone = Trainer(make_spec(model), CPU)
    alone.train_step(batch[4:], 0)
    for one, other in zip(trainer.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert "skipped_updates" not in trainer.train_step(batch, 1)
    assert trainer.skipped == []


def test_a_step_whose_only_update_is_left_out_moves_nothing(model: Path) -> None:
    trainer = Trainer(make_spec(model, skip_non_finite_updates=True), CPU)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    metrics = trainer.train_step([with_nan(s) for s in make_batch()], 0)
    assert metrics["skipped_updates"] == 1
    assert "loss" not in metrics
    assert all(torch.equal(p, b) for p, b in zip(trainer.model.parameters(), before, strict=True))


def test_a_batch_without_tokens_is_a_step_without_gradient(model: Path) -> None:
    empty = [s for s in make_batch() if len(s.completion_ids) == 0]
    metrics = Trainer(make_spec(model), CPU).train_step(empty, 0)
    assert metrics["loss"] == 0
    assert metrics["grad_norm"] == 0
    assert metrics["sequences"] == 1


def test_bfloat16_compute_stays_near_float32(model: Path) -> None:
    exact = Trainer(make_spec(model), CPU).train_step(make_batch(), 0)
    trainer = Trainer(make_spec(model, precision="bfloat16"), CPU)
    rough = trainer.train_step(make_batch(), 0)
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    assert rough["logprob"] != exact["logprob"]
    assert rough["logprob"] == pytest.approx(exact["logprob"], rel=0.02)
    assert rough["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.1)


def test_an_outlier_at_a_weight_that_no_float_holds_trains_as_at_any_other(model: Path) -> None:
    batch = [replace(s, group_id=1, rewards_F=np.ones(1, np.float32)) for s in make_batch()]
    batch[-1] = replace(batch[-1], rewards_F=np.zeros(1, np.float32))
    found = {}
    for weight in (0.5, 0.7):
        spec = make_spec(model, grpo={"advantage": "nemo"})
        rewards = [spec.rewards[0].model_dump() | {"weight": weight}]
        found[weight] = Trainer(spec.model_validate(spec.model_dump() | {"rewards": rewards}), CPU).train_step(batch, 1)
    assert found[0.5]["advantage_max"] == 0.5
    assert found[0.7]["advantage_max"] == pytest.approx(0.7)
    assert found[0.7]["grad_norm"] < 2 * found[0.5]["grad_norm"]
