"""The supervised loss against hand-made numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.learner.batch.samples import TrainingSample, pack_samples
from paceline.learner.objectives.base import Denominators, TokenArrays
from paceline.learner.objectives.sft import sft_loss


def logs(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_supervised_loss_is_the_mean_over_the_batch() -> None:
    current_N = logs(0.5, 0.25).requires_grad_()
    tokens = TokenArrays(current_N, torch.zeros(2), torch.full((2,), 2.0), torch.zeros(2, dtype=torch.int64), 1)
    counts = Denominators(tokens=4, sequences=2, max_completion_tokens=8, micro_batches=2)
    result = sft_loss(tokens, counts)
    (grad_N,) = torch.autograd.grad(result.loss, current_N)
    assert result.loss.item() == pytest.approx(3 * math.log(2) / 4)
    assert grad_N.tolist() == pytest.approx([-0.25, -0.25])


def test_supervised_loss_of_ragged_sequences_with_tokens_that_do_not_train() -> None:
    """Six of eight tokens train, of three sequences in two micro-batches; the fourth trains nothing."""
    ids = [np.arange(n, dtype=np.int32) for n in (3, 2, 3, 0)]
    masks = [np.array(m, bool) for m in ([1, 0, 1], [1, 1], [0, 1, 1], [])]
    sequences = [
        TrainingSample(i, np.array([7], np.int32), one, trained_T=mask)
        for i, (one, mask) in enumerate(zip(ids, masks, strict=True))
    ]
    logprobs = [[-0.1, -40.0], [-0.3, -2.0], [-0.5, -0.6]]
    counts = Denominators(tokens=6, sequences=4, max_completion_tokens=8, micro_batches=2)
    total, slopes = 0.0, []
    for places in ([0, 2], [1]):
        packed = pack_samples([sequences[place] for place in places], torch.device("cpu"))
        assert packed.targets_N.tolist() == [int(t) for p in places for t in ids[p][masks[p]]]
        current_N = torch.tensor([x for p in places for x in logprobs[p]], dtype=torch.float64)
        tokens = TokenArrays(
            current_N.requires_grad_(),
            torch.zeros(len(current_N)),
            packed.lengths_N.double(),
            packed.sequence_N,
            len(places),
        )
        loss = sft_loss(tokens, counts).loss
        slopes += torch.autograd.grad(loss, current_N)[0].tolist()
        total += loss.item()
    assert total == pytest.approx(43.5 / 6, rel=1e-9)
    assert slopes == pytest.approx([-1 / 6] * 6, rel=1e-9)
