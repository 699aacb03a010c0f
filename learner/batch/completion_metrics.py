"""Metrics of the completions of a whole batch: their lengths, and the share that was cut off.

They are taken from the groups and not from the training samples, because `grpo.overlong_filtering` removes the tokens of
completions that were cut off.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from paceline.groups import Group
from paceline.learner.collectives import rows_of_all_ranks

PERCENTILES = (50, 90, 99)


def completion_metrics(groups: Sequence[Group], device: torch.device) -> dict[str, float]:
    """Return minimum, maximum and percentiles of the lengths in tokens, and the share of completions that reached a
    limit, over the batch of all ranks; nothing without completions. An episode counts as one completion of the tokens that
    it sampled; its rows, its turns, and the share of episodes of several versions are metrics of their own.

    A collective call: every rank gives its part, which may be empty, and returns the same values.
    """
    own = [facts for group in groups for facts in _facts(group)]
    rows, _ = rows_of_all_ranks(torch.tensor(own, dtype=torch.float64, device=device).reshape(-1, 5))
    if not len(rows):
        return {}
    lengths, truncated, num_rows, num_turns, mixed = rows.cpu().numpy().T
    percentiles = np.percentile(lengths, PERCENTILES, method="inverted_cdf")
    metrics = {
        "completion_length/min": float(lengths.min()),
        "completion_length/max": float(lengths.max()),
        **{f"completion_length/p{p}": float(n) for p, n in zip(PERCENTILES, percentiles, strict=True)},
        "truncated_fraction": float(truncated.mean()),
    }
    if num_turns.any():
        metrics |= {
            "environment/rows_per_sample": float(num_rows.mean()),
            "environment/turns_per_sample": float(num_turns.mean()),
            "environment/mixed_version_fraction": float(mixed.mean()),
        }
    return metrics


def _facts(group: Group) -> list[tuple[float, ...]]:
    """Return (sampled tokens, cut off, rows, turns, of several versions) of each sample that has tokens on record; 0 rows and
    turns without an environment."""
    if group.rows is None:
        return [(len(c.token_ids), c.finish_reason == "length", 0, 0, False) for c in group.completions]
    turns = Counter(group.rows.samples[turn.row] for turn in group.rows.turns)
    facts: dict[int, tuple[float, ...]] = {}
    versions: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for sample, row in zip(group.rows.samples, group.completions, strict=True):
        versions[sample] |= {(span.session, span.step) for span in row.spans}
        tokens, truncated, num_rows = facts.get(sample, (0.0, False, 0.0))[:3]
        cut_off = bool(truncated) or row.finish_reason == "length"
        facts[sample] = (
            tokens + row.num_sampled,
            cut_off,
            num_rows + 1,
            turns[sample],
            len(versions[sample]) > 1,
        )
    return list(facts.values())
