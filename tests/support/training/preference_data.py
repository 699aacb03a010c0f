"""Pairs of log-ratios worked out by hand, and sums of log-probabilities by plain transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from ragged_batch import f64
from tiny_policy import CPU
from transformers import Qwen3ForCausalLM

from paceline.learner.batch.samples import TrainingSample
from paceline.learner.objectives.dpo import PairLogRatios
from paceline.learner.step.trainer import Trainer
from paceline.spec import RunSpec

BETA, EPSILON = 0.5, 0.1
CHOSEN = [1.2, -0.8, 300.0, 0.0]
REJECTED = [0.2, 1.7, -300.0, 0.0]
CHOSEN_LENGTHS = [4, 1, 10, 0]
REJECTED_LENGTHS = [2, 5, 3, 0]
WEIGHTS = [0.5, 0.25, 0.125, 0.125]


def make_pairs() -> PairLogRatios:
    return PairLogRatios(
        f64(CHOSEN).requires_grad_(),
        f64(REJECTED).requires_grad_(),
        f64(CHOSEN_LENGTHS),
        f64(REJECTED_LENGTHS),
        f64(WEIGHTS),
    )


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else math.exp(x)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > -30 else x


Form = Callable[[float], tuple[float, float]]
"""d → (value, slope in d)."""


FORMS: dict[str, Form] = {
    "sigmoid": lambda d: (-log_sigmoid(BETA * d), -BETA * sigmoid(-BETA * d)),
    "conservative": lambda d: (
        -(1 - EPSILON) * log_sigmoid(BETA * d) - EPSILON * log_sigmoid(-BETA * d),
        -BETA * (1 - EPSILON) * sigmoid(-BETA * d) + BETA * EPSILON * sigmoid(BETA * d),
    ),
    "robust": lambda d: (
        (-(1 - EPSILON) * log_sigmoid(BETA * d) + EPSILON * log_sigmoid(-BETA * d)) / 0.8,
        (-BETA * (1 - EPSILON) * sigmoid(-BETA * d) - BETA * EPSILON * sigmoid(BETA * d)) / 0.8,
    ),
    "hinge": lambda d: (max(0.0, 1 - BETA * d), -BETA if BETA * d < 1 else 0.0),
    "ipo": lambda d: ((d - 1.0) ** 2, 2 * (d - 1.0)),
}


def sums_of(folder: Path, batch: list[TrainingSample]) -> list[float]:
    """Σ_t log π of each sequence, by an unpacked forward of the model as transformers has it."""
    plain = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    sums = []
    for sequence in batch:
        ids = torch.from_numpy(np.concatenate((sequence.prompt_ids, sequence.completion_ids)).astype(np.int64))
        with torch.no_grad():
            logp_RV = plain(ids[None]).logits[0].log_softmax(-1)
        places = torch.arange(len(sequence.prompt_ids) - 1, len(ids) - 1)
        sums.append(float(logp_RV[places, ids[places + 1]].sum()))
    return sums


def trainer_of(spec: RunSpec, moved: Path) -> Trainer:
    """The reference is the spec's model, the policy the moved one."""
    trainer = Trainer(spec, CPU)
    trainer.model.load_state_dict(Qwen3ForCausalLM.from_pretrained(moved).state_dict())
    return trainer
