"""Weights of tokens by reduction."""

from __future__ import annotations

import pytest
import torch

from paceline.learner.objectives.base import Denominators, token_weights


@pytest.mark.parametrize(
    ("reduction", "weights"),
    [
        # Two sequences, of 1 and 3 tokens, in a batch of 5 sequences and 10 tokens; completions up to 8.
        ("grpo", [1 / 5, 1 / 15, 1 / 15, 1 / 15]),
        ("dapo", [1 / 10] * 4),
        ("dr_grpo", [1 / 40] * 4),
        ("bnpo", [1 / 8] * 4),  # 4 tokens here, 2 micro-batches
    ],
)
def test_reductions(reduction: str, weights: list[float]) -> None:
    counts = Denominators(tokens=10, sequences=5, max_completion_tokens=8, micro_batches=2)
    got_N = token_weights(torch.tensor([1.0, 3, 3, 3]), counts, reduction)
    torch.testing.assert_close(got_N, torch.tensor(weights))


@pytest.mark.parametrize("reduction", ["grpo", "dapo", "dr_grpo", "bnpo", "sequence_sum"])
def test_an_update_without_sequences_divides_by_nothing(reduction: str) -> None:
    counts = Denominators(tokens=0, sequences=0, max_completion_tokens=8, micro_batches=0)
    weights_N = token_weights(torch.ones(1), counts, reduction)
    assert (weights_N * 0.0).tolist() == [0.0], "the weights of a dummy are finite"
