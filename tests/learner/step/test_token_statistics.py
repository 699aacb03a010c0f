"""What a step computes of single tokens: equal to the model's own numbers before the step, and no other step by it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_policy import CPU, batch_of, make_spec

from paceline.learner.batch.samples import pack_samples
from paceline.learner.model.policy import packed_logprobs
from paceline.learner.step.token_statistics import TokenStatistics
from paceline.learner.step.trainer import Trainer


def trainer_of(model: Path, **policy: object) -> Trainer:
    torch.manual_seed(0)
    return Trainer(make_spec(model, train_mb_tokens=25, **policy), CPU)


def test_numbers_are_those_of_the_policy_that_trains(model: Path) -> None:
    batch = batch_of("dapo")
    mask = np.arange(len(batch[0].completion_ids)) % 2 == 0
    batch[0] = replace(batch[0], trained_T=mask)
    chosen = {batch[0].group_id, batch[-1].group_id}
    trainer = trainer_of(model)
    expected = {}
    with torch.no_grad():
        for place, sample in enumerate(batch):
            if not sample.num_trained_tokens:
                continue
            packed = pack_samples([sample], CPU)
            expected[place] = [
                values.numpy()
                for values in packed_logprobs(
                    trainer.model, packed, temperature=trainer.objective.temperature, chunk_tokens=64
                )
            ]
    trainer.token_statistics = statistics = TokenStatistics(chosen)
    metrics = trainer.train_step(batch, 0)
    found = statistics.of(batch)
    places = [place for place, sample in enumerate(batch) if sample.group_id in chosen]
    assert [each.group_id for each in found] == [batch[place].group_id for place in places]
    for group_id in chosen:
        members = [each.index for each in found if each.group_id == group_id]
        assert members == list(range(len(members)))
    for each, place in zip(found, places, strict=True):
        sample = batch[place]
        trains = slice(None) if sample.trained_T is None else sample.trained_T
        assert len(each.logprobs_T) == len(sample.completion_ids)
        np.testing.assert_allclose(each.logprobs_T[trains], expected[place][0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(each.entropies_T[trains], expected[place][1], rtol=1e-4, atol=1e-5)
    assert np.isnan(found[0].logprobs_T[~mask]).all()
    assert np.isnan(found[0].entropies_T[~mask]).all()
    again = trainer_of(model).train_step(batch, 0)
    assert {name: metrics[name] for name in ("loss", "grad_norm", "entropy")} == {
        name: again[name] for name in ("loss", "grad_norm", "entropy")
    }


@pytest.mark.parametrize("updates", [1, 2])
def test_every_sample_is_there_once_in_any_number_of_updates(model: Path, updates: int) -> None:
    batch = batch_of("dapo")
    trainer = trainer_of(model, num_updates_per_step=updates)
    trainer.token_statistics = statistics = TokenStatistics({sample.group_id for sample in batch})
    trainer.train_step(batch, 0)
    assert len(statistics.of(batch)) == sum(bool(sample.num_trained_tokens) for sample in batch)
