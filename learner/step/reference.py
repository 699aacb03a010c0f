"""What the policy is compared with, π_ref or a teacher: one answer, wherever it comes from.

`reference_of` gives a run's: a model that the learner asks in every step, what the reward pool asked and the batch brings
along, or what was asked about the whole data set before training (`dpo.precompute`, `kto.precompute`).

Promise: they give the same numbers up to the rounding of another packing; a precomputed one's model is gone when training
begins, and a restart asks again and gets the same numbers (at equal world size).

All ranks make each call together.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from learner.batch.examples import Asked, ExampleSource
from learner.batch.packing import pack
from learner.batch.samples import PackedBatch, PreferenceLabel, TrainingSample, pack_row
from learner.collectives import max_over_ranks, rows_of_all_ranks, world_size
from learner.model.adapter import adapter_off
from learner.model.policy import load_reference, row_logprobs
from paceline.data.tokens import check_same_tokenizer
from paceline.spec import RunSpec

BLOCK_ROWS = 1024
"""Rows of each rank whose tokens are in memory at one time."""


class Reference:
    """The answers of no reference: what an objective gets that compares with nothing."""

    def prepare(self, source: ExampleSource, rank: int) -> None:
        """Before the first step on `source`. Raises InvalidInput as the source does."""

    def logprobs(self, row: PackedBatch) -> Tensor | None:
        """[N] log π_ref of the row's completion tokens; None where it is not known token by token."""
        return None

    def total(self, row: PackedBatch) -> Tensor | float:
        """Σ_t log π_ref over the whole row, float64."""
        logprobs_N = self.logprobs(row)
        return 0.0 if logprobs_N is None else logprobs_N.sum(dtype=torch.float64)


class LocalReference(Reference):
    """A model in the learner: one of its own, or the policy without its adapter."""

    def __init__(self, model: PreTrainedModel, temperature: float, chunk_tokens: int) -> None:
        self.model = model
        self._temperature, self._chunk_tokens = temperature, chunk_tokens

    @torch.no_grad()
    def logprobs(self, row: PackedBatch) -> Tensor:
        with adapter_off(self.model):
            return row_logprobs(
                self.model, row, temperature=self._temperature, chunk_tokens=self._chunk_tokens
            )[0]


class PoolReference(Reference):
    """The reward pool's answers, which come with the batch."""

    def logprobs(self, row: PackedBatch) -> Tensor | None:
        return row.reference_N


class PrecomputedReference(Reference):
    """Σ_t log π_ref of every completion that the run will see, which its examples carry once they are prepared."""

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        self._policy, self._device = spec.policy, device

    def prepare(self, source: ExampleSource, rank: int) -> None:
        """Every rank asks about every w-th completion, then they tell each other."""
        model = load_reference(self._policy, self._device)
        reference = LocalReference(model, 1.0, self._policy.logprob_chunk_tokens)
        asked, ranks = source.asked(), world_size()
        known: dict[Asked, list[float]] = {}
        for block in range(math.ceil(math.ceil(len(asked) / ranks) / BLOCK_ROWS)):
            own = range(rank, len(asked), ranks)[block * BLOCK_ROWS : (block + 1) * BLOCK_ROWS]
            sequences = [sequence for number in own for sequence in source.about(asked[number], number)]
            sums_S = self._sums(reference, sequences)
            told = [(float(s.group_id), sums_S[place]) for place, s in enumerate(sequences)]
            own_rows = torch.tensor(told, dtype=torch.float64, device=self._device).reshape(-1, 2)
            for number, value in rows_of_all_ranks(own_rows)[0].tolist():
                known.setdefault(asked[int(number)], []).append(value)
        source.know_reference(known)

    def total(self, row: PackedBatch) -> float:
        return math.fsum(label.reference_logprob or 0.0 for label in row.labels_S)

    def _sums(self, reference: LocalReference, sequences: list[TrainingSample]) -> np.ndarray:
        """[S] of each sequence, in as many passes as the rank with the most needs."""
        micro_batches = pack([s.num_row_tokens for s in sequences], self._policy.train_mb_tokens)
        sums_S = np.zeros(len(sequences))
        passes = int(max_over_ranks(torch.tensor([len(micro_batches)], device=self._device)).item())
        for i in range(passes):
            places = micro_batches[i] if i < len(micro_batches) else []
            row = pack_row([sequences[p] for p in places] or [_dummy()], self._device)
            logprobs_N = reference.logprobs(row)
            totals_S = logprobs_N.new_zeros(len(row.group_ids_S)).index_add(0, row.sequence_N, logprobs_N)
            sums_S[places] = totals_S.tolist()[: len(places)]
        return sums_S


def reference_of(
    spec: RunSpec, policy: PreTrainedModel, device: torch.device, temperature: float
) -> Reference:
    """What the objective of `spec` compares `policy` with. Raises InvalidInput, also for a teacher with another tokenizer."""
    if spec.pool_serves_reference:
        return PoolReference()
    if spec.precomputes_reference:
        return PrecomputedReference(spec, device)
    frozen = spec.frozen_policy
    if frozen is None:
        return Reference()
    model = policy
    if spec.has_teacher:
        check_same_tokenizer(spec.policy, frozen)
        model = load_reference(frozen, device)
    elif not spec.policy.lora_cfg.enabled:
        model = load_reference(frozen, device)
    return LocalReference(model, temperature, spec.policy.logprob_chunk_tokens)


def _dummy() -> TrainingSample:
    zero = np.zeros(1, np.int32)
    return TrainingSample(-1, zero, zero, label=PreferenceLabel(True))
