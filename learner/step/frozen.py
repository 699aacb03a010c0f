"""The phase of a step that asks the frozen policies, and finds the limit that follows from their log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from learner.batch.samples import PackedBatch
from learner.collectives import sum_over_ranks
from learner.objectives.corrections import m2_limit_of, second_moments
from learner.step.update import FrozenLogprobs, Update
from paceline.spec import RunSpec


def needs_proximal(spec: RunSpec) -> bool:
    """Return whether log π_prox has to be computed before the first update."""
    loss_fn = spec.loss_fn
    several = spec.policy.num_updates_per_step > 1 and loss_fn.proximal_policy == "exact"
    return spec.samples and (several or loss_fn.m2_threshold is not None or loss_fn.use_kl_in_reward)


def with_frozen_logprobs(
    updates: Sequence[Update], ask: Callable[[PackedBatch], FrozenLogprobs]
) -> list[Update]:
    """Return the updates with the frozen log-probabilities of each micro-batch, which `ask` gives."""
    return [
        replace(
            update,
            micro_batches=tuple(replace(micro, frozen=ask(micro.packed)) for micro in update.micro_batches),
        )
        for update in updates
    ]


def with_m2_limit(updates: Sequence[Update], spec: RunSpec, device: torch.device) -> list[Update]:
    """Return the updates with M2PO's limit, found over the tokens of all of them on all ranks."""
    if not spec.samples or spec.loss_fn.m2_threshold is None:
        return list(updates)
    micro_batches = [m for update in updates for m in update.micro_batches if not m.is_dummy]
    moments = [
        second_moments(given(m.frozen.proximal_N) - given(m.packed.behaviour_N)) for m in micro_batches
    ]
    limit = m2_limit_of(
        torch.cat([torch.zeros(0, device=device), *moments]), spec.loss_fn.m2_threshold, sum_over_ranks
    )
    return [replace(update, m2_limit=limit) for update in updates]


def given(values_N: Tensor | None) -> Tensor:
    """Return the values. Raises ValueError where `with_frozen_logprobs` has not added them."""
    if values_N is None:
        raise ValueError("this micro-batch has no log-probabilities of the frozen policies")
    return values_N
