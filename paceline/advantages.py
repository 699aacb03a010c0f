"""Combines the rewards of several functions and computes the advantages of completions and turns. Pure functions.

Promise: coordinator and learner combine by the same rules, so a metric shows what trains. A function that returned None
takes no part. A completion or a turn without any reward has no total: it does not change its group's baseline and does
not train (advantage 0). Every preset reproduces the system that it is named after, to the constant. Equal rewards have
equal advantages, exactly 0 in a group without a difference, and totals that differ only by rounding are equal.

Suffixes: C completions (samples) of a group, F reward functions, K turns of a sample, V compared values, N numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, cast, get_args

import numpy as np
import numpy.typing as npt

from paceline.array_frames import RowArrays
from paceline.spec import RewardFunctionSection, RunSpec

FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOAT32_ERROR = 2.0**-24
"""Largest relative error of rounding to float32; rewards travel as float32."""

Rewards = npt.NDArray[np.floating]
Float64Array = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int64]


def weights_at(functions: Sequence[RewardFunctionSection], step: int) -> list[float]:
    return [function.weight_at(step) for function in functions]


def closed_gates(rewards_CF: Rewards, functions: Sequence[RewardFunctionSection]) -> npt.NDArray[np.bool_]:
    """Return [C, F] booleans, true for a closed gate: the function's `gate_min` is above the completion's reward. A
    reward of None closes no gate."""
    minima_F = np.array([-np.inf if f.gate_min is None else f.gate_min for f in functions])
    # compared in the precision of the rewards: 0.7 as float32 is below 0.7 as float64
    return np.asarray(np.nan_to_num(rewards_CF, nan=np.inf).astype(np.float32) < minima_F.astype(np.float32))


def gated(rewards_CF: Rewards, functions: Sequence[RewardFunctionSection]) -> Rewards:
    """Return the rewards [C, F], NaN where a function returned None. If a gate is closed for a completion, the
    completion's rewards by all functions that are not gates become 0, also where they were NaN."""
    gates_F = np.array([function.gate_min is not None for function in functions], bool)
    if not gates_F.any():
        return rewards_CF
    closed_C1 = closed_gates(rewards_CF, functions).any(axis=-1, keepdims=True)
    return np.where(closed_C1 & ~gates_F, np.zeros((), rewards_CF.dtype), rewards_CF)


def weighted_rewards(rewards_CF: Rewards, weights_F: Rewards | list[float]) -> Float64Array:
    """Return [C] float64: the sum Σ_f weight_f · reward_f of each completion over the functions that returned a number;
    NaN if none did. `rewards_CF` is [C, F], NaN where a function returned None; `weights_F` is [F]."""
    rewards_CF = np.asarray(rewards_CF, np.float64)
    parts_CF = rewards_CF * np.asarray(weights_F, np.float64)
    parts_CF[np.isnan(parts_CF)] = 0.0  # as np.nansum, which takes three times as long for a group
    totals_C: Float64Array = parts_CF.sum(axis=-1)
    totals_C[np.isnan(rewards_CF).all(axis=-1)] = np.nan
    return totals_C


def totals(rewards_CF: Rewards, functions: Sequence[RewardFunctionSection], step: int) -> Float64Array:
    """Return [C] each completion's gated, weighted sum of rewards: NaN if all are None, infinite beyond float32."""
    sums_C = weighted_rewards(gated(rewards_CF, functions), weights_at(functions, step))
    sums_C[np.abs(sums_C) > FLOAT32_MAX] = np.inf
    return sums_C


def group_totals(rewards_CF: Rewards, functions: Sequence[RewardFunctionSection], step: int) -> Float64Array:
    """Return the `totals` of one group's completions. Totals that differ only by rounding are made equal: 0.1 + 0.2
    becomes 0.3, and 1/3 + 2/3 in float32 becomes 1. Completions whose rewards differ in one function alone keep
    different totals, however close, because no sum was rounded differently. Leading axes of `rewards_CF` are groups."""
    parts_CF = np.asarray(gated(rewards_CF, functions), np.float64) * np.array(weights_at(functions, step))
    parts_CF[np.isnan(parts_CF)] = 0.0

    def error(low: IndexArray, high: IndexArray) -> Float64Array:
        low_NF, high_NF = (np.take_along_axis(parts_CF, index[..., None], -2) for index in (low, high))
        differ = low_NF != high_NF
        sizes = np.where(differ, np.abs(low_NF) + np.abs(high_NF), 0.0).sum(axis=-1)
        return np.where(differ.sum(axis=-1) > 1, FLOAT32_ERROR * sizes, 0.0)

    return merged(totals(rewards_CF, functions, step), error)


def merged(values_N: Float64Array, error: Callable[[IndexArray, IndexArray], Float64Array]) -> Float64Array:
    """Return the values after making close ones equal: neighbours in sorted order become equal if they differ by at
    most `error(low, high)`, where `low` and `high` are the indices of the two neighbours. NaN stays. Leading axes are
    groups, whose values are merged separately."""
    order = np.argsort(values_N, axis=-1, kind="stable")
    sorted_N = np.take_along_axis(values_N, order, -1)
    begins = np.ones(order.shape, bool)
    with np.errstate(invalid="ignore"):  # other code refuses infinite values
        begins[..., 1:] = ~(sorted_N[..., 1:] - sorted_N[..., :-1] <= error(order[..., :-1], order[..., 1:]))
    first = np.maximum.accumulate(np.where(begins, np.arange(order.shape[-1]), 0), axis=-1)
    result_N = np.empty_like(values_N)
    np.put_along_axis(result_N, order, np.take_along_axis(sorted_N, first, -1), -1)
    return result_N


Preset = Literal["trl", "nemo", "dr_grpo", "rloo"]

TRL_STD_EPSILON = 1e-4
NEMO_STD_EPSILON = 1e-6
FLOAT64_ERROR = 2.0**-50
"""Relative error of a float64 sum of a few numbers."""


class Episode(NamedTuple):
    outcome: float
    """Weighted reward of the whole episode; NaN if no function applied."""
    advantage: float
    rewards_K: Float64Array
    """[K] reward of each turn; NaN for a turn without a reward."""


def has_advantage(rewards_CF: Rewards, spec: RunSpec, step: int, turns: Sequence[Float64Array] | None = None) -> bool:
    """Return whether a group has anything to train on: False only if every advantage that the learner would compute is
    0. `rewards_CF` is [C, F], NaN where a function returned None; `turns` has the [K] rewards of each sample's turns if
    advantages are per turn."""
    totals_C = group_totals(rewards_CF, spec.rewards, step)
    turns = turns or []
    if not spec.rewards_decide_advantages:
        return any(not np.isnan(values).all() for values in [totals_C, *turns] if len(values))
    relative_C = group_advantages(rewards_CF, spec, step)
    if spec.environment.advantage == "outcome":
        return bool(relative_C.any())
    episodes = map(Episode._make, zip(totals_C.tolist(), relative_C.tolist(), turns, strict=True))
    return any(values_K.any() for values_K in turn_advantages(list(episodes), spec))


def have_advantage(rewards_GCF: Rewards, totals_GC: Float64Array, spec: RunSpec, step: int) -> npt.NDArray[np.bool_]:
    """Return [G] `has_advantage` of each group of a batch, from the groups' `group_totals`; only for runs whose
    advantages follow from rewards by the outcome. Except with `gdpo`, a completion's advantage differs from 0 if and
    only if its total differs from the mean."""
    if spec.grpo.advantage == "gdpo":
        return np.array([group_advantages(rewards_CF, spec, step).any() for rewards_CF in rewards_GCF], bool)
    num_completions = totals_GC.shape[1]
    with np.errstate(invalid="ignore"):  # other code refuses infinite values
        distances_GC = np.abs(totals_GC - totals_GC.mean(axis=1, keepdims=True))
        rounding_G1 = num_completions * 2.0**-53 * np.abs(totals_GC).max(axis=1, keepdims=True)
        have_G = (distances_GC > rounding_G1).any(axis=1) & (num_completions > 1)
    for group in np.flatnonzero(np.isnan(totals_GC).any(axis=1)):
        have_G[group] = advantages(totals_GC[group], "dr_grpo", totals_GC[group]).any()
    return np.asarray(have_G, bool)


def group_advantages(
    rewards_CF: Rewards, spec: RunSpec, step: int, penalties_C: Float64Array | None = None
) -> Float64Array:
    """Return [C] the part of each completion's advantage that depends only on its group, by the preset
    `grpo.advantage`; 0 for a completion without a reward. For the presets of `advantages` this part is the whole
    advantage. For `trl_batch` and `gdpo` it is divided by a std of the batch afterwards, and for
    `reinforce_pp_baseline` it is whitened over the batch. `penalties_C` (β·KL of each completion) is subtracted from
    the rewards, but whether rewards are equal is decided before the subtraction."""
    if spec.grpo.advantage == "gdpo":
        return gdpo_scores(gated(rewards_CF, spec.rewards), weights_at(spec.rewards, step))
    rewards_C = group_totals(rewards_CF, spec.rewards, step)
    without_std = spec.grpo.advantage in ("trl_batch", "reinforce_pp_baseline")
    preset: Preset = "dr_grpo" if without_std else group_preset(spec.grpo.advantage)
    return advantages(rewards_C if penalties_C is None else rewards_C - penalties_C, preset, rewards_C)


def advantages(totals_C: Rewards, preset: Preset, rewards_C: Float64Array | None = None) -> Float64Array:
    """Return [C] float64, the advantage of each completion relative to its group, over the n completions that have a
    reward; 0 for NaN, and 0 everywhere if fewer than two have a reward (there is no baseline).

    - `trl`: (r - mean) / (std + 1e-4), std with n - 1 (TRL, `scale_rewards="group"`).
    - `nemo`: (r - mean of the others) / (std of the others + 1e-6), std with n - 2; not divided if the others are all
      equal (NeMo RL, leave-one-out baseline).
    - `dr_grpo`: r - mean (Liu et al. 2025, "Understanding R1-Zero-Like Training").
    - `rloo`: r - mean of the others (Ahmadian et al. 2024, "Back to Basics").

    `totals_C` is [C], NaN for "does not apply"; totals that differ by the rounding of float64 are equal. `rewards_C` is
    [C] rewards before a penalty, if the totals include one; they decide whether rewards are equal.
    """
    values_C = np.asarray(totals_C, np.float64)
    if rewards_C is None:
        sizes_C = np.abs(values_C)
        values_C = rewards_C = merged(values_C, lambda a, b: FLOAT64_ERROR * (sizes_C[a] + sizes_C[b]))
    advantages_C = np.zeros_like(values_C)
    valid_C = ~np.isnan(values_C)
    if valid_C.sum() >= 2:
        advantages_C[valid_C] = _relative_to_group(values_C[valid_C], rewards_C[valid_C], preset)
    return advantages_C


def gdpo_scores(rewards_CF: Rewards, weights_F: Sequence[float]) -> Float64Array:
    """Return [C] Σ_f weight_f · z_f of one group, where z_f are the `trl` advantages of function f (arXiv 2601.05242).
    A sum becomes 0 if it is so small that rounding of the rewards may be its only cause."""
    rewards_CF = np.asarray(rewards_CF, np.float64)
    scores_C, errors = np.zeros(len(rewards_CF)), []
    for rewards_C, weight in zip(rewards_CF.T, weights_F, strict=True):
        z_C = weight * advantages(rewards_C, "trl")
        scores_C += z_C
        if z_C.any():
            numbers_N = rewards_C[~np.isnan(rewards_C)]
            scale = abs(weight) / (numbers_N.std(ddof=1) + TRL_STD_EPSILON)
            errors.append(2 * FLOAT32_ERROR * np.abs(numbers_N).max() * scale)
    if len(errors) > 1:
        scores_C[np.abs(scores_C) <= sum(errors)] = 0.0
    return scores_C


def group_preset(name: str) -> Preset:
    """Return `name` if it is a preset whose advantages depend only on the group. Raises ValueError for another name."""
    for preset in get_args(Preset):
        if preset == name:
            return cast(Preset, preset)
    raise ValueError(f"unknown advantage preset {name!r}")


def turn_rewards(rows: RowArrays) -> list[Float64Array]:
    """Return for each sample of a group with an environment the [K] rewards of its turns."""
    samples = rows.row_samples[rows.turns[:, 0]]
    return [rows.turn_rewards[samples == sample].astype(np.float64) for sample in range(rows.num_samples)]


def turn_advantages(episodes: Sequence[Episode], spec: RunSpec) -> list[Float64Array]:
    """Return for each sample of a group the [K] advantages of its turns, calculated as `environment.advantage` says."""
    preset, section = group_preset(spec.grpo.advantage), spec.environment
    match section.advantage:
        case "discounted":
            return discounted_turns(episodes, section.turn_discount, preset)
        case "turn_level":
            return turn_level(episodes, section.turn_weight, preset)
        case _:
            raise ValueError(f"environment.advantage {section.advantage!r} is not per turn")


def discounted_turns(group: Sequence[Episode], discount: float, preset: Preset) -> list[Float64Array]:
    """Return for each sample the [K] advantages of its turns: A_k is the advantage by `preset` of G_k among all turns
    of the group, where G_k = Σ_{j≥k} γ^(j-k) · r_j is the reward to go of REINFORCE (Sutton and Barto 2018, section
    13.3). The outcome is part of the last turn's reward. A sample without any reward gets 0."""
    returns: list[Float64Array] = []
    sizes: list[Float64Array] = []
    for episode in group:
        without = bool(np.isnan(episode.outcome) and np.isnan(episode.rewards_K).all())
        rewards_K = np.nan_to_num(episode.rewards_K, nan=0.0)
        outcome = 0.0 if np.isnan(episode.outcome) else episode.outcome
        returns.append(np.full(len(rewards_K), np.nan) if without else _to_go(rewards_K, outcome, discount))
        sizes.append(_to_go(np.abs(rewards_K), abs(outcome), discount))
    if not returns:
        return []
    sizes_V = np.concatenate(sizes)
    returns_V = merged(np.concatenate(returns), lambda a, b: FLOAT32_ERROR * (sizes_V[a] + sizes_V[b]))
    ends = np.cumsum([len(returns_K) for returns_K in returns])
    return list(np.split(advantages(returns_V, preset), ends[:-1]))


def turn_level(group: Sequence[Episode], weight: float, preset: Preset) -> list[Float64Array]:
    """Return for each sample the [K] advantages of its turns: A_k = A + weight · a_k, where a_k is the advantage of r_k
    among the group's samples. Turn k is compared with turn k of the other samples, as in turn-level credit
    assignment for GRPO (Zeng et al. 2025, arXiv 2505.11821). A turn without a reward gets the sample's advantage A."""
    longest = max((len(episode.rewards_K) for episode in group), default=0)
    rewards_CK = np.full((len(group), longest), np.nan)
    for row_K, episode in zip(rewards_CK, group, strict=True):
        row_K[: len(episode.rewards_K)] = episode.rewards_K
    relative_CK = np.zeros_like(rewards_CK)
    for k in range(longest):
        relative_CK[:, k] = advantages(rewards_CK[:, k], preset)
    return [
        episode.advantage + weight * row_K[: len(episode.rewards_K)]
        for episode, row_K in zip(group, relative_CK, strict=True)
    ]


def _relative_to_group(values_N: Float64Array, rewards_N: Float64Array, preset: Preset) -> Float64Array:
    n = len(values_N)
    centred_N: Float64Array = values_N - values_N.mean()
    # A difference below the rounding of a mean of n numbers is 0.
    centred_N[np.abs(centred_N) <= n * 2.0**-53 * np.abs(values_N).max()] = 0.0
    # Difference to the leave-one-out mean: r - (S - r)/(n-1) = (r - S/n)·n/(n-1).
    leave_one_out_N: Float64Array = centred_N * n / (n - 1)
    match preset:
        case "dr_grpo":
            return centred_N
        case "rloo":
            return leave_one_out_N
        case "trl":
            return np.asarray(centred_N / (values_N.std(ddof=1) + TRL_STD_EPSILON))
        case "nemo":
            divided_N = leave_one_out_N / (_leave_one_out_std(values_N) + NEMO_STD_EPSILON)
            return np.where(_others_are_equal(rewards_N), leave_one_out_N, divided_N)
        case _:
            raise ValueError(f"unknown advantage preset {preset!r}")


def _others_are_equal(rewards_N: Float64Array) -> np.ndarray:
    """Compare values, because the computed std of equal numbers is often not exactly 0."""
    values, value_N, counts = np.unique(rewards_N, return_inverse=True, return_counts=True)
    return np.asarray(len(values) - (counts[value_N] == 1) <= 1)


def _leave_one_out_std(values_N: Float64Array) -> Float64Array:
    """Return [N] for each index the sample std of all other values; zeros for fewer than three values."""
    n = len(values_N)
    if n < 3:
        return np.zeros(n)
    others_NM = np.broadcast_to(values_N, (n, n))[~np.eye(n, dtype=bool)].reshape(n, n - 1)
    # Sorted: equal values then sum the others in the same order, and get equal advantages.
    return np.asarray(np.sort(others_NM, axis=1).std(axis=1, ddof=1))


def _to_go(rewards_K: Float64Array, outcome: float, discount: float) -> Float64Array:
    """Return [K] each turn's discounted reward to go; the outcome is part of the last turn's reward."""
    returns_K, to_go = np.zeros(len(rewards_K)), outcome
    for k in reversed(range(len(rewards_K))):
        to_go = rewards_K[k] + (to_go if k == len(rewards_K) - 1 else discount * to_go)
        returns_K[k] = to_go
    return returns_K
