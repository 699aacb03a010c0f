"""The plan of a step: the sequences of each update and of each micro-batch. An update is an immutable value; each phase
of a step returns a new one (`paceline.learner.step`).

Promise: a group's update is the same whatever rank its sequences are on; every rank has equally many micro-batches for
an update, filled up with dummies of zero weight; an update's counts are those of the global batch. Packing depends only
on lengths (and costs), so a replayed step is packed as it was the first time.

All ranks call `plan_updates` and `batch_metrics` together, each with its part of the batch. Suffixes: U updates, M
micro-batches of an update, N tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.learner.batch.samples import PackedBatch, TrainingSample, pack_samples, shared_tokens
from paceline.learner.collectives import max_over_ranks, sum_over_ranks, union_over_ranks, world_size
from paceline.learner.objectives.base import Denominators, Objective
from paceline.models.shape import ModelShape, training_flops
from paceline.spec import PolicySection, RunSpec


@dataclass(frozen=True)
class FrozenLogprobs:
    """Log-probabilities by the policies that do not change during a step, in nats; None if they are not needed."""

    proximal_N: Tensor | None = None
    """[N] log-probabilities by the learner before the step (log π_prox)."""
    reference_N: Tensor | None = None
    """[N] log-probabilities by the policy before training or by a teacher (log π_ref)."""


@dataclass(frozen=True)
class States:
    """States of a micro-batch with the value model's values and targets (M: see `paceline.learner.step.critic`)."""

    packed: PackedBatch
    before_token_M: Tensor
    """[M] True for the states before a token, False for the state after a sequence's last token."""
    values_M: Tensor
    """[M] values at the start of the step."""
    returns_N: Tensor | None = None
    """[N] targets of the value model. None for a dummy."""
    scored_N: Tensor | None = None
    """[N] False for tokens of sequences without a reward, which train nothing. None for a dummy."""


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass of a rank."""

    packed: PackedBatch
    indices: tuple[int, ...] = ()
    """Index in this rank's batch of each sequence in `packed`."""
    is_dummy: bool = False
    ages_N: Tensor | None = None
    """[N] steps between the version that sampled the token and this step. None for supervised data."""
    frozen: FrozenLogprobs = FrozenLogprobs()
    advantages_N: Tensor | None = None
    """[N] advantages. None before `with_advantages`, and for supervised data."""
    states: States | None = None
    """States of the micro-batch for the value model. None without one."""


@dataclass(frozen=True)
class Update:
    """The part of one rank in an optimizer update, with the counts over all ranks."""

    micro_batches: tuple[MicroBatch, ...]
    denominators: Denominators
    m2_limit: float | None = None
    """Largest (log ρ)² that is kept (`TokenArrays.m2_limit`). None keeps all."""
    batch_kl: float | None = None
    """KTO's KL over the global batch (`TokenArrays.batch_kl`). None for other algorithms."""
    num_scored_tokens: float = 0.0
    """Number of tokens of sequences with a reward, on all ranks: the value loss is their mean. 0 without a value model.
    """


def given(values_N: Tensor | None) -> Tensor:
    """Return the values. Raises ValueError if an earlier phase of the step has not added them."""
    if values_N is None:
        raise ValueError("this micro-batch lacks values that an earlier phase of the step adds")
    return values_N


EVEN_COST_TOKENS = 32_768
"""An update with a sequence of at least this many tokens, where attention is about two fifths of the cost (8B
parameters), is packed by cost, if ROOM_FOR_EVEN_COST allows it."""
ROOM_FOR_EVEN_COST = 1.5
"""Least ratio of budget to longest sequence at which packing by cost pays (docs/operate/performance.md)."""


def plan_updates(
    batch: Sequence[TrainingSample],
    step: int,
    spec: RunSpec,
    objective: Objective,
    device: torch.device,
    num_updates: int,
    shape: ModelShape | None = None,
) -> list[Update]:
    """Return the batch of `step` as `num_updates` updates of whole groups, in order of their id. With the model's
    `shape`, an update with a sequence of EVEN_COST_TOKENS on some rank gets micro-batches of about equal cost, if
    the budget is at least ROOM_FOR_EVEN_COST times the longest sequence."""
    parts: Sequence[Sequence[int]]
    parts = [range(len(batch))] if num_updates == 1 else _update_indices(batch, num_updates, device)
    policy, whole = spec.policy, objective.keeps_prompts_whole
    units_U = [best_units(batch, part, policy, whole=whole) for part in parts]
    indices_UM = [pack_units(units, policy.row_tokens) for units in units_U]
    sizes_U2 = [
        (len(m), max((batch[i].num_row_tokens for i in p), default=0)) for p, m in zip(parts, indices_UM, strict=True)
    ]
    passes_U, longest_U = max_over_ranks(torch.tensor(sizes_U2, device=device)).T.tolist()
    if shape is not None and not whole:
        for u, (units, passes, longest) in enumerate(zip(units_U, passes_U, longest_U, strict=True)):
            if EVEN_COST_TOKENS <= longest <= policy.row_tokens / ROOM_FOR_EVEN_COST:
                costs = [training_flops(shape, unit.costed_runs, unit.tokens) for unit in units]
                indices_UM[u] = pack_units(units, policy.row_tokens, costs, passes)
    counts_U4 = [
        (
            sum(batch[i].num_trained_tokens for i in p),
            sum(batch[i].counts for i in p),
            len(m),
            len({batch[i].group_id for i in p}),
        )
        for p, m in zip(parts, indices_UM, strict=True)
    ]
    totals_U4 = sum_over_ranks(torch.tensor(counts_U4, device=device)).tolist()
    updates: list[Update] = []
    max_tokens = spec.policy.generation.max_new_tokens
    for indices_M, passes, totals in zip(indices_UM, passes_U, totals_U4, strict=True):
        micro_batches = [_micro_batch(batch, indices, step, policy, device) for indices in indices_M]
        micro_batches += [_dummy(objective, device) for _ in range(max(passes, 1) - len(micro_batches))]
        tokens, sequences, filled, prompts = totals
        denominators = Denominators(tokens, sequences, max_tokens, filled, prompts)
        updates.append(Update(tuple(micro_batches), denominators))
    return updates


def _micro_batch(
    batch: Sequence[TrainingSample], indices: tuple[int, ...], step: int, policy: PolicySection, device: torch.device
) -> MicroBatch:
    packed = pack_samples([batch[i] for i in indices], device, share=policy.shares_prompts)
    ages_N = None if packed.versions_N is None else step - packed.versions_N
    return MicroBatch(packed, indices, ages_N=ages_N)


def batch_metrics(
    batch: Sequence[TrainingSample],
    updates: Sequence[Update],
    step: int,
    spec: RunSpec,
    shape: ModelShape | None,
    device: torch.device,
) -> dict[str, float]:
    """Return metrics of the batch: its size, the fill of its micro-batches, the operations that training it takes, the
    age of its tokens, and the share of the tokens whose advantage is 0 (1 if nothing trains)."""
    micro_batches = [micro for update in updates for micro in update.micro_batches]
    sampled = [(s.versions_T, s.transcript is None) for s in batch if s.versions_T is not None]
    versions = [versions_T if whole else versions_T[versions_T >= 0] for versions_T, whole in sampled]
    ages = step - np.concatenate(versions) if versions else np.zeros(0)
    advantages = [m.advantages_N for m in micro_batches if m.advantages_N is not None and not m.is_dummy]
    sums = [
        sum(batch[i].num_row_tokens for m in micro_batches for i in m.indices),
        sum(m.packed.input_ids.numel() for m in micro_batches if not m.is_dummy),
        sum(not m.is_dummy for m in micro_batches),
        float(ages.sum()),
        len(ages),
        sum(float((values_N == 0).sum()) for values_N in advantages),
        sum(len(values_N) for values_N in advantages),
        any(m.advantages_N is not None for m in micro_batches),
        sum(_flops(m, spec, shape) for m in micro_batches if not m.is_dummy),
    ]
    totals = sum_over_ranks(torch.tensor(sums, dtype=torch.float64, device=device)).tolist()
    row_tokens, computed, num_micro_batches, age_sum, aged_tokens, zeros, with_advantage, has_advantages, flops = totals
    # Packed tensors are dense: the rest of each micro-batch's budget is unfilled, all of it in a dummy.
    room = len(micro_batches) * world_size() * spec.policy.row_tokens
    metrics = {
        "tokens": float(sum(u.denominators.tokens for u in updates)),
        "sequences": float(sum(u.denominators.sequences for u in updates)),
        "row_tokens": row_tokens,
        "computed_tokens": computed,
        "micro_batches": num_micro_batches,
        "unfilled_fraction": max(1.0 - computed / room, 0.0),
    }
    metrics |= {"teraflop": flops / 1e12} if flops else {}
    metrics |= {"age": age_sum / aged_tokens} if aged_tokens else {}
    if has_advantages:
        metrics["zero_advantage_fraction"] = zeros / with_advantage if with_advantage else 1.0
    return metrics


def _flops(micro: MicroBatch, spec: RunSpec, shape: ModelShape | None) -> float:
    if shape is None:
        return 0.0
    packed, frozen = micro.packed, spec.policy.lora_cfg.enabled
    return training_flops(shape, packed.layout.costed_runs, len(packed.predictors_N), frozen_base=frozen)


def _update_indices(batch: Sequence[TrainingSample], num_updates: int, device: torch.device) -> list[list[int]]:
    group_ids = union_over_ranks([s.group_id for s in batch], device)
    update_of = {group_id: i * num_updates // len(group_ids) for i, group_id in enumerate(group_ids)}
    return [[i for i, s in enumerate(batch) if update_of[s.group_id] == u] for u in range(num_updates)]


def _dummy(objective: Objective, device: torch.device) -> MicroBatch:
    packed = pack_samples(objective.dummy(), device)
    return MicroBatch(packed, is_dummy=True, ages_N=packed.versions_N)


@dataclass(frozen=True)
class Unit:
    """Sequences that are packed together: one sequence, or completions that share their prompt or must be in one
    row."""

    indices: tuple[int, ...]
    """Index of each sequence, from long to short."""
    tokens: int
    """Number of tokens that the unit takes in a row."""
    costed_runs: tuple[tuple[int, int], ...]
    """(count, length) of separate sequences that would cost as much as the unit (`SequenceLayout.costed_runs`)."""


PARTS_OF_A_ROW = (1, 2, 4)
"""Sizes of the largest units that are tried: a unit is at most a row divided by this number. Smaller units leave less of a
row empty, but repeat their prompt more often."""


def best_units(
    batch: Sequence[TrainingSample], part: Sequence[int], policy: PolicySection, *, whole: bool = False
) -> list[Unit]:
    """Return the units of the sequences with indices `part` (`units_of`). Their size gives this rank the fewest passes,
    and among such sizes the fewest tokens."""
    if whole or not policy.shares_prompts:
        return units_of(batch, part, policy, whole=whole)
    tried = [units_of(batch, part, policy, row_tokens=policy.row_tokens // n) for n in PARTS_OF_A_ROW]
    return min(tried, key=lambda units: (len(pack_units(units, policy.row_tokens)), sum(u.tokens for u in units)))


def units_of(
    batch: Sequence[TrainingSample],
    part: Sequence[int],
    policy: PolicySection,
    *,
    whole: bool = False,
    row_tokens: int | None = None,
) -> list[Unit]:
    """Return the units of the sequences with indices `part` that have tokens. With `whole`, a prompt's sequences are
    one unit, in their order. A unit that shares a prompt and has more than `row_tokens` (default: the budget of a row)
    is divided, each part with the prompt; sequences that share nothing are single units."""
    by_prompt: dict[int, list[int]] = {}
    for index in part:
        if batch[index].num_row_tokens:
            by_prompt.setdefault(batch[index].group_id, []).append(index)
    units: list[Unit] = []
    for members in by_prompt.values():
        length_of = {i: batch[i].num_row_tokens for i in members}
        num_shared = shared_tokens([batch[i] for i in members]) if policy.shares_prompts else 0
        divided = [members]
        if num_shared and not whole:
            divided = _divided(length_of, num_shared, row_tokens or policy.row_tokens)
        for indices in divided:
            # A part counts no more than the group's prompt: two parts that meet in a row share only that.
            of_part = shared_tokens([batch[i] for i in indices], known=num_shared)
            if whole or of_part:
                units.append(_unit(indices, length_of, of_part))
            else:
                units += [_unit([i], length_of, 0) for i in indices]
    return sorted(units, key=lambda unit: unit.indices)


def _unit(indices: Sequence[int], length_of: Mapping[int, int], num_shared: int) -> Unit:
    copies = len(indices) - 1 if num_shared else 0
    runs = [(1, length_of[i]) for i in indices]
    repeated = [(-copies, num_shared)] if copies else []
    tokens = sum(count * length for count, length in runs + repeated)
    return Unit(tuple(indices), tokens, (*runs, *repeated))


def _divided(length_of: Mapping[int, int], num_shared: int, budget_tokens: int) -> list[list[int]]:
    """Return the indices from long to short, in lists with at most `budget_tokens` each, their prompt included."""
    lists: list[list[int]] = []
    room = 0
    for index in sorted(length_of, key=lambda i: (-length_of[i], i)):
        own = length_of[index] - num_shared
        if not lists or own > room:
            lists.append([])
            room = budget_tokens - num_shared
        lists[-1].append(index)
        room -= own
    return lists


def pack_units(
    units: Sequence[Unit], budget_tokens: int, costs: Sequence[float] = (), num_micro_batches: int = 0
) -> list[tuple[int, ...]]:
    """Return the indices of each micro-batch: by `pack`, or with `costs` by `pack_evenly`. All ranks make equally many
    passes, and each pass waits for the rank with the longest sequences."""
    lengths = [unit.tokens for unit in units]
    packed = pack_evenly(lengths, costs, budget_tokens, num_micro_batches) if costs else pack(lengths, budget_tokens)
    return [tuple(i for u in micro_batch for i in units[u].indices) for micro_batch in packed]


def pack(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Return index lists whose lengths add up to at most `budget_tokens`: first fit, longest first.

    First-fit decreasing needs at most 11/9 of the fewest possible micro-batches plus one (Johnson 1973). Within a
    micro-batch the indices go from long to short (equal lengths in input order), so that attention can run on equal
    lengths as one dense tensor. A sequence longer than the budget is alone in its micro-batch; an empty sequence is in
    no micro-batch.
    """
    if budget_tokens <= 0:
        raise ValueError(f"budget_tokens is {budget_tokens}; it must be positive")
    longest_first = sorted((i for i, n in enumerate(lengths) if n > 0), key=lambda i: (-lengths[i], i))
    bins: list[list[int]] = []
    room_tokens: list[int] = []
    first_open = 0  # bins before this one cannot take even the shortest sequence
    shortest = lengths[longest_first[-1]] if longest_first else 0
    for index in longest_first:
        length = lengths[index]
        while first_open < len(bins) and room_tokens[first_open] < shortest:
            first_open += 1
        for b in range(first_open, len(bins)):
            if room_tokens[b] >= length:
                bins[b].append(index)
                room_tokens[b] -= length
                break
        else:
            bins.append([index])
            room_tokens.append(budget_tokens - length)
    return bins


def pack_evenly(
    lengths: Sequence[int], costs: Sequence[float], budget_tokens: int, num_micro_batches: int
) -> list[list[int]]:
    """Return at most `num_micro_batches` index lists, as `pack` does, with about equal cost, highest cost first.
    Longest processing time first (Graham 1969): the costliest remaining sequence goes to the micro-batch of the lowest
    cost that has room. If a sequence finds no room, return the lists of `pack`, which may be less even."""
    longest_first = sorted((i for i, n in enumerate(lengths) if n > 0), key=lambda i: (-lengths[i], i))
    bins: list[list[int]] = [[] for _ in range(num_micro_batches)]
    room_tokens, cost_of = [budget_tokens] * num_micro_batches, [0.0] * num_micro_batches
    for index in longest_first:
        fitting = [b for b in range(num_micro_batches) if room_tokens[b] >= lengths[index] or not bins[b]]
        if not fitting:
            bins = pack(lengths, budget_tokens)
            break
        chosen = min(fitting, key=lambda b: (cost_of[b], b))
        bins[chosen].append(index)
        room_tokens[chosen] -= lengths[index]
        cost_of[chosen] += costs[index]
    filled = [indices for indices in bins if indices]
    return sorted(filled, key=lambda indices: (-sum(costs[i] for i in indices), indices))
