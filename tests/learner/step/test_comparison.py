"""Comparison of log-probabilities: what the sampler reported less what the learner computes before the step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_policy import CPU, batch_of, make_spec

from paceline.learner.batch.samples import pack_samples
from paceline.learner.model.policy import packed_logprobs
from paceline.learner.step.token_statistics import SamplerComparison, group_difference
from paceline.learner.step.trainer import Trainer


@pytest.mark.parametrize("policy", [{}, {"num_updates_per_step": 2, "proximal_policy": "exact"}])
def test_a_worker_that_adds_a_hundredth_is_found_and_the_step_is_the_same(
    model: Path, policy: dict[str, object]
) -> None:
    def trainer_of() -> Trainer:
        torch.manual_seed(0)
        updates = {k: v for k, v in policy.items() if k != "proximal_policy"}
        return Trainer(make_spec(model, train_mb_tokens=25, **updates), CPU)

    trainer, batch = trainer_of(), batch_of("dapo")
    wrong = {batch[0].group_id}
    exact = []
    with torch.no_grad():
        for sample in batch:
            if sample.num_trained_tokens:
                own_N = packed_logprobs(
                    trainer.model,
                    pack_samples([sample], CPU),
                    temperature=trainer.objective.temperature,
                    chunk_tokens=64,
                )[0].numpy()
                own_T = np.zeros(len(sample.completion_ids), np.float32)
                own_T[slice(None) if sample.trained_T is None else sample.trained_T] = own_N
                sample = replace(sample, behaviour_logprobs_T=own_T + np.float32(0.01 * (sample.group_id in wrong)))
            exact.append(sample)
    groups = {sample.group_id for sample in exact if sample.num_trained_tokens}
    trainer.comparison = comparison = SamplerComparison(groups)
    metrics = trainer.train_step(exact, 0)
    found = {each.group_id: each for each in comparison.results()}
    assert wrong <= found.keys() <= groups
    if not policy:
        assert found.keys() == groups
    for group_id, each in found.items():
        assert each.mean == pytest.approx(0.01 if group_id in wrong else 0.0, abs=1e-5)
        assert each.tokens == sum(s.num_trained_tokens for s in exact if s.group_id == group_id)
    again = trainer_of().train_step(exact, 0)
    assert metrics["loss"] == again["loss"]
    assert metrics["grad_norm"] == again["grad_norm"]


def test_the_standard_error_is_that_of_completions_where_their_tokens_err_together() -> None:
    together = group_difference(4, [np.full(10, 0.02), np.full(10, -0.02)])
    assert together.mean == pytest.approx(0.0)
    assert together.tokens == 20
    # Sums ±0.2 of two completions: √(0.08 · 2) / 20.
    assert together.standard_error == pytest.approx(0.02)
    apart = group_difference(4, [np.array([0.02, -0.02])] * 2)
    assert apart.standard_error == pytest.approx(0.01)
