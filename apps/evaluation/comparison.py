"""Comparison of two models in use, by the rewards of their traces: promote the candidate, hold, or roll back. Pure.

The two have answered different requests, so the difference is of two means and not paired as the gate's. Requests of one prompt are
alike, so the bootstrap draws prompts, not traces.

Promise: an equal candidate is rolled back with the chance of one tail of the interval (2.5 %), and traces that cannot tell the two
apart say `hold`.

Suffixes: G prompts, B resamples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from paceline.apps.evaluation.gate import Bounds, compared
from paceline.apps.evaluation.statistics import CHUNK, LEVEL, RESAMPLES, Estimate, Floats, differences
from paceline.errors import InvalidInput

Decision = Literal["promote", "hold", "roll back"]
DECISIONS: Mapping[str, Decision] = {"passed": "promote", "undecided": "hold", "failed": "roll back"}

Rewards = Mapping[Any, Sequence[float]]
"""Rewards of the traces of each prompt."""


def compare(champion: Rewards, candidate: Rewards, bounds: Bounds, seed: int = 0) -> dict[str, Any]:
    """Return the decision with both means, their difference (candidate minus champion) and its 95 % interval.

    Roll back where the interval lies below -max_drop, promote where it lies above -(max_drop + margin), else hold; also hold with
    fewer than 20 prompts of either. Raises InvalidInput for a side without rewards.
    """
    for name, rewards in (("champion", champion), ("candidate", candidate)):
        if not rewards:
            raise InvalidInput(f"the {name} has no trace with a reward; wait for feedback")
    means = [_means(rewards, seed + index) for index, rewards in enumerate((champion, candidate))]
    values = [_mean(champion), _mean(candidate)]
    value = float(differences(np.array(values[1]), np.array(values[0])))
    difference = _estimate(value, differences(means[1], means[0]))
    number = min(len(champion), len(candidate))
    decision = DECISIONS[compared(difference.low, difference.high, number, bounds)]
    return {
        "decision": decision,
        "difference": difference._asdict(),
        "champion": _side(champion, _estimate(values[0], means[0])),
        "candidate": _side(candidate, _estimate(values[1], means[1])),
        "bounds": {"max_drop": bounds.max_drop, "margin": bounds.margin},
        "seed": seed,
    }


def _side(rewards: Rewards, estimate: Estimate) -> dict[str, Any]:
    traces = sum(len(each) for each in rewards.values())
    return {"reward": estimate._asdict(), "traces": traces, "prompts": len(rewards)}


def _mean(rewards: Rewards) -> float:
    found = [value for each in rewards.values() for value in each]
    return float(np.mean(found))


def _means(rewards: Rewards, seed: int) -> Floats:
    """Return [B] means over the traces of resamples of the prompts."""
    sums_G = np.array([sum(each) for each in rewards.values()], np.float64)
    counts_G = np.array([len(each) for each in rewards.values()], np.float64)
    random, num = np.random.default_rng(seed), len(sums_G)
    rows = max(1, CHUNK // num)
    parts = []
    for start in range(0, RESAMPLES, rows):
        drawn = random.integers(0, num, (min(rows, RESAMPLES - start), num))
        parts.append(sums_G[drawn].sum(axis=1) / counts_G[drawn].sum(axis=1))
    return np.concatenate(parts)


def _estimate(value: float, means_B: Floats) -> Estimate:
    tail = (1.0 - LEVEL) / 2
    low, high = np.quantile(means_B, [tail, 1.0 - tail])
    return Estimate(value, float(low), float(high))
