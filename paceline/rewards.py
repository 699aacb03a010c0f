"""How the rewards of several functions become one: gates, then a weighted sum with the weights of a step. Pure.

Promise: coordinator and learner combine by the same rules, so what a metric shows is what trains. A function that gave
None takes no part, and a completion without any number has no total.

Suffixes: C completions, F reward functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.spec import RewardFunctionSection

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
