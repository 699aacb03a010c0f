"""One interface to the log-probabilities of a run's reference (π_ref or a teacher), wherever they are computed. Also
the phase of a step that computes the log-probabilities of the frozen policies.

`reference_of` chooses: a model in the learner that computes them in every step; the reward pool, whose
log-probabilities come with the batch; or a precomputation over the whole data set before training (`dpo.precompute`,
`kto.precompute`). Promise: all of them give the same numbers, except for rounding by different packing; a
precomputation frees its model before training begins, and a restart computes the same numbers again (at equal world
size). All ranks make each call together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from paceline.data.tokens import check_same_tokenizer
from paceline.learner.batch.samples import PackedBatch, PreferenceLabel, TrainingSample, pack_samples
from paceline.learner.collectives import max_over_ranks, rows_of_all_ranks, sum_over_ranks, world_size
from paceline.learner.model.adapter import adapter_off
from paceline.learner.model.policy import load_reference, packed_logprobs
from paceline.learner.objectives.corrections import m2_limit_of, second_moments
from paceline.learner.objectives.examples import ExampleSource, RowPair
from paceline.learner.step.plan import FrozenLogprobs, MicroBatch, Update, best_units, given, pack_units
from paceline.spec import PolicySection, RunSpec

BLOCK_ROWS = 1024
"""Rows of each rank whose tokens are in memory at the same time."""


class Reference:
    """Base of the references. It gives no log-probabilities, for objectives that compare with nothing."""

    def prepare(self, source: ExampleSource, rank: int) -> None:
        """Prepare for the examples of `source`, before the first step. Raises InvalidInput for a refused example."""

    def logprobs(self, packed: PackedBatch) -> Tensor | None:
        """Return [N] log π_ref of the completion tokens; None if it is not available for each token."""
        return None

    def total(self, packed: PackedBatch) -> Tensor | float:
        """Return Σ_t log π_ref over all sequences, float64."""
        logprobs_N = self.logprobs(packed)
        return 0.0 if logprobs_N is None else logprobs_N.sum(dtype=torch.float64)


class LocalReference(Reference):
    """A model in the learner: a separate one, or the policy without its adapter."""

    def __init__(self, model: PreTrainedModel, temperature: float, chunk_tokens: int) -> None:
        self.model = model
        self._temperature, self._chunk_tokens = temperature, chunk_tokens

    @torch.no_grad()
    def logprobs(self, packed: PackedBatch) -> Tensor:
        with adapter_off(self.model):
            return packed_logprobs(self.model, packed, temperature=self._temperature, chunk_tokens=self._chunk_tokens)[
                0
            ]

    @torch.no_grad()
    def mix_in(self, policy: PreTrainedModel, share: float) -> None:
        """Set each parameter to share · policy + (1 - share) · reference, in float32; each rank mixes its shards."""
        for (name, mine), (other, theirs) in zip(self.model.named_parameters(), policy.named_parameters(), strict=True):
            if name != other:
                raise ValueError(f"the reference has {name!r}, but the policy has {other!r} in its place")
            ours, current = _shard(mine), _shard(theirs)
            ours.copy_(torch.lerp(ours.float(), current.to(ours.device).float(), share))


class PoolReference(Reference):
    """Reads the log-probabilities that the reward pool serves and that come with the batch."""

    def logprobs(self, packed: PackedBatch) -> Tensor | None:
        return packed.reference_N


class PrecomputedReference(Reference):
    """Holds the precomputed Σ_t log π_ref of every completion of the run; the examples have them after `prepare`."""

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        self._policy, self._device = spec.policy, device

    def prepare(self, source: ExampleSource, rank: int) -> None:
        """Compute every w-th pair on each rank, then exchange the sums."""
        model = load_reference(self._policy, self._device)
        reference = LocalReference(model, 1.0, self._policy.logprob_chunk_tokens)
        pairs, ranks = source.row_pairs(), world_size()
        sums_of: dict[RowPair, list[float]] = {}
        for block in range(math.ceil(math.ceil(len(pairs) / ranks) / BLOCK_ROWS)):
            numbers = range(rank, len(pairs), ranks)[block * BLOCK_ROWS : (block + 1) * BLOCK_ROWS]
            sequences = [sequence for number in numbers for sequence in source.of_pair(pairs[number], number)]
            sums_S = self._sums(reference, sequences)
            numbered = [(float(s.group_id), sums_S[index]) for index, s in enumerate(sequences)]
            rank_rows = torch.tensor(numbered, dtype=torch.float64, device=self._device).reshape(-1, 2)
            for number, value in rows_of_all_ranks(rank_rows)[0].tolist():
                sums_of.setdefault(pairs[int(number)], []).append(value)
        source.set_reference(sums_of)

    def total(self, packed: PackedBatch) -> float:
        return math.fsum(label.reference_logprob or 0.0 for label in packed.labels_S)

    def _sums(self, reference: LocalReference, sequences: list[TrainingSample]) -> np.ndarray:
        sums_S = np.zeros(len(sequences))
        for indices, packed, logprobs_N in _passes(reference, sequences, self._policy, self._device):
            zeros_S = logprobs_N.new_zeros(len(packed.group_ids_S))
            totals_S = zeros_S.index_add(0, packed.sequence_N, logprobs_N)
            sums_S[list(indices)] = totals_S.tolist()[: len(indices)]
        return sums_S


class ComputedBehaviour(Reference):
    """Computes the starting policy's log-probabilities (log μ) of traces that have none, once, before training. The
    log-probabilities take four bytes a token. KL terms use the log-probabilities of `kl_reference`."""

    def __init__(self, spec: RunSpec, kl_reference: Reference, device: torch.device, temperature: float) -> None:
        self._policy, self._device, self._temperature = spec.policy, device, temperature
        self._kl_reference = kl_reference

    def prepare(self, source: ExampleSource, rank: int) -> None:
        """Compute every w-th row on each rank, then exchange the log-probabilities."""
        rows, ranks = source.rows_used(), world_size()
        model: PreTrainedModel | None = None
        values_of: dict[int, list[np.ndarray]] = {}
        for block in range(math.ceil(math.ceil(len(rows) / ranks) / BLOCK_ROWS)):
            numbers = range(rank, len(rows), ranks)[block * BLOCK_ROWS : (block + 1) * BLOCK_ROWS]
            samples = [
                replace(sample, group_id=number)
                for number in numbers
                for sample in source.of_row(rows[number])
                if sample.behaviour_logprobs_T is None
            ]
            missing = torch.tensor([len(samples)], device=self._device)
            if not int(max_over_ranks(missing).item()):
                continue
            if model is None:
                model = load_reference(self._policy, self._device)
            reference = LocalReference(model, self._temperature, self._policy.logprob_chunk_tokens)
            numbered = torch.cat(
                [torch.zeros(0, 2, dtype=torch.float64, device=self._device)]
                + [
                    torch.stack((torch.full_like(values_T, sample.group_id), values_T), 1)
                    for sample, values_T in zip(samples, self._logprobs(reference, samples), strict=True)
                ]
            )
            table = rows_of_all_ranks(numbered)[0].cpu().numpy()
            for number in np.unique(table[:, 0]):
                of_row = table[table[:, 0] == number, 1].astype(np.float32)
                values_of.setdefault(rows[int(number)], []).append(of_row)
        source.set_behaviour({row: np.concatenate(parts) for row, parts in values_of.items()})

    def logprobs(self, packed: PackedBatch) -> Tensor | None:
        return self._kl_reference.logprobs(packed)

    def _logprobs(self, reference: LocalReference, samples: list[TrainingSample]) -> list[Tensor]:
        """Return [T] float64 log μ of each sample."""
        logprobs_of = [torch.zeros(0, dtype=torch.float64, device=self._device) for _ in samples]
        for indices, packed, logprobs_N in _passes(reference, samples, self._policy, self._device):
            for sequence, index in enumerate(indices):
                logprobs_of[index] = logprobs_N.double()[packed.sequence_N == sequence]
        return logprobs_of


def _passes(
    reference: LocalReference, samples: list[TrainingSample], policy: PolicySection, device: torch.device
) -> Iterator[tuple[Sequence[int], PackedBatch, Tensor]]:
    """Yield (indices of samples, their batch, [N] log π_ref) of each pass; every rank makes equally many passes."""
    micro_batches = pack_units(best_units(samples, range(len(samples)), policy), policy.row_tokens)
    passes = int(max_over_ranks(torch.tensor([len(micro_batches)], device=device)).item())
    for i in range(passes):
        indices = micro_batches[i] if i < len(micro_batches) else ()
        packed = pack_samples([samples[i] for i in indices] or [_dummy()], device, share=policy.shares_prompts)
        yield indices, packed, reference.logprobs(packed)


def reference_of(spec: RunSpec, policy: PreTrainedModel, device: torch.device, temperature: float) -> Reference:
    """Return the reference that the objective of `spec` compares `policy` with. Raises InvalidInput for a model that
    cannot be loaded, and for a teacher with another tokenizer."""
    if spec.pool_serves_reference:
        return PoolReference()
    if spec.precomputes_reference:
        return PrecomputedReference(spec, device)
    if spec.trains_traces:
        return ComputedBehaviour(spec, _frozen_reference(spec, policy, device, temperature), device, temperature)
    return _frozen_reference(spec, policy, device, temperature)


def _frozen_reference(spec: RunSpec, policy: PreTrainedModel, device: torch.device, temperature: float) -> Reference:
    """Return the model that the learner holds besides the policy."""
    frozen = spec.frozen_policy
    if frozen is None:
        return Reference()
    if spec.has_teacher:
        check_same_tokenizer(spec.policy, frozen)
    separate = spec.has_teacher or not spec.policy.lora_cfg.enabled
    model = load_reference(frozen, device) if separate else policy
    return LocalReference(model, temperature, spec.policy.logprob_chunk_tokens)


def _shard(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _dummy() -> TrainingSample:
    zero = np.zeros(1, np.int32)
    return TrainingSample(-1, zero, zero, label=PreferenceLabel(True))


@torch.no_grad()
def with_frozen_logprobs(
    updates: Sequence[Update],
    spec: RunSpec,
    current: Callable[[PackedBatch], tuple[Tensor, Tensor]],
    reference: Reference,
) -> list[Update]:
    """Return the updates with each micro-batch's frozen log-probabilities, if needed: log π_prox, which is `current`
    before the first update, and log π_ref of each token."""

    def with_frozen(micro: MicroBatch) -> MicroBatch:
        proximal_N = current(micro.packed)[0] if _needs_proximal(spec) else None
        return replace(micro, frozen=FrozenLogprobs(proximal_N, reference.logprobs(micro.packed)))

    return [replace(u, micro_batches=tuple(map(with_frozen, u.micro_batches))) for u in updates]


def with_m2_limit(updates: Sequence[Update], spec: RunSpec, device: torch.device) -> list[Update]:
    """Return the updates with M2PO's limit, computed over the tokens of all updates on all ranks."""
    if not (spec.samples or spec.trains_traces) or spec.loss_fn.m2_threshold is None:
        return list(updates)
    micro_batches = [m for update in updates for m in update.micro_batches if not m.is_dummy]
    log_rhos = [given(m.frozen.proximal_N) - given(m.packed.behaviour_N) for m in micro_batches]
    moments_N = torch.cat([torch.zeros(0, device=device), *map(second_moments, log_rhos)])
    limit = m2_limit_of(moments_N, spec.loss_fn.m2_threshold, sum_over_ranks)
    return [replace(update, m2_limit=limit) for update in updates]


def _needs_proximal(spec: RunSpec) -> bool:
    """Return whether log π_prox differs from log π in the step, or is needed before the loss."""
    loss_fn = spec.loss_fn
    several = spec.policy.num_updates_per_step > 1 and loss_fn.proximal_policy == "exact"
    return (spec.samples or spec.trains_traces) and (
        several or loss_fn.m2_threshold is not None or loss_fn.use_kl_in_reward
    )
