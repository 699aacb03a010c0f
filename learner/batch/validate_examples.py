"""Validation of a run's examples before its first step: every row becomes tokens, and fits.

Promise: a row that cannot be trained ends the run before it begins, with its number and on every rank, not in the middle of
the training on the one rank that draws it, while the others wait in a collective.

A collective call: each rank checks every w-th row, then all ranks agree on the first bad one.
"""

from __future__ import annotations

import torch

from paceline.errors import InvalidInput
from paceline.learner.batch.examples import ExampleSource
from paceline.learner.collectives import max_over_ranks, world_size


def check_rows(source: ExampleSource, device: torch.device, rank: int) -> None:
    """Check every row that the run will use.

    Raises:
        InvalidInput: a row is longer than the model allows, or the chat template refuses it; on every rank for the same row.
    """
    rows = source.rows_used()
    bad = next((i for i in range(rank, len(rows), world_size()) if _is_bad(source, rows[i])), len(rows))
    first = len(rows) - int(max_over_ranks(torch.tensor([len(rows) - bad], device=device)).item())
    if first < len(rows):
        source.of_row(rows[first])
        raise InvalidInput(f"row {rows[first]} cannot be trained on another rank")


def _is_bad(source: ExampleSource, row: int) -> bool:
    try:
        source.of_row(row)
    except InvalidInput:
        return True
    return False
