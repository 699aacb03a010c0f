"""Statistics of single tokens of a few groups while a step trains: log-probability and entropy.

Promise: the step computes and waits for nothing extra; `of` copies the kept results to the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from paceline.groups import FloatArray
from paceline.learner.batch.samples import PackedBatch, TrainingSample


@dataclass(frozen=True)
class TokenNumbers:
    """Values of one completion, or one transcript, for each completion token; NaN if the token does not train."""

    group_id: int
    index: int
    """Index among the group's samples in the batch."""
    logprobs_T: FloatArray
    entropies_T: FloatArray


class TokenStatistics:
    def __init__(self, group_ids: Collection[int]):
        self.group_ids = frozenset(group_ids)
        self._noted: list[tuple[PackedBatch, Tensor, Tensor]] = []

    def note(self, packed: PackedBatch, logprobs_N: Tensor, entropy_N: Tensor) -> None:
        """Keep the results of a micro-batch if it has any of the groups. A repetition replaces the earlier results."""
        if self.group_ids.intersection(packed.group_ids_S):
            self._noted.append((packed, logprobs_N.detach(), entropy_N.detach()))

    def of(self, samples: Sequence[TrainingSample]) -> list[TokenNumbers]:
        """Return the values of the trained samples of the chosen groups. Copies the values to the host."""
        values_of: dict[tuple[int, bytes], tuple[FloatArray, FloatArray]] = {}
        for packed, logprobs_N, entropy_N in self._noted:
            sequence_N = packed.sequence_N.cpu().numpy()
            targets_N = packed.targets_N.cpu().numpy().astype(np.int64)
            values = logprobs_N.float().cpu().numpy(), entropy_N.float().cpu().numpy()
            for sequence, group_id in enumerate(packed.group_ids_S):
                if group_id in self.group_ids:
                    at_N = sequence_N == sequence
                    values_of[group_id, targets_N[at_N].tobytes()] = values[0][at_N], values[1][at_N]
        return [
            numbers
            for sample, index in zip(samples, _indices(samples), strict=True)
            if (numbers := _numbers(sample, index, values_of)) is not None
        ]


def _indices(samples: Sequence[TrainingSample]) -> list[int]:
    seen: Counter[int] = Counter()
    indices = []
    for sample in samples:
        indices.append(seen[sample.group_id])
        seen[sample.group_id] += 1
    return indices


def _numbers(
    sample: TrainingSample, index: int, values_of: dict[tuple[int, bytes], tuple[FloatArray, FloatArray]]
) -> TokenNumbers | None:
    """Return the values of a sample. Samples of a group with equal tokens have equal values."""
    trains_T = np.ones(len(sample.completion_ids), bool) if sample.trained_T is None else sample.trained_T
    values = values_of.get((sample.group_id, sample.completion_ids[trains_T].astype(np.int64).tobytes()))
    if values is None or not trains_T.any():
        return None
    whole = []
    for values_N in values:
        values_T = np.full(len(trains_T), np.nan, np.float32)
        values_T[trains_T] = values_N
        whole.append(values_T)
    return TokenNumbers(sample.group_id, index, *whole)
