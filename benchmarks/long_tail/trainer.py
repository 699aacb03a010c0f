"""A trainer whose step costs time by its tokens in place of arithmetic; its batches, metrics, weights and files are real."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from paceline.learner.batch.samples import TrainingSample
from paceline.learner.step.plan import batch_metrics, plan_updates
from paceline.learner.step.trainer import Trainer

VARIABLE = "LONG_TAIL_TOKENS_PER_S"
"""Environment variable with the tokens that the learner trains in a second."""


class TimedTrainer(Trainer):
    """`paceline.learner.step.trainer.Trainer` that sleeps instead of its passes and its optimizer's step."""

    def train_step(self, batch: Sequence[TrainingSample], step: int) -> dict[str, float]:
        """As `Trainer.train_step`; loss and gradient norm are 0."""
        started_s = time.perf_counter()
        updates = plan_updates(batch, step, self.spec, self.objective, self.device, 1)
        metrics = batch_metrics(batch, updates, step, self.spec, self._shape, self.device)
        time.sleep(metrics["tokens"] / float(os.environ[VARIABLE]))
        self.skipped = []
        return {"loss": 0.0, "grad_norm": 0.0, **metrics, "step_s": time.perf_counter() - started_s}
