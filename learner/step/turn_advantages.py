"""Advantages of the tokens of episodes by turn, and the samples that the sequences of a batch belong to.

A group is whole on one rank, so nothing here is collective.

Suffixes: S sequences of this rank's part, C samples of it, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.advantages import Episode, turn_advantages
from paceline.learner.batch.samples import TrainingSample
from paceline.rewards import Float64Array, IndexArray, group_totals
from paceline.spec import RunSpec


def sample_of_each(batch: Sequence[TrainingSample]) -> IndexArray:
    """Return [S] index of each sequence's sample among the samples of this part, in order: rows of an episode share one."""
    return np.cumsum([sequence.counts for sequence in batch], dtype=np.int64) - 1


def advantages_of_turns(
    batch: Sequence[TrainingSample],
    samples_S: IndexArray,
    advantages_C: Float64Array,
    scores: Float64Array,
    spec: RunSpec,
    step: int,
) -> list[Float64Array]:
    """Return [T] advantages of each sequence's tokens, by `environment.advantage`; tokens outside of turns get 0.

    advantages_C: of whole samples. scores: [C, 2 + F] group id, β·ΣKL and rewards of the samples.
    """
    rewards: list[list[float]] = [[] for _ in advantages_C]
    for sample, sequence in zip(samples_S.tolist(), batch, strict=True):
        rewards[sample] += [turn.reward for turn in sequence.row.turns] if sequence.row is not None else []
    by_sample: list[Float64Array] = [np.zeros(0)] * len(rewards)
    group_ids_C = scores[:, 0].astype(np.int64)
    for group_id in np.unique(group_ids_C):
        of_group = np.flatnonzero(group_ids_C == group_id)
        outcomes_C = group_totals(scores[of_group, 2:], spec.rewards, step) - scores[of_group, 1]
        episodes = [
            Episode(outcome, float(advantages_C[c]), np.array(rewards[c], np.float64))
            for c, outcome in zip(of_group, outcomes_C.tolist(), strict=True)
        ]
        for c, values_K in zip(of_group, turn_advantages(episodes, spec), strict=True):
            by_sample[c] = values_K
    tokens = [np.zeros(len(sequence.completion_ids)) for sequence in batch]
    for sample, sequence, values_T in zip(samples_S.tolist(), batch, tokens, strict=True):
        if sequence.row is not None:
            for offset, turn in enumerate(sequence.row.turns):
                values_T[turn.start : turn.end] = by_sample[sample][sequence.row.first_turn + offset]
    return tokens
