"""Offline GRPO: the ratio to the recorded policy, the starting policy as behaviour policy, and a run that learns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from paceline.data.tokens import load_tokenizer
from paceline.errors import InvalidInput, SpecError
from paceline.learner.batch.samples import TrainingSample
from paceline.learner.objectives.examples import ExampleSource
from paceline.learner.step.trainer import Trainer
from paceline.services.demo.task import make_model
from paceline.spec import RunSpec
from paceline.spec.reading import parse_spec

CPU = torch.device("cpu")
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, seed=0, hidden=32, layers=1, heads=2)
    return folder


def spec_of(model: Path, path: Path, rows: list[dict[str, Any]], **sections: Any) -> RunSpec:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return parse_spec(
        {
            "algorithm": "offline_grpo",
            "policy": {
                "model_name": str(model),
                "max_total_sequence_length": 32,
                "optimizer": {"lr": 0.01},
                "generation": {"temperature": TEMPERATURE, "max_new_tokens": 8},
                **sections.pop("policy", {}),
            },
            "data": {"train": str(path), "validation": str(path)},
            "offline_grpo": {"num_examples_per_step": 6, "max_num_steps": 12, "val_at_end": True},
            **sections,
        }
    )


def texts() -> list[dict[str, Any]]:
    return [
        {"prompt": f"{n}+1=", "completion": completion, "final_reward": reward}
        for n in range(6)
        for completion, reward in ((str(n + 1), 1.0), ("0", 0.0), ("77", 0.0))
    ]


def prepared(spec: RunSpec) -> tuple[Trainer, ExampleSource]:
    trainer = Trainer(spec, CPU)
    source = ExampleSource(spec, load_tokenizer(spec.policy), trainer.objective)
    trainer.reference.prepare(source, 0)
    return trainer, source


def exported(trainer: Trainer, source: ExampleSource) -> list[dict[str, Any]]:
    """Rows as `paceline traces export` writes them, with the starting policy's log-probabilities."""
    rows = []
    for row in range(len(source)):
        for trace, sample in zip(texts()[3 * row : 3 * row + 3], source.of_row(row), strict=True):
            assert sample.behaviour_logprobs_T is not None
            rows.append(
                {
                    **trace,
                    "group_id": row,
                    "prompt_ids": sample.prompt_ids.tolist(),
                    "token_ids": sample.completion_ids.tolist(),
                    "logprobs": sample.behaviour_logprobs_T.tolist(),
                    "versions": [0] * len(sample.completion_ids),
                }
            )
    return rows


def test_texts_take_the_starting_policy_as_behaviour_policy(model: Path, tmp_path: Path) -> None:
    trainer, source = prepared(spec_of(model, tmp_path / "texts.jsonl", texts()))
    samples = source.of_step(0, 0, 1)
    assert all(sample.behaviour_logprobs_T is not None for sample in samples)
    ids = np.concatenate((samples[0].prompt_ids, samples[0].completion_ids))
    plain = Qwen3ForCausalLM.from_pretrained(model)
    logits = plain(torch.tensor(ids[None].astype(np.int64))).logits[0].float() / TEMPERATURE
    expected = logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:].astype(np.int64))]
    np.testing.assert_allclose(
        samples[0].behaviour_logprobs_T,
        expected[len(samples[0].prompt_ids) - 1 :].detach().numpy(),
        atol=1e-5,
    )
    metrics = trainer.train_step(samples, 0)
    assert metrics["ratio_behaviour"] == pytest.approx(1.0, abs=1e-4)
    assert trainer.train_step(source.of_step(1, 0, 1), 1)["kl_behaviour"] > 1e-6


def test_an_export_keeps_its_behaviour_policy(model: Path, tmp_path: Path) -> None:
    trainer, source = prepared(spec_of(model, tmp_path / "texts.jsonl", texts()))
    rows = exported(trainer, source)
    spec = spec_of(model, tmp_path / "export.jsonl", rows)
    again, samples_of = prepared(spec)
    metrics = again.train_step(samples_of.of_step(0, 0, 1), 0)
    assert metrics["ratio_behaviour"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["effective_sample_size"] == pytest.approx(1.0, abs=1e-4)
    # Another recorded policy shows in the ratio, so nothing is computed again.
    other = [{**row, "logprobs": [x - 0.5 for x in row["logprobs"]]} for row in rows]
    trainer, samples_of = prepared(spec_of(model, tmp_path / "other.jsonl", other))
    metrics = trainer.train_step(samples_of.of_step(0, 0, 1), 0)
    assert metrics["ratio_behaviour"] == pytest.approx(float(np.exp(0.5)), abs=1e-3)


def test_advantages_are_relative_to_the_prompt(model: Path, tmp_path: Path) -> None:
    spec = spec_of(model, tmp_path / "texts.jsonl", texts())
    dr_grpo = spec.model_copy(update={"offline_grpo": spec.offline_grpo.model_copy(update={"advantage": "dr_grpo"})})
    _, source = prepared(dr_grpo)
    mean = (1.0 + 0.0 + 0.0) / 3
    for row in range(len(source)):
        found = [sample.advantage for sample in source.of_row(row)]
        assert found == pytest.approx([1.0 - mean, -mean, -mean])


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"policy": {"num_updates_per_step": 2}},
        {"loss_fn": {"reference_policy_kl_penalty": 0.05}},
        {"loss_fn": {"ratio_anchor": "behaviour", "truncated_importance_sampling_ratio": None}},
    ],
)
def test_training_orders_the_completions_by_their_rewards(
    model: Path, tmp_path: Path, sections: dict[str, Any]
) -> None:
    spec = spec_of(model, tmp_path / "texts.jsonl", texts(), **sections)
    trainer, source = prepared(spec)
    held_out = ExampleSource(spec, load_tokenizer(spec.policy), trainer.objective, validation=True)
    trainer.reference.prepare(held_out, 0)
    for step in range(spec.max_num_steps):
        trainer.train_step(source.of_step(step, 0, 1), step)
    after = trainer.evaluate(held_out.held_out(0, 1))
    assert after["accuracy"] > 0.8
    assert after["sequences"] == 18


def test_a_trace_that_is_too_long_is_refused_with_its_row(model: Path, tmp_path: Path) -> None:
    rows = texts()
    rows[4]["completion"] = "7" * 40
    trainer = Trainer(spec := spec_of(model, tmp_path / "texts.jsonl", rows), CPU)
    source = ExampleSource(spec, load_tokenizer(spec.policy), trainer.objective)
    with pytest.raises(InvalidInput, match=r"row 1 of .*max_total_sequence_length is 32"):
        source.of_row(1)


def test_settings_that_traces_have_no_values_for_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="proximal_policy 'log_linear' with algorithm 'offline_grpo'"):
        spec_of(model, tmp_path / "texts.jsonl", texts(), loss_fn={"proximal_policy": "log_linear"})


def test_a_dummy_has_what_the_loss_reads(model: Path, tmp_path: Path) -> None:
    trainer, _ = prepared(spec_of(model, tmp_path / "texts.jsonl", texts()))
    (dummy,) = trainer.objective.dummy()
    assert isinstance(dummy, TrainingSample)
    assert trainer.train_step([replace(dummy, group_id=1, advantage=1.0)], 0)["tokens"] == 1
