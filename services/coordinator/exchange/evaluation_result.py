"""Result of an evaluation from the groups' rows. Pure.

Suffixes: G groups (prompts), C completions of a group, F reward functions.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.groups import FloatArray
from paceline.rewards import Rewards, totals
from paceline.services.coordinator.exchange.source_rewards import rewards_by_source
from paceline.services.coordinator.ledger.groups import State
from paceline.spec import RunSpec


def evaluation_result(
    spec: RunSpec,
    rows: Sequence[sqlite3.Row | Mapping[str, Any]],
    step: int,
    sources: Sequence[object] | None = None,
) -> dict[str, Any]:
    """Return the measurements over `rows`, the scored and the dropped groups of an evaluation of version `step`.

    Rewards are means over prompts of the mean over a prompt's completions; None where no function gave a number. A
    standard error is the standard deviation of the prompts' means (n - 1) divided by sqrt(n), and is left out below two
    prompts. `pass@<k>/<function>` is the share of prompts of which at least one of the k completions got 1, over those all of
    whose completions got a number, for functions whose values are all 0 or 1 and k above 1. `sources` are the rows' values of `data.source_key`, None without one.
    """
    scored = [row for row in rows if row["state"] == State.SCORED]
    k = spec.grpo.val_samples_per_prompt
    rewards_GCF = np.array([np.frombuffer(row["rewards"], "<f4") for row in scored], np.float32)
    rewards_GCF = rewards_GCF.reshape(len(scored), k, len(spec.rewards))
    rewards_SF = rewards_GCF.reshape(len(scored) * k, len(spec.rewards))
    totals_GC = totals(rewards_SF, spec.rewards, step).reshape(len(scored), k)
    mean, stderr = _mean(totals_GC)
    result: dict[str, Any] = {"reward": mean} | ({} if stderr is None else {"reward_stderr": stderr})
    for index, reward in enumerate(spec.rewards):
        values_GC = rewards_GCF[:, :, index]
        mean, stderr = _mean(values_GC)
        if mean is not None:
            result[f"reward/{reward.label}"] = mean
        if stderr is not None:
            result[f"reward_stderr/{reward.label}"] = stderr
        passed = _pass_at(values_GC)
        if passed is not None:
            result[f"pass@{k}/{reward.label}"] = passed
    if sources is not None:
        of_scored = [of for row, of in zip(rows, sources, strict=True) if row["state"] == State.SCORED]
        result |= rewards_by_source(totals_GC, of_scored)
    completions = len(scored) * k
    return result | {
        "prompts": len(scored),
        "samples": completions,
        "failed": len(rows) - len(scored),
        "completion_length": sum(row["tokens"] for row in scored) / max(1, completions),
    }


def _mean(values_GC: Rewards) -> tuple[float | None, float | None]:
    """Return mean and standard error over the prompts with any number."""
    known_GC = ~np.isnan(values_GC)
    counts_G = known_GC.sum(axis=1)
    sums_G = np.where(known_GC, values_GC, 0.0).astype(np.float64).sum(axis=1)
    means = sums_G[counts_G > 0] / counts_G[counts_G > 0]
    if not len(means):
        return None, None
    spread = (
        float(means.std(ddof=1)) if (means != means[0]).any() else 0.0
    )  # 0 for equal numbers, without a residue
    stderr = spread / math.sqrt(len(means)) if len(means) > 1 else None
    return float(means.mean()), stderr


def _pass_at(values_GC: FloatArray) -> float | None:
    """Return the share of prompts with a 1, of those without None; None unless there are several completions and all numbers
    are 0 or 1."""
    known_GC = ~np.isnan(values_GC)
    whole_GC = values_GC[known_GC.all(axis=1)]
    if not len(whole_GC) or values_GC.shape[1] == 1 or not np.isin(values_GC[known_GC], (0.0, 1.0)).all():
        return None
    return float((whole_GC == 1.0).any(axis=1).mean())
