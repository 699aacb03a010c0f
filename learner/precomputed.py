"""The reference's log-probabilities of a whole data set, asked once before training (`dpo.precompute`,
`kto.precompute`).

Promise: the reference is gone when training begins; a restart asks again and gets the same numbers (at equal world size),
and they are what asking in the step gives, up to the rounding of another packing.

A collective call: all ranks ask about every w-th completion and then tell each other.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from learner.batch import TrainSequence, Verdict, pack_row
from learner.collectives import max_over_ranks, rows_of_all_ranks, world_size
from learner.examples import Asked, ExampleSource
from learner.model import load_reference, row_logprobs
from learner.packing import pack
from paceline.spec import RunSpec

BLOCK_ROWS = 1024
"""Rows of each rank whose tokens are in memory at one time."""


@torch.no_grad()
def precompute_reference(source: ExampleSource, spec: RunSpec, device: torch.device, rank: int) -> None:
    """Gives `source` Σ_t log π_ref of every completion that the run will see. Raises InvalidInput as the source does."""
    reference = load_reference(spec.policy, device)
    asked, ranks = source.asked(), world_size()
    known: dict[Asked, list[float]] = {}
    for block in range(math.ceil(math.ceil(len(asked) / ranks) / BLOCK_ROWS)):
        own = range(rank, len(asked), ranks)[block * BLOCK_ROWS : (block + 1) * BLOCK_ROWS]
        sequences = [sequence for number in own for sequence in source.about(asked[number], number)]
        micro_batches = pack([s.num_row_tokens for s in sequences], spec.policy.train_mb_tokens)
        sums_S = np.zeros(len(sequences))
        passes = int(max_over_ranks(torch.tensor([len(micro_batches)], device=device)).item())
        for i in range(passes):
            places = micro_batches[i] if i < len(micro_batches) else []
            row = pack_row([sequences[p] for p in places] or [_dummy()], device)
            logprobs_N, _ = row_logprobs(
                reference, row, temperature=1.0, chunk_tokens=spec.policy.logprob_chunk_tokens
            )
            totals_S = logprobs_N.new_zeros(len(row.group_ids_S)).index_add(0, row.sequence_N, logprobs_N)
            sums_S[places] = totals_S.tolist()[: len(places)]
        told = [(float(s.group_id), sums_S[place]) for place, s in enumerate(sequences)]
        table, _ = rows_of_all_ranks(torch.tensor(told, dtype=torch.float64, device=device).reshape(-1, 2))
        for number, value in table.tolist():
            known.setdefault(asked[int(number)], []).append(value)
    source.know_reference(known)


def _dummy() -> TrainSequence:
    zero = np.zeros(1, np.int32)
    return TrainSequence(-1, zero, zero, verdict=Verdict(True))
