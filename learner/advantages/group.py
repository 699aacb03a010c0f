"""Advantages of a group's completions from their rewards.

Promise: a completion that no reward function applied to neither shifts the baseline of the others nor trains
(advantage 0), and every preset reproduces the system that it is named after, to the constant.

Suffixes: C completions of one group, F reward functions.
"""

from __future__ import annotations

from typing import Literal, cast, get_args

import numpy as np
import numpy.typing as npt

Preset = Literal["trl", "nemo", "dr_grpo", "rloo"]
FloatArray = npt.NDArray[np.floating]
Float64Array = npt.NDArray[np.float64]

TRL_STD_EPSILON = 1e-4
NEMO_STD_EPSILON = 1e-6


def weighted_rewards(rewards_CF: FloatArray, weights_F: FloatArray | list[float]) -> Float64Array:
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


def advantages(totals_C: FloatArray, preset: Preset) -> Float64Array:
    """Return the advantage of each completion relative to its group, over the n completions that have a reward.

    - `trl`: (r - mean) / (std + 1e-4), std with n - 1 (TRL, `scale_rewards="group"`).
    - `nemo`: (r - mean of the others) / (std of the others + 1e-6), std with n - 2; where that std is 0 the
      difference is left undivided (NeMo RL, leave-one-out baseline).
    - `dr_grpo`: r - mean (Liu et al. 2025, "Understanding R1-Zero-Like Training").
    - `rloo`: r - mean of the others (Ahmadian et al. 2024, "Back to Basics").

    Args:
        totals_C: [C] rewards, NaN for "does not apply".

    Returns:
        [C] float64; 0 for NaN rows, and for all rows when fewer than two have a reward (there is no baseline).
    """
    rewards_C: Float64Array = np.asarray(totals_C, np.float64)
    advantages_C = np.zeros_like(rewards_C)
    valid_C = ~np.isnan(rewards_C)
    if valid_C.sum() >= 2:
        advantages_C[valid_C] = _relative_to_group(rewards_C[valid_C], preset)
    return advantages_C


def group_preset(name: str) -> Preset:
    """Return the name as a preset that needs nothing but the group. Raises ValueError for another name."""
    for preset in get_args(Preset):
        if preset == name:
            return cast(Preset, preset)
    raise ValueError(f"unknown advantage preset {name!r}")


def clipped(advantages_S: FloatArray, low: float | None, high: float | None) -> Float64Array:
    """Return the advantages clipped to [low, high]; None is no bound."""
    if low is None and high is None:
        return np.asarray(advantages_S, np.float64)
    return np.clip(np.asarray(advantages_S, np.float64), low, high)


def _relative_to_group(rewards_N: Float64Array, preset: Preset) -> Float64Array:
    centred_N: Float64Array = rewards_N - rewards_N.mean()
    # Difference to the leave-one-out mean: r - (S - r)/(n-1) = (r - S/n)·n/(n-1).
    leave_one_out_N: Float64Array = centred_N * len(rewards_N) / (len(rewards_N) - 1)
    match preset:
        case "dr_grpo":
            return centred_N
        case "rloo":
            return leave_one_out_N
        case "trl":
            return np.asarray(centred_N / (rewards_N.std(ddof=1) + TRL_STD_EPSILON))
        case "nemo":
            std_N = _leave_one_out_std(rewards_N)
            return np.where(std_N > 0, leave_one_out_N / (std_N + NEMO_STD_EPSILON), leave_one_out_N)
        case _:
            raise ValueError(f"unknown advantage preset {preset!r}")


def _leave_one_out_std(rewards_N: Float64Array) -> Float64Array:
    """Return the sample std of the other values, for each value; 0 where only one other exists."""
    n = len(rewards_N)
    if n < 3:
        return np.zeros(n)
    others_NM = np.broadcast_to(rewards_N, (n, n))[~np.eye(n, dtype=bool)].reshape(n, n - 1)
    return np.asarray(others_NM.std(axis=1, ddof=1))
