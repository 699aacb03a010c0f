"""Every preset, from rewards to weights: the trainer makes good completions likelier than bad ones."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from tiny_policy import CPU, VOCABULARY, make_spec

from paceline.groups import Completion, Group, VersionSpan
from paceline.learner.batch.samples import pack_samples, sequences_from_groups
from paceline.learner.model.policy import packed_logprobs
from paceline.learner.step.trainer import Trainer
from paceline.spec.sections.loss import PresetName

TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def groups(model: Path) -> list[Group]:
    """Two prompts with four completions each, alternately good and bad, with the model's own log-probabilities."""
    rng = np.random.default_rng(3)
    trainer = Trainer(make_spec(model), CPU)
    groups = []
    for group_id in (1, 2):
        prompt_ids = rng.integers(0, VOCABULARY, 4).astype(np.int32)
        blank = [
            Completion(ids, np.zeros(len(ids), np.float32), (VersionSpan(1, 0, 0, len(ids)),), "stop")
            for ids in (rng.integers(0, VOCABULARY, n).astype(np.int32) for n in (5, 4, 3, 6))
        ]
        rewards_CF = np.array([[1.0], [0.0], [1.0], [0.0]], np.float32)
        group = Group(group_id, prompt_ids, tuple(blank), rewards_CF=rewards_CF)
        completions = []
        for completion, logprobs in zip(blank, logprobs_of(trainer, [group]), strict=True):
            completions.append(Completion(completion.token_ids, logprobs.astype(np.float32), completion.spans, "stop"))
        groups.append(Group(group_id, prompt_ids, tuple(completions), rewards_CF=rewards_CF))
    return groups


def logprobs_of(trainer: Trainer, groups: list[Group]) -> list[np.ndarray]:
    """[T] for each completion, in order."""
    packed = pack_samples(sequences_from_groups(groups, make_spec(Path("nowhere"))), CPU)
    with torch.no_grad():
        logprobs_N, _ = packed_logprobs(trainer.model, packed, temperature=TEMPERATURE, chunk_tokens=64)
    return [logprobs_N[packed.sequence_N == s].numpy() for s in range(len(packed.group_ids_S))]


def gap(trainer: Trainer, groups: list[Group]) -> float:
    """Mean log-probability per token of the good completions less that of the bad ones, in nats."""
    means = [logprobs.mean() for logprobs in logprobs_of(trainer, groups)]
    return float(np.mean(means[0::2]) - np.mean(means[1::2]))


@pytest.mark.parametrize("preset", get_args(PresetName))
def test_good_becomes_likelier_than_bad(preset: str, model: Path, groups: list[Group]) -> None:
    spec = make_spec(
        model,
        num_updates_per_step=2,
        loss_fn={"preset": preset},
        optimizer={"lr": 3e-3, "weight_decay": 0.0},
    )
    trainer = Trainer(spec, CPU)
    before = gap(trainer, groups)
    for step in range(3):
        trainer.train_step(sequences_from_groups(groups, spec), step)
    assert gap(trainer, groups) > before + 0.02
