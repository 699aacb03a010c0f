"""How the rewards of several functions become one: gates, then a weighted sum with the weights of a step. Pure.

Promise: coordinator and learner combine by the same rules, so what a metric shows is what trains. A function that gave
None takes no part, and a completion without any number has no total. Totals of a group that only rounding tells apart are
equal.

Suffixes: C completions, F reward functions, N any values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from paceline.spec import RewardFunctionSection

FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOAT32_ERROR = 2.0**-24
"""Largest relative error of a number that was rounded to float32, as rewards are on their way."""

Rewards = npt.NDArray[np.floating]
Float64Array = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int64]


def weights_at(functions: Sequence[RewardFunctionSection], step: int) -> list[float]:
    """Return the [F] weights of a step."""
    return [function.weight_at(step) for function in functions]


def closed_gates(rewards_CF: Rewards, functions: Sequence[RewardFunctionSection]) -> npt.NDArray[np.bool_]:
    """Return [C, F] whether a function is a gate that is closed for the completion: its reward is below its `gate_min`.
    A gate that gave None is open."""
    minima_F = np.array([-np.inf if f.gate_min is None else f.gate_min for f in functions])
    # In the rewards' own precision: 0.7 as float32 is below 0.7 as float64.
    return np.asarray(np.nan_to_num(rewards_CF, nan=np.inf).astype(np.float32) < minima_F.astype(np.float32))


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


def weighted_rewards(rewards_CF: Rewards, weights_F: Rewards | list[float]) -> Float64Array:
    """Return one reward per completion: Σ_f weight_f · reward_f over the functions that gave a number.

    Args:
        rewards_CF: [C, F], NaN where a function gave None.
        weights_F: [F].

    Returns:
        [C] float64, NaN where every function gave None.
    """
    rewards_CF = np.asarray(rewards_CF, np.float64)
    totals_C: Float64Array = np.nansum(rewards_CF * np.asarray(weights_F, np.float64), axis=1)
    totals_C[np.isnan(rewards_CF).all(axis=1)] = np.nan
    return totals_C


def totals(rewards_CF: Rewards, functions: Sequence[RewardFunctionSection], step: int) -> Float64Array:
    """Return the [C] weighted sums of a step over the functions that apply, behind their gates; NaN where every function
    returned None, infinite where float32 ends."""
    sums_C = weighted_rewards(gated(rewards_CF, functions), weights_at(functions, step))
    sums_C[np.abs(sums_C) > FLOAT32_MAX] = np.inf
    return sums_C


def group_totals(rewards_CF: Rewards, functions: Sequence[RewardFunctionSection], step: int) -> Float64Array:
    """Return the `totals` of the completions of one group, where those are equal that would be without rounding. 0.1 +
    0.2 is 0.3 here, and 1/3 + 2/3 in float32 is 1. Completions whose rewards differ in one function alone have
    different totals, however near they are, because nothing was added that could be rounded differently."""
    parts_CF = np.asarray(gated(rewards_CF, functions), np.float64) * np.array(weights_at(functions, step))
    parts_CF[np.isnan(parts_CF)] = 0.0

    def error(low: IndexArray, high: IndexArray) -> Float64Array:
        differ = parts_CF[low] != parts_CF[high]
        sizes = np.where(differ, np.abs(parts_CF[low]) + np.abs(parts_CF[high]), 0.0).sum(axis=1)
        return np.where(differ.sum(axis=1) > 1, FLOAT32_ERROR * sizes, 0.0)

    return merged(totals(rewards_CF, functions, step), error)


def merged(values_N: Float64Array, error: Callable[[IndexArray, IndexArray], Float64Array]) -> Float64Array:
    """Return the values, where neighbours in order of size become equal whose difference is at most `error(low, high)` of their
    indices; NaN stays."""
    order = np.argsort(values_N, kind="stable")
    low, high = order[:-1], order[1:]
    begins = np.ones(len(order), bool)
    with np.errstate(invalid="ignore"):  # infinite values are refused elsewhere
        begins[1:] = ~(values_N[high] - values_N[low] <= error(low, high))
    result_N = np.empty_like(values_N)
    result_N[order] = values_N[order][np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))]
    return result_N
