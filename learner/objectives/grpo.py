"""`grpo`: the policy loss on rollouts, with the advantages of `paceline.learner.step.assign_advantages`."""

from __future__ import annotations

import numpy as np

from paceline.learner.batch.samples import PackedBatch, TrainingSample
from paceline.learner.objectives.base import Denominators, LossResult, Objective, TokenArrays
from paceline.learner.objectives.policy import policy_loss
from paceline.spec import RunSpec


class Grpo(Objective):
    """GRPO and its relatives. Samples come from groups (`paceline.learner.batch.samples.sequences_from_groups`)."""

    def __init__(self, spec: RunSpec) -> None:
        self._loss_fn = spec.loss_fn
        self.temperature = spec.policy.generation.temperature
        self.with_entropy_gradient = spec.loss_fn.entropy_bonus > 0

    def dummy(self) -> list[TrainingSample]:
        zero, known_T = np.zeros(1, np.int32), np.zeros(1, np.float32)
        return [TrainingSample(-1, zero, zero, known_T, versions_T=zero, reference_logprobs_T=known_T)]

    def loss(self, tokens: TokenArrays, packed: PackedBatch, counts: Denominators) -> LossResult:
        return policy_loss(tokens, counts, self._loss_fn)
