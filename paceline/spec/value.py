"""`value`: the value model of PPO (`grpo.advantage: gae`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from paceline.spec.sections.base import NonNegativeInt, PositiveFloat, Section
from paceline.spec.sections.policy import OptimizerSection


class ValueSection(Section):
    """A second model of the learner that predicts the reward to come at every token; never published, only saved."""

    model_name: str | None = None
    """Initial model: a language model or a reward model, with the policy's tokens, as a folder, fsspec URL, hub name or
    `run:ID`; default policy.model_name."""
    optimizer: OptimizerSection = OptimizerSection(lr=1e-5)
    """Optimizer of the value model; the shape of the schedule is the policy's."""
    max_grad_norm: PositiveFloat = 1.0
    """Its gradients are clipped to this global norm."""
    cliprange: PositiveFloat | None = 0.2
    """A value may move this far from the start of the step before its gain no longer counts; null: no bound."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """λ: 0 trusts the next token's value, 1 the reward alone."""
    gae_gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """γ: discount of a token."""
    policy_training_start_step: NonNegativeInt = 0
    """Before this step only the value model learns."""
