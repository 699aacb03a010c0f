"""The reference's answers: precomputed, or from the reward pool, they train as those of the learner's model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_policy import CPU, make_batch, make_spec

from paceline.data.tokens import load_tokenizer
from paceline.learner.objectives import objective_of
from paceline.learner.objectives.examples import ExampleSource
from paceline.learner.step.reference import LocalReference
from paceline.learner.step.trainer import Trainer
from paceline.reward.reference import ReferenceModel
from paceline.services.demo.task import make_model, make_tokenizer
from paceline.spec import RunSpec


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


@pytest.mark.parametrize("algorithm", ["grpo", "distillation"])
def test_a_reference_in_the_reward_pool_trains_as_one_in_the_learner(
    algorithm: str, model: Path, moved: Path, tmp_path: Path
) -> None:
    model, moved = (shutil.copytree(folder, tmp_path / folder.name) for folder in (model, moved))
    for folder in (model, moved):  # teacher and student are compared by their tokenizers
        make_tokenizer().save_pretrained(folder)

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
                replace(s, reference_logprobs_T=asked.logprobs(s.prompt_ids, [s.completion_ids])[0]) for s in batch
            ]
        trainer.train_step(batch, 0)
        return {n: v for n, v in trainer.train_step(batch, 1).items() if not n.endswith("_s")}

    by_learner, by_pool = metrics("learner"), metrics("reward")
    assert by_pool == pytest.approx(by_learner, rel=1e-4, abs=1e-5)
    assert by_pool["kl_teacher" if algorithm == "distillation" else "kl_reference"] != 0
