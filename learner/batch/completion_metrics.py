"""Metrics of the completions of a whole batch: their lengths, and the share that was cut off.

They are taken from the groups and not from the training samples, because `grpo.overlong_filtering` removes the tokens of
completions that were cut off.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from learner.collectives import rows_of_all_ranks
from paceline.groups import Group

PERCENTILES = (50, 90, 99)


def completion_metrics(groups: Sequence[Group], device: torch.device) -> dict[str, float]:
    """Return minimum, maximum and percentiles of the lengths in tokens, and the share of completions that reached a
    limit, over the batch of all ranks; nothing without completions.

    A collective call: every rank gives its part, which may be empty, and returns the same values.
    """
    own = [(len(c.token_ids), c.finish_reason == "length") for group in groups for c in group.completions]
    rows, _ = rows_of_all_ranks(torch.tensor(own, dtype=torch.float64, device=device).reshape(-1, 2))
    if not len(rows):
        return {}
    lengths, truncated = rows.cpu().numpy().T
    percentiles = np.percentile(lengths, PERCENTILES, method="inverted_cdf")
    return {
        "completion_length/min": float(lengths.min()),
        "completion_length/max": float(lengths.max()),
        **{f"completion_length/p{p}": float(n) for p, n in zip(PERCENTILES, percentiles, strict=True)},
        "truncated_fraction": float(truncated.mean()),
    }
