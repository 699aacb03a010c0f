"""The phase of a step that asks the frozen policies, and finds the limit that follows from their log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.learner.batch.samples import PackedBatch
from paceline.learner.collectives import sum_over_ranks
from paceline.learner.objectives.corrections import m2_limit_of, second_moments
from paceline.learner.step.reference import Reference
from paceline.learner.step.update import FrozenLogprobs, Update
from paceline.spec import RunSpec


@torch.no_grad()
def with_frozen_logprobs(
    updates: Sequence[Update],
    spec: RunSpec,
    current: Callable[[PackedBatch], tuple[Tensor, Tensor]],
    reference: Reference,
) -> list[Update]:
    """Return the updates with the frozen log-probabilities of each micro-batch: log π_prox, which is `current` before the
    first update, where the step needs it; log π_ref where each token needs it.
    """
    with_frozen = []
    for update in updates:
        micro_batches = []
        for micro in update.micro_batches:
            proximal_N = current(micro.packed)[0] if _needs_proximal(spec) else None
            frozen = FrozenLogprobs(proximal_N, reference.logprobs(micro.packed))
            micro_batches.append(replace(micro, frozen=frozen))
        with_frozen.append(replace(update, micro_batches=tuple(micro_batches)))
    return with_frozen


def with_m2_limit(updates: Sequence[Update], spec: RunSpec, device: torch.device) -> list[Update]:
    """Return the updates with M2PO's limit, found over the tokens of all of them on all ranks."""
    if not (spec.samples or spec.trains_traces) or spec.loss_fn.m2_threshold is None:
        return list(updates)
    micro_batches = [m for update in updates for m in update.micro_batches if not m.is_dummy]
    moments = [
        second_moments(given(m.frozen.proximal_N) - given(m.packed.behaviour_N)) for m in micro_batches
    ]
    limit = m2_limit_of(
        torch.cat([torch.zeros(0, device=device), *moments]), spec.loss_fn.m2_threshold, sum_over_ranks
    )
    return [replace(update, m2_limit=limit) for update in updates]


def _needs_proximal(spec: RunSpec) -> bool:
    """Return whether log π_prox differs from log π in the step, or is needed before the loss."""
    loss_fn = spec.loss_fn
    several = spec.policy.num_updates_per_step > 1 and loss_fn.proximal_policy == "exact"
    return (spec.samples or spec.trains_traces) and (
        several or loss_fn.m2_threshold is not None or loss_fn.use_kl_in_reward
    )


def given(values_N: Tensor | None) -> Tensor:
    """Return the values. Raises ValueError where an earlier phase of the step has not added them."""
    if values_N is None:
        raise ValueError("this micro-batch lacks values that an earlier phase of the step adds")
    return values_N
