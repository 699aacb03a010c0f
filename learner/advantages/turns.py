"""Advantages of the turns of episodes, from the rewards of turns and of whole episodes.

Promise: the turns of a group depend on that group alone, so they are the same on whatever rank it is; a turn, or a sample,
without a reward neither shifts the baseline of others nor trains.

Suffixes: C samples of a group, K turns of a sample, V values that are compared with each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from learner.advantages.group import Float64Array, Preset, advantages


class Episode(NamedTuple):
    """The rewards of one sample."""

    outcome: float
    """Weighted reward of the whole episode; NaN where no function applied."""
    advantage: float
    """Advantage of the whole episode."""
    rewards_K: Float64Array
    """Reward of each turn, NaN for a turn without one."""


def discounted_turns(group: Sequence[Episode], discount: float, preset: Preset) -> list[Float64Array]:
    """Return [K] advantages of the turns of each sample: A_k = advantages over all turns of the group of G_k, where

    G_k = Σ_{j≥k} γ^(j-k) · r_j and the outcome is part of the last turn's reward.

    The reward to go of REINFORCE (Sutton and Barto 2018, section 13.3), relative to the group's turns by `preset`. A sample
    without any reward gets 0.
    """
    returns: list[Float64Array] = []
    for episode in group:
        rewards_K = np.nan_to_num(episode.rewards_K, nan=0.0)
        without = bool(np.isnan(episode.outcome) and np.isnan(episode.rewards_K).all())
        returns_K = np.full(len(rewards_K), np.nan)
        to_go = 0.0 if np.isnan(episode.outcome) else episode.outcome
        for k in reversed(range(len(rewards_K))):
            to_go = rewards_K[k] + (to_go if k == len(rewards_K) - 1 else discount * to_go)
            returns_K[k] = np.nan if without else to_go
        returns.append(returns_K)
    flat_V = advantages(np.concatenate(returns), preset) if returns else np.zeros(0)
    return list(np.split(flat_V, np.cumsum([len(returns_K) for returns_K in returns])[:-1]))


def turn_level(group: Sequence[Episode], weight: float, preset: Preset) -> list[Float64Array]:
    """Return [K] advantages of the turns of each sample: A_k = A + weight · advantages over the group's samples of r_k.

    Turn k is compared with turn k of the group's other samples, as in turn-level credit assignment for GRPO (Zeng et al.
    2025, arXiv 2505.11821). A turn without a reward gets the sample's advantage A.
    """
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
