"""Steps on preference data against plain transformers: sums over completions, pairs, z, scores, the precomputed reference."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ragged_batch import COUNTS, CURRENT, LOG_RHO, SHORT_LOG_R, TOKENS, batch, f64, part_of
from tiny_policy import CPU, make_batch, make_judged_batch, make_spec, save_tiny_policy
from transformers import AutoModelForSequenceClassification, Qwen3ForCausalLM

from learner.batch.examples import ExampleSource
from learner.batch.samples import TrainingSample, pack_row, sequences_from_groups
from learner.objectives import objective_of
from learner.objectives.base import Denominators, TokenArrays
from learner.objectives.distillation import distillation_advantages
from learner.objectives.pairs import pairs_of
from learner.step.reference import LocalReference
from learner.step.trainer import Trainer
from paceline.data.tokens import load_tokenizer
from paceline.errors import InvalidInput, NonFiniteLoss
from paceline.groups import Completion, Group, VersionSpan
from paceline.spec import RunSpec
from reward.reference import ReferenceModel
from services.demo.model import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of that shape: what the policy has become, so that no log-ratio is 0."""
    return save_tiny_policy(tmp_path_factory.mktemp("moved"), seed=1)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def sums_of(folder: Path, batch: list[TrainingSample]) -> list[float]:
    """Σ_t log π of each sequence, by an unpacked forward of the model as transformers has it."""
    plain = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    sums = []
    for sequence in batch:
        ids = torch.from_numpy(
            np.concatenate((sequence.prompt_ids, sequence.completion_ids)).astype(np.int64)
        )
        with torch.no_grad():
            logp_RV = plain(ids[None]).logits[0].log_softmax(-1)
        places = torch.arange(len(sequence.prompt_ids) - 1, len(ids) - 1)
        sums.append(float(logp_RV[places, ids[places + 1]].sum()))
    return sums


def trainer_of(spec: RunSpec, moved: Path) -> Trainer:
    """The reference is the spec's model, the policy the moved one."""
    trainer = Trainer(spec, CPU)
    trainer.model.load_state_dict(Qwen3ForCausalLM.from_pretrained(moved).state_dict())
    return trainer


def test_dpo_is_its_formula_on_completions(model: Path, moved: Path) -> None:
    section = {"reference_policy_kl_penalty": 0.4, "sft_loss_weight": 0.25, "preference_loss_weight": 2.0}
    batch = make_judged_batch("dpo")
    metrics = trainer_of(make_spec(model, "dpo", sections={"dpo": section}), moved).evaluate(batch)
    current, reference = sums_of(moved, batch), sums_of(model, batch)
    ratios = [c - r for c, r in zip(current, reference, strict=True)]
    # Group 100 has places 0 (chosen), 1 and 2 (rejected); the others are pairs.
    pairs = [(0, 1, 1 / 8), (0, 2, 1 / 8), (3, 4, 1 / 4), (5, 6, 1 / 4), (7, 8, 1 / 4)]
    preference = sum(-w * log_sigmoid(0.4 * (ratios[c] - ratios[r])) for c, r, w in pairs)
    likelihood = -sum(current[place] for place in (0, 3, 5, 7)) / 4
    assert metrics["preference_loss"] == pytest.approx(preference, rel=1e-4)
    assert metrics["sft_loss"] == pytest.approx(likelihood, rel=1e-4)
    assert metrics["loss"] == pytest.approx(2 * preference + 0.25 * likelihood, rel=1e-4)
    margin = sum(w * 0.4 * (ratios[c] - ratios[r]) for c, r, w in pairs)
    assert metrics["margin"] == pytest.approx(margin, rel=1e-3, abs=1e-5)
    assert metrics["accuracy"] == pytest.approx(sum(w * (ratios[c] > ratios[r]) for c, r, w in pairs))


def test_kto_measures_its_kl_on_completions_of_other_prompts(model: Path, moved: Path) -> None:
    batch = make_judged_batch("kto")
    spec = make_spec(
        model, "kto", sections={"kto": {"reference_policy_kl_penalty": 0.2, "undesirable_weight": 1.5}}
    )
    metrics = trainer_of(spec, moved).evaluate(batch)
    ratios = [c - r for c, r in zip(sums_of(moved, batch), sums_of(model, batch), strict=True)]
    verdicts = [s.verdict for s in batch if s.verdict is not None]
    foreign = [x for x, v in zip(ratios, verdicts, strict=True) if v.mismatched]
    kl = sum(foreign) / len(foreign)
    assert metrics["batch_kl"] == pytest.approx(kl, rel=1e-3, abs=1e-4)
    loss, own = 0.0, [(x, v) for x, v in zip(ratios, verdicts, strict=True) if not v.mismatched]
    for ratio, verdict in own:
        sign, weight = (1, 1.0) if verdict.good else (-1, 1.5)
        loss += weight * (1 - 1 / (1 + math.exp(-0.2 * sign * (ratio - max(kl, 0.0)))))
    assert metrics["loss"] == pytest.approx(loss / len(own), rel=1e-4)


def test_orpo_is_its_formula_on_completions(model: Path) -> None:
    batch = make_judged_batch("orpo")
    metrics = Trainer(make_spec(model, "orpo", sections={"orpo": {"odds_ratio_weight": 0.5}}), CPU).evaluate(
        batch
    )
    means = [total / len(s.completion_ids) for total, s in zip(sums_of(model, batch), batch, strict=True)]
    odds = [mean - math.log1p(-math.exp(mean)) for mean in means]
    pairs = [(0, 1, 1 / 8), (0, 2, 1 / 8), (3, 4, 1 / 4), (5, 6, 1 / 4), (7, 8, 1 / 4)]
    term = sum(-0.5 * w * log_sigmoid(odds[c] - odds[r]) for c, r, w in pairs)
    assert metrics["preference_loss"] == pytest.approx(term, rel=1e-4)
    assert metrics["loss"] == pytest.approx(term - sum(means[p] for p in (0, 3, 5, 7)) / 4, rel=1e-4)


def test_a_score_is_what_transformers_gives_for_the_whole_text(model: Path) -> None:
    torch.manual_seed(3)
    trainer = Trainer(make_spec(model, "rm", sections={"rm": {"centring": 0.1}}), CPU)
    plain = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    plain.load_state_dict(trainer.model.state_dict())
    batch = make_judged_batch("rm")
    with torch.no_grad():
        scores = [
            float(plain(torch.from_numpy(s.prompt_ids.astype(np.int64))[None]).logits[0, 0]) for s in batch
        ]
    pairs = [(0, 1, 1 / 8), (0, 2, 1 / 8), (3, 4, 1 / 4), (5, 6, 1 / 4), (7, 8, 1 / 4)]
    loss = sum(
        w * (-log_sigmoid(scores[c] - scores[r] - 0.5) + 0.1 * (scores[c] + scores[r]) ** 2)
        for c, r, w in pairs
    )
    assert trainer.evaluate(batch)["loss"] == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("algorithm", ["dpo", "orpo", "kto", "rm", "sft"])
def test_what_is_not_finite_names_its_example_and_moves_nothing(algorithm: str, tmp_path: Path) -> None:
    untied = save_tiny_policy(tmp_path / "policy", tied=False)
    trainer = Trainer(make_spec(untied, algorithm, train_mb_tokens=16), CPU)
    batch = make_judged_batch(algorithm)
    if algorithm == "sft":
        batch = [replace(s, verdict=None) for s in batch]
    # Token 22 occurs in one example alone; its embedding is broken, so everything after it is.
    batch = [replace(s, prompt_ids=s.prompt_ids % 22, completion_ids=s.completion_ids % 22) for s in batch]
    marked = next(i for i, s in enumerate(batch) if s.group_id == 102)
    batch[marked] = replace(batch[marked], prompt_ids=np.append(np.int32(22), batch[marked].prompt_ids))
    with torch.no_grad():
        trainer.model.get_input_embeddings().weight[22] = math.nan  # type: ignore[index, operator]
    with pytest.raises(NonFiniteLoss) as caught:
        trainer.train_step(batch, 0)
    assert caught.value.group_ids == (102,)
    assert trainer.optimizer.state == {}
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_a_pair_must_be_whole_in_its_micro_batch() -> None:
    batch = make_judged_batch("dpo")
    with pytest.raises(ValueError, match=r"examples \[100\]"):
        pairs_of(pack_row(batch[:1] + batch[3:5], CPU), 2)


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_the_precomputed_reference_gives_the_same_steps(algorithm: str, tmp_path: Path) -> None:
    make_model(tmp_path / "model", seed=0, hidden=32, layers=1, heads=2)
    rows = [
        {
            "prompt": f"{a:02d}+01=",
            "chosen": f"{a:03d}",
            "rejected": [f"{a + 1:03d}", "9"],
            "completion": f"{3 * a}",
            "label": a % 3 == 0,
        }
        for a in range(7)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def losses(precompute: bool) -> list[float]:
        spec = RunSpec.model_validate(
            {
                "algorithm": algorithm,
                "policy": {
                    "model_name": str(tmp_path / "model"),
                    "max_total_sequence_length": 32,
                    "train_mb_tokens": 40,
                    "optimizer": {"lr": 1e-2},
                },
                "data": {"train": str(tmp_path / "pairs.jsonl")},
                algorithm: {"num_examples_per_step": 4, "max_num_steps": 4, "precompute": precompute},
            }
        )
        source = ExampleSource(spec, load_tokenizer(spec.policy), objective_of(spec))
        trainer = Trainer(spec, CPU)
        assert isinstance(trainer.reference, LocalReference) != precompute
        trainer.reference.prepare(source, rank=0)
        return [trainer.train_step(source.of_step(step, 0, 1), step)["loss"] for step in range(4)]

    asked, known = losses(False), losses(True)  # 16 examples from 7 rows: they come again, beside others
    assert known == pytest.approx(asked, rel=1e-5)
    assert len(set(known)) == 4


@pytest.mark.parametrize("kind", ["reverse", "forward", "mixed"])
def test_distillation_advantages_give_the_kls_gradient_on_average(kind: str) -> None:
    """Over all tokens v of one place, weighted by π(v): Σ_v π(v)·A(v)·∇log π(v) is minus the KL's gradient."""
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.randn(9, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher_V = torch.randn(9, generator=generator, dtype=torch.float64).log_softmax(0)
    current_V = logits_V.log_softmax(0)
    advantages_V = distillation_advantages(current_V, teacher_V, kind, 0.3, max_ratio=1e9)
    surrogate = -(current_V.detach().exp() * advantages_V * current_V).sum()
    reverse = (current_V.exp() * (current_V - teacher_V)).sum()
    forward = (teacher_V.exp() * (teacher_V - current_V)).sum()
    kl = {"reverse": reverse, "forward": forward, "mixed": 0.3 * forward + 0.7 * reverse}[kind]
    (got,) = torch.autograd.grad(surrogate, logits_V, retain_graph=True)
    (want,) = torch.autograd.grad(kl, logits_V)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)


def test_the_forward_ratio_is_bounded() -> None:
    far = distillation_advantages(torch.tensor([-20.0]), torch.tensor([-0.1]), "forward", 0.5, max_ratio=10.0)
    assert far.item() == pytest.approx(9.0)


@pytest.mark.parametrize("kind", ["reverse", "forward", "mixed"])
@pytest.mark.parametrize("parts", [[[0, 1, 2]], [[0, 2], [1]]], ids=["whole", "two micro-batches"])
def test_distillation_on_a_ragged_batch_of_older_samples(kind: str, parts: list[list[int]]) -> None:
    delta = [0.4, -0.7, 3.0, -2.0, 9.0, 0.0]
    """log π_T - log π; e^3 and e^9 are beyond the forward ratio's bound of 10."""
    forward = [min(math.exp(d), 10.0) - 1 for d in delta]
    worth = {
        "reverse": delta,
        "forward": forward,
        "mixed": [0.25 * f + 0.75 * d for f, d in zip(forward, delta, strict=True)],
    }[kind]
    # One update: r = 1, so each token's slope is -min(π/μ, 2)·A over the batch's tokens; the value is the same.
    log_rho = [r + rho for r, rho in zip(SHORT_LOG_R, LOG_RHO, strict=True)]
    slopes = [-min(math.exp(x), 2.0) * a / TOKENS for x, a in zip(log_rho, worth, strict=True)]
    section = {"teacher_model_name": "teacher", "kl_type": kind, "mixed_kl_weight": 0.25}
    objective = objective_of(make_spec(Path("none"), "distillation", sections={"distillation": section}))
    base = replace(
        batch(SHORT_LOG_R),
        reference_N=f64(CURRENT) + f64(delta),
        ages_N=torch.zeros(TOKENS),
    )
    current_N = f64(CURRENT).requires_grad_()
    row = pack_row(make_batch()[:1], CPU)  # nothing of it is read
    results = []
    for part in parts:
        tokens = replace(part_of(base, current_N, part), proximal_N=None)
        results.append(objective.loss(tokens, row, COUNTS))
    loss = torch.stack([result.loss for result in results]).sum()
    (gradient_N,) = torch.autograd.grad(loss, current_N)
    assert loss.item() == pytest.approx(math.fsum(slopes), rel=1e-9)
    assert gradient_N.tolist() == pytest.approx(slopes, rel=1e-9, abs=1e-12)
    kl = sum(result.sums["kl_teacher"].item() for result in results)
    assert kl == pytest.approx(-math.fsum(delta))


def test_distillation_ignores_the_rewards(model: Path) -> None:
    row = pack_row(
        [
            TrainingSample(
                1,
                np.array([1, 2], np.int32),
                np.array([3, 4], np.int32),
                np.full(2, -1.0, np.float32),
                versions_T=np.zeros(2, np.int32),
            )
        ],
        CPU,
    )
    sections: dict[str, Any] = {"distillation": {"teacher_model_name": "teacher"}}
    objective = objective_of(make_spec(model, "distillation", sections=sections))
    assert row.behaviour_N is not None
    tokens = TokenArrays(
        current_N=row.behaviour_N.clone().requires_grad_(),
        entropy_N=torch.zeros(2),
        lengths_N=row.lengths_N,
        sequence_N=row.sequence_N,
        num_sequences=1,
        behaviour_N=row.behaviour_N,
        reference_N=torch.tensor([-0.5, -2.0]),
        advantages_N=torch.full((2,), 5.0),
    )
    result = objective.loss(tokens, row, Denominators(2, 1, 16, 1, 1))
    (gradient_N,) = torch.autograd.grad(result.loss, tokens.current_N)
    # -A/2 per token with A = log π_T - log π: 0.5 and -1.
    assert gradient_N.tolist() == pytest.approx([-0.25, 0.5])
    assert result.sums["kl_teacher"].item() == pytest.approx(0.5)


@pytest.mark.parametrize("algorithm", ["grpo", "distillation"])
def test_a_reference_in_the_reward_pool_trains_as_one_in_the_learner(
    algorithm: str, model: Path, moved: Path
) -> None:
    def metrics(pool: str) -> dict[str, float]:
        sections = {"distillation": {"teacher_model_name": str(moved), "teacher_pool": pool}}
        loss_fn = {"reference_policy_kl_penalty": 0.3, "reference_policy_pool": pool}
        spec = make_spec(
            model,
            algorithm,
            loss_fn=loss_fn if algorithm == "grpo" else {},
            sections=sections if algorithm == "distillation" else {},
            num_updates_per_step=2,
        )
        trainer = Trainer(spec, CPU)
        assert isinstance(trainer.reference, LocalReference) == (pool == "learner")
        batch = make_batch()
        if pool == "reward":
            frozen = spec.frozen_policy
            assert frozen is not None
            asked = ReferenceModel(frozen, spec.policy.generation.temperature)
            batch = [
                replace(s, reference_logprobs_T=asked.logprobs(s.prompt_ids, [s.completion_ids])[0])
                for s in batch
            ]
        trainer.train_step(batch, 0)
        return {n: v for n, v in trainer.train_step(batch, 1).items() if not n.endswith("_s")}

    by_learner, by_pool = metrics("learner"), metrics("reward")
    assert by_pool == pytest.approx(by_learner, rel=1e-4, abs=1e-5)
    assert by_pool["kl_teacher" if algorithm == "distillation" else "kl_reference"] != 0


def test_groups_without_the_pools_answers_are_refused(model: Path) -> None:
    spec = make_spec(
        model,
        "distillation",
        sections={"distillation": {"teacher_model_name": "t", "teacher_pool": "reward"}},
    )
    ids = np.array([3, 4], np.int32)
    completion = Completion(ids, np.full(2, -1, np.float32), (VersionSpan(1, 0, 0, 2),), "stop")
    group = Group(9, ids, (completion,), rewards_CF=np.ones((1, 1), np.float32))
    with pytest.raises(InvalidInput, match="group 9 has no log-probabilities of the reference"):
        sequences_from_groups([group], spec)
    said = replace(completion, reference_logprobs=np.array([-0.5, -2], np.float32))
    (sequence,) = sequences_from_groups([replace(group, completions=(said,))], spec)
    row = pack_row([sequence], CPU)
    assert row.reference_N is not None
    assert row.reference_N.tolist() == [-0.5, -2]
