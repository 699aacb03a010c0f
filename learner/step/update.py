"""One optimizer update on a rank: immutable values, which each phase of a step returns anew.

All ranks go through the phases together: `paceline.learner.step.plan` makes updates, `paceline.learner.step.frozen` adds the log-probabilities
of the frozen policies and the limits that follow, `paceline.learner.step.assign_advantages` the advantages; then the trainer trains
each.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.learner.batch.samples import PackedBatch
from paceline.learner.objectives.base import Denominators


@dataclass(frozen=True)
class FrozenLogprobs:
    """Log-probabilities by the policies that do not move during a step, in nats; None where they are not needed."""

    proximal_N: Tensor | None = None
    """log π_prox."""
    reference_N: Tensor | None = None
    """log π_ref, of the policy as it was or of a teacher."""


@dataclass(frozen=True)
class States:
    """States of a micro-batch with the value model's values and its targets (M states, see `paceline.learner.step.critic`)."""

    packed: PackedBatch
    before_token_M: Tensor
    """True for the states before a token, False for the one after a sequence's last."""
    values_M: Tensor
    """Values at the start of the step."""
    returns_N: Tensor | None = None
    """Targets of the value model; None for a dummy."""
    scored_N: Tensor | None = None
    """False for tokens of sequences without a reward: they train nothing. None for a dummy."""


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass of a rank."""

    packed: PackedBatch
    indices: tuple[int, ...] = ()
    """Index in this rank's batch of each sequence in `packed`."""
    is_dummy: bool = False
    ages_N: Tensor | None = None
    """Steps between the version that sampled the token and this step; None for supervised data."""
    frozen: FrozenLogprobs = FrozenLogprobs()
    advantages_N: Tensor | None = None
    """None before `with_advantages`, and for supervised data."""
    states: States | None = None
    """None without a value model."""


@dataclass(frozen=True)
class Update:
    """One optimizer update of a rank, with the counts of the whole update."""

    micro_batches: tuple[MicroBatch, ...]
    denominators: Denominators
    m2_limit: float | None = None
    """`TokenArrays.m2_limit`."""
    batch_kl: float | None = None
    """`TokenArrays.batch_kl`."""
    num_scored_tokens: float = 0.0
    """Tokens of sequences with a reward, on all ranks: the value loss is their mean. 0 without a value model."""
