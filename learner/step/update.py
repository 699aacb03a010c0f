"""What one optimizer update trains on a rank, and what only the whole batch can say about it.

Promise: `settle` gives every token the same advantage and the same M2PO limit however the batch is split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from learner.advantages.group import Float64Array
from learner.advantages.whole_batch import (
    TOKEN_WHITENED,
    ScoredBatch,
    batch_advantages,
    clip_advantages,
    needs_whole_batch,
    whitened_token_advantages,
)
from learner.batch.samples import PackedBatch, TrainingSample
from learner.collectives import rows_of_all_ranks, sum_over_ranks
from learner.objectives.base import Denominators, LossResult
from learner.objectives.corrections import per_sequence, second_moments
from learner.objectives.policy import kl_to_reference
from paceline.errors import InvalidInput
from paceline.spec import RunSpec


@dataclass
class MicroBatch:
    """A packed row with what the frozen policies say about it."""

    row: PackedBatch
    places: tuple[int, ...] = ()
    """Index in this rank's batch of each sequence in the row."""
    is_dummy: bool = False
    ages_N: Tensor | None = None
    """Steps between the version that sampled the token and this step; None for supervised data."""
    proximal_N: Tensor | None = None
    reference_N: Tensor | None = None


@dataclass
class Update:
    """What one optimizer update trains on this rank, and what the whole update counts."""

    micro_batches: list[MicroBatch]
    denominators: Denominators
    m2_limit: float | None = None
    batch_kl: float | None = None
    results: list[LossResult] = field(default_factory=list)


def needs_proximal(spec: RunSpec) -> bool:
    """Whether the model has to be asked for log π_prox before the first update."""
    loss_fn = spec.loss_fn
    several = spec.policy.num_updates_per_step > 1 and loss_fn.proximal_policy == "exact"
    return spec.samples and (several or loss_fn.m2_threshold is not None or loss_fn.use_kl_in_reward)


def settle(
    batch: Sequence[TrainingSample], updates: Sequence[Update], spec: RunSpec, device: torch.device
) -> None:
    """Sets the advantages and limits that take the global batch. All ranks call it, after the frozen policies were asked.

    The advantages of `gae` are `learner.step.critic.Critic.settle`'s.
    """
    micro_batches = [m for update in updates for m in update.micro_batches if not m.is_dummy]
    if needs_whole_batch(spec) and spec.grpo.advantage != "gae":
        _settle_advantages(batch, micro_batches, spec, device)
    if spec.samples and spec.loss_fn.m2_threshold is not None:
        moments = [second_moments(_given(m.proximal_N) - _given(m.row.behaviour_N)) for m in micro_batches]
        limit = m2_limit_of(
            torch.cat([torch.zeros(0, device=device), *moments]), spec.loss_fn.m2_threshold, sum_over_ranks
        )
        for update in updates:
            update.m2_limit = limit


def m2_limit_of(values_N: Tensor, threshold: float, total: Callable[[Tensor], Tensor]) -> float:
    """The largest limit such that the mean of the values up to it is at most `threshold`; inf when all may stay.

    M2PO (Zheng et al. 2025, arXiv 2510.01161) drops the largest (log ρ)² until the mean of the rest is within the
    threshold. Equal values stay or go together, so the split over ranks cannot matter. Found by bisecting the bit
    patterns of non-negative float32 numbers, which are in the numbers' order: 32 sums of two floats.

    Args:
        values_N: float32, this rank's, at least 0.
        total: adds tensors up over ranks, in place.
    """

    def mean_up_to(limit: float) -> float:
        within_N = values_N[values_N <= limit].double()
        sums = torch.stack([within_N.sum(), torch.full_like(within_N.sum(), len(within_N))])
        value, count = total(sums).tolist()
        return float(value / max(count, 1.0))

    if mean_up_to(np.inf) <= threshold:
        return float("inf")
    low, high = 0, int(np.float32(np.inf).view(np.int32))
    while high - low > 1:
        middle = (low + high) // 2
        if mean_up_to(float(np.int32(middle).view(np.float32))) <= threshold:
            low = middle
        else:
            high = middle
    return float(np.int32(low).view(np.float32))


def _settle_advantages(
    batch: Sequence[TrainingSample], micro_batches: Sequence[MicroBatch], spec: RunSpec, device: torch.device
) -> None:
    penalties = [kl_penalties(micro, spec) for micro in micro_batches]
    rows, first = rows_of_all_ranks(_scores(batch, micro_batches, penalties, spec).to(device))
    table = rows.double().cpu().numpy()
    scored = ScoredBatch(table[:, 0].astype(np.int64), table[:, 2:], table[:, 1])
    own_S = batch_advantages(scored, spec)[first : first + len(batch)]
    whitened = spec.grpo.advantage in TOKEN_WHITENED
    own = torch.from_numpy(own_S if whitened else clip_advantages(own_S, spec))
    values = [
        own[torch.tensor(micro.places)].to(device, torch.float32)[micro.row.sequence_N]
        for micro in micro_batches
    ]
    if whitened:
        values = whitened_token_advantages(
            values, penalties, [m.row.sequence_N for m in micro_batches], device
        )
        low, high = spec.grpo.advantage_clip_low, spec.grpo.advantage_clip_high
        if low is not None or high is not None:
            values = [value_N.clamp(low, high) for value_N in values]
    for micro, advantages_N in zip(micro_batches, values, strict=True):
        micro.row = replace(micro.row, advantages_N=advantages_N)


def _scores(
    batch: Sequence[TrainingSample],
    micro_batches: Sequence[MicroBatch],
    penalties: Sequence[Tensor | None],
    spec: RunSpec,
) -> Tensor:
    """[S, 2 + F] group id, β·ΣKL and rewards of this rank's sequences, float64."""
    scores = torch.zeros(len(batch), 2 + len(spec.rewards), dtype=torch.float64)
    for i, sequence in enumerate(batch):
        scores[i, 0] = sequence.group_id
        scores[i, 2:] = torch.from_numpy(require_rewards(sequence, spec))
    for micro, penalty_N in zip(micro_batches, penalties, strict=True):
        if penalty_N is not None:
            sums_S = per_sequence(penalty_N.double(), micro.row.sequence_N, len(micro.places))
            scores[torch.tensor(micro.places), 1] = sums_S.cpu()
    return scores


def require_rewards(sequence: TrainingSample, spec: RunSpec) -> Float64Array:
    """[F] the sequence's rewards. Raises InvalidInput when they are not there."""
    if sequence.rewards_F is None or len(sequence.rewards_F) != len(spec.rewards):
        raise InvalidInput(
            f"group {sequence.group_id} has no rewards for the {len(spec.rewards)} functions; "
            f"grpo.advantage {spec.grpo.advantage!r} is computed from them"
        )
    return sequence.rewards_F.astype(np.float64)


def kl_penalties(micro: MicroBatch, spec: RunSpec) -> Tensor | None:
    """[N] β·KL of π_prox to the reference, where it belongs to the reward."""
    if not spec.loss_fn.use_kl_in_reward:
        return None
    proximal_N = _given(micro.proximal_N)
    kl_N = kl_to_reference(
        proximal_N,
        _given(micro.reference_N),
        torch.ones_like(proximal_N),
        spec.loss_fn.reference_policy_kl_type,
    )
    return spec.loss_fn.reference_policy_kl_penalty * kl_N


def _given(values_N: Tensor | None) -> Tensor:
    if values_N is None:
        raise ValueError("the frozen policies were not asked for this micro-batch")
    return values_N
