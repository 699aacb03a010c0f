"""How the rewards of several functions become one: gates, then a weighted sum with the weights of a step. Pure.

Promise: coordinator and learner combine by the same rules, so what a metric shows is what trains. A function that gave
None takes no part, and a completion without any number has no total.

Suffixes: C completions, F reward functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.groups import FloatArray
from paceline.spec import RewardFunctionSection

FLOAT32_MAX = float(np.finfo(np.float32).max)

Rewards = npt.NDArray[np.floating]


def weights_at(functions: Sequence[RewardFunctionSection], step: int) -> list[float]:
    """Return the [F] weights of a step."""
    return [function.weight_at(step) for function in functions]


def closed_gates(rewards_CF: Rewards, functions: Sequence[RewardFunctionSection]) -> npt.NDArray[np.bool_]:
    """Return [C, F] whether a function is a gate that is closed for the completion: its reward is below its `gate_min`.
    A gate that gave None is open."""
    minima_F = [-np.inf if f.gate_min is None else f.gate_min for f in functions]
    return np.asarray(np.nan_to_num(rewards_CF, nan=np.inf) < np.asarray(minima_F))


def gated(rewards_CF: Rewards, functions: Sequence[RewardFunctionSection]) -> Rewards:
    """Return the rewards with 0 for every function that is no gate where a gate is closed, also in place of NaN.

    Args:
        rewards_CF: [C, F], NaN where a function gave None.
    """
    gates_F = np.array([function.gate_min is not None for function in functions], bool)
    if not gates_F.any():
        return rewards_CF
    closed_C1 = closed_gates(rewards_CF, functions).any(axis=1, keepdims=True)
    return np.where(closed_C1 & ~gates_F, np.zeros((), rewards_CF.dtype), rewards_CF)


def totals(rewards_CF: Rewards, functions: Sequence[RewardFunctionSection], step: int) -> FloatArray:
    """Return the [C] weighted sums of a step over the functions that apply, behind their gates; NaN where every function
    returned None."""
    weights_F = np.array(weights_at(functions, step), np.float32)
    rewards_CF = gated(rewards_CF, functions)
    known_CF = ~np.isnan(rewards_CF)
    sums_C = np.where(known_CF, rewards_CF, 0.0).astype(np.float64) @ weights_F.astype(np.float64)
    sums_C[np.abs(sums_C) > FLOAT32_MAX] = np.inf  # the cast would warn of it
    sums_C[~known_CF.any(axis=1)] = np.nan
    return sums_C.astype(np.float32)


def has_variance(totals_C: Rewards) -> bool:
    """Return whether two completions have different rewards, so that the group has an advantage to train on."""
    finite = totals_C[~np.isnan(totals_C)]
    return len(finite) > 1 and bool(finite.max() - finite.min() > 1e-8)
