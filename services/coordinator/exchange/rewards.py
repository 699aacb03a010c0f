"""Total rewards of a group, and their variance. Pure."""

from __future__ import annotations

import numpy as np

from paceline.groups import FloatArray

FLOAT32_MAX = float(np.finfo(np.float32).max)


def totals(rewards_CF: FloatArray, weights_F: FloatArray) -> FloatArray:
    """Return the [C] weighted sums over the functions that apply; NaN where every function returned None."""
    known_CF = ~np.isnan(rewards_CF)
    sums_C = np.where(known_CF, rewards_CF, 0.0).astype(np.float64) @ weights_F.astype(np.float64)
    sums_C[np.abs(sums_C) > FLOAT32_MAX] = np.inf  # the cast would warn of it
    sums_C[~known_CF.any(axis=1)] = np.nan
    return sums_C.astype(np.float32)


def has_variance(totals_C: FloatArray) -> bool:
    """Return whether two completions have different rewards, so that the group has an advantage to train on."""
    finite = totals_C[~np.isnan(totals_C)]
    return len(finite) > 1 and bool(finite.max() - finite.min() > 1e-8)
