"""Before the first step: every row that a run will use becomes tokens, and fits.

Promise: a row that cannot be trained ends the run before it begins, by name and on every rank, and not in the middle of the
training or on the one rank that draws it, while the others wait in a collective.

A collective call: each rank looks at every w-th row, and then they agree.
"""

from __future__ import annotations

import torch

from learner.batch.examples import ExampleSource
from learner.collectives import max_over_ranks, world_size
from paceline.errors import InvalidInput


def check_rows(source: ExampleSource, device: torch.device, rank: int) -> None:
    """Raises InvalidInput, on every rank, for the first row that is longer than the model allows or that the chat template
    refuses."""
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
