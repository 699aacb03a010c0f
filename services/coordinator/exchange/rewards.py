"""Total rewards of a group, and their variance. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.groups import FloatArray
from paceline.rewards import gated, weights_at
from paceline.spec import RewardFunctionSection

FLOAT32_MAX = float(np.finfo(np.float32).max)


def totals(rewards_CF: FloatArray, functions: Sequence[RewardFunctionSection], step: int) -> FloatArray:
    """Return the [C] weighted sums of a step over the functions that apply, behind their gates; NaN where every function
    returned None."""
    weights_F = np.array(weights_at(functions, step), np.float32)
    rewards_CF = gated(rewards_CF, functions)
    known_CF = ~np.isnan(rewards_CF)
    sums_C = np.where(known_CF, rewards_CF, 0.0).astype(np.float64) @ weights_F.astype(np.float64)
    sums_C[np.abs(sums_C) > FLOAT32_MAX] = np.inf  # the cast would warn of it
    sums_C[~known_CF.any(axis=1)] = np.nan
    return sums_C.astype(np.float32)


def has_variance(totals_C: FloatArray) -> bool:
    """Return whether two completions have different rewards, so that the group has an advantage to train on."""
    finite = totals_C[~np.isnan(totals_C)]
    return len(finite) > 1 and bool(finite.max() - finite.min() > 1e-8)
