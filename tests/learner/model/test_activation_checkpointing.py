"""Each kind of activation checkpointing recomputes its operations, and nothing else changes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_policy import CPU, make_batch, make_spec
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.learner.batch.samples import pack_samples
from paceline.learner.model.policy import KEPT_OPERATIONS, load_policy, packed_logprobs

NORM = "aten::rsqrt"


class Calls(TorchDispatchMode):
    """Counts operations by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def backward_of(model_folder: Path, how: str, precision: str) -> tuple[Counter[str], dict[str, Tensor]]:
    """Return the operations of the backward pass, and the gradients."""
    policy = make_spec(model_folder, activation_checkpointing=how, precision=precision).policy
    model = load_policy(policy, CPU)
    logprobs_N, _ = packed_logprobs(
        model,
        pack_samples([s for s in make_batch() if len(s.completion_ids)], CPU),
        temperature=1.0,
        chunk_tokens=7,
    )
    with Calls() as calls:
        logprobs_N.sum().backward()  # type: ignore[no-untyped-call]
    gradients = {name: _local(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return calls.of, gradients


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_selective_recomputes_norms_but_neither_products_nor_attention(model: Path, precision: str) -> None:
    none, expected = backward_of(model, "none", precision)
    selective, of_selective = backward_of(model, "selective", precision)
    full, of_full = backward_of(model, "full", precision)
    for gradients in (of_selective, of_full):
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(gradients[name], value) for name, value in expected.items())

    def products(calls: Counter[str]) -> int:
        return sum(number for name, number in calls.items() if name in KEPT_OPERATIONS)

    assert products(selective) == products(none) > 0
    assert products(full) > products(selective)
    assert none[NORM] == 0
    assert selective[NORM] == full[NORM] > 0
