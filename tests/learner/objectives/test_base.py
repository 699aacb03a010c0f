"""The promises that all objectives keep: shares of micro-batches add up, and a loss that is not finite names its example."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from preference_data import (
    BETA,
    EPSILON,
    FORMS,
    make_pairs,
)
from ragged_batch import f64
from tiny_policy import CPU, make_judged_batch, make_spec, save_tiny_policy
from torch import Tensor

from paceline.errors import NonFiniteLoss
from paceline.learner.objectives.base import metrics_from_sums
from paceline.learner.objectives.dpo import PairLogRatios, preference_loss
from paceline.learner.objectives.kto import kto_loss
from paceline.learner.objectives.orpo import orpo_loss
from paceline.learner.objectives.reward_model import reward_model_loss
from paceline.learner.step.trainer import Trainer


def shares(kind: str, pairs: PairLogRatios) -> Callable[[slice], Tensor]:
    """The loss of a part of the pairs; of all of them with `slice(None)`."""

    def share(part: slice) -> Tensor:
        one = PairLogRatios(*(getattr(pairs, name)[part] for name in PairLogRatios.__dataclass_fields__))
        match kind:
            case "kto":
                good_S = torch.tensor([True, False, False, True])
                return kto_loss(one.chosen_P, good_S[part], 0.2, 4, beta=BETA, undesirable_weight=1.5)
            case "orpo":
                return orpo_loss(-one.chosen_P.abs() - 0.1, -one.rejected_P.abs() - 0.1, one.weights_P, beta=BETA)
            case "rm":
                margins_P = f64([0.5, 0.0, 1.0, 0.0])[part]
                return reward_model_loss(
                    one.chosen_P, one.rejected_P, one.weights_P, margins_P=margins_P, centring=0.01
                )
            case _:
                smoothing = EPSILON if kind in ("conservative", "robust") else 0.0
                return preference_loss(one, kind, beta=BETA, label_smoothing=smoothing)  # type: ignore[arg-type]

    return share


@pytest.mark.parametrize("kind", [*FORMS, "kto", "orpo", "rm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shares_of_micro_batches_add_up(kind: str, dtype: torch.dtype) -> None:
    pairs = PairLogRatios(
        *(
            getattr(make_pairs(), name).detach().to(dtype).requires_grad_()
            for name in PairLogRatios.__dataclass_fields__
        )
    )
    share = shares(kind, pairs)
    whole, parts = share(slice(None)), share(slice(0, 1)) + share(slice(1, 4))
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(parts, whole, **tolerance)
    leaves = (pairs.chosen_P,) if kind == "kto" else (pairs.chosen_P, pairs.rejected_P)
    for one, other in zip(torch.autograd.grad(parts, leaves), torch.autograd.grad(whole, leaves), strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("algorithm", ["dpo", "orpo", "kto", "rm", "sft"])
def test_what_is_not_finite_names_its_example_and_moves_nothing(algorithm: str, tmp_path: Path) -> None:
    untied = save_tiny_policy(tmp_path / "policy", tied=False)
    trainer = Trainer(make_spec(untied, algorithm, train_mb_tokens=16), CPU)
    batch = make_judged_batch(algorithm)
    if algorithm == "sft":
        batch = [replace(s, label=None) for s in batch]
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


def test_metrics_of_nothing_are_nothing() -> None:
    assert metrics_from_sums({"tokens": 0.0, "entropy": 0.0}) == {}
