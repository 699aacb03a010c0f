"""Comparison of the samplers' log-probabilities with the learner's own, for a few groups of a step.

Promise: the step computes nothing more and waits for nothing: it leaves references to what it has computed with the weights that it
started from, and `results` copies them to the host afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from torch import Tensor

from paceline.learner.batch.samples import PackedBatch

MAX_DIFFERENCE = 1.0
"""Nats. A larger difference of one token counts as this one, so that no single token decides about a group."""


class GroupDifference(NamedTuple):
    """One group: mean over its tokens of log μ - log π in nats, the standard error of that mean, and the number of tokens."""

    group_id: int
    mean: float
    standard_error: float
    tokens: int


class SamplerComparison:
    """The comparison of one step."""

    def __init__(self, group_ids: Collection[int]):
        self._group_ids = frozenset(group_ids)
        self._noted: dict[int, tuple[PackedBatch, Tensor]] = {}

    def note(self, packed: PackedBatch, logprobs_N: Tensor) -> None:
        """Keep the log-probabilities of a micro-batch by the weights that the step started from, if it has any of the groups. The first
        ones count."""
        if packed.behaviour_N is not None and self._group_ids.intersection(packed.group_ids_S):
            self._noted.setdefault(id(packed), (packed, logprobs_N.detach()))

    def results(self) -> list[GroupDifference]:
        """Return the groups that were noted, by their id. Copies to the host."""
        sequences: defaultdict[int, list[np.ndarray]] = defaultdict(list)
        for packed, logprobs_N in self._noted.values():
            assert packed.behaviour_N is not None
            differences_N = (packed.behaviour_N - logprobs_N.float()).double().cpu().numpy()
            differences_N = np.clip(differences_N, -MAX_DIFFERENCE, MAX_DIFFERENCE)
            sequence_N = packed.sequence_N.cpu().numpy()
            for sequence, group_id in enumerate(packed.group_ids_S):
                if group_id in self._group_ids:
                    sequences[group_id].append(differences_N[sequence_N == sequence])
        return [group_difference(group_id, sequences[group_id]) for group_id in sorted(sequences)]


def group_difference(group_id: int, differences: Collection[np.ndarray]) -> GroupDifference:
    """Return the mean of a group with the larger of two standard errors: by the spread of its tokens, as if they were independent,
    and by the spread of its completions, whose tokens may have a common error. `differences` has an array [T] in nats
    for each completion, with one token in all at least.
    """
    tokens = np.concatenate(list(differences))
    mean, number = float(tokens.mean()), len(tokens)
    sums_C = np.array([float((values - mean).sum()) for values in differences])
    by_tokens = float(tokens.std()) / number**0.5
    by_completions = float(np.sqrt((sums_C**2).sum() * len(sums_C) / max(len(sums_C) - 1, 1))) / number
    return GroupDifference(group_id, mean, max(by_tokens, by_completions), number)
