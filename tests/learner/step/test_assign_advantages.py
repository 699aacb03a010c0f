"""Every token gets the advantage of its sample; each phase leaves the values of the one before as they were."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tiny_policy import CPU, make_batch, make_spec

from learner.objectives import objective_of
from learner.step.assign_advantages import with_advantages
from learner.step.plan import plan_updates


def test_the_tokens_of_a_sample_get_its_own_advantage() -> None:
    spec, batch = make_spec(Path("nowhere"), train_mb_tokens=24), make_batch()
    planned = plan_updates(batch, 0, spec, objective_of(spec), CPU)
    (update,) = with_advantages(batch, planned, spec, CPU, None)
    assert len(update.micro_batches) > 1
    for micro in update.micro_batches:
        assert micro.advantages_N is not None
        samples = [batch[i] for i in micro.indices]
        expected_N = np.repeat([s.advantage for s in samples], [s.num_trained_tokens for s in samples])
        np.testing.assert_array_equal(micro.advantages_N.numpy(), expected_N.astype(np.float32))
    assert all(micro.advantages_N is None for micro in planned[0].micro_batches)


def test_examples_have_no_advantages() -> None:
    spec, batch = make_spec(Path("nowhere"), "sft"), make_batch(supervised=True)
    (update,) = with_advantages(batch, plan_updates(batch, 0, spec, objective_of(spec), CPU), spec, CPU, None)
    assert all(micro.advantages_N is None for micro in update.micro_batches)
