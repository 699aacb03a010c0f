"""Metrics of a batch by the groups' rows: rewards, their spread, lengths and ages. Pure.

Suffixes: G groups, C completions of a group, F reward functions.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.advantages import has_advantage
from paceline.groups import FloatArray
from paceline.rewards import closed_gates, group_totals
from paceline.services.coordinator.exchange.source_rewards import rewards_by_source
from paceline.spec import RewardFunctionSection, RunSpec

PERCENTILES = (10, 50, 90)
"""Percentiles of each function's rewards."""


def batch_metrics(
    spec: RunSpec,
    groups: Sequence[sqlite3.Row | Mapping[str, Any]],
    step: int,
    sources_G: Sequence[object] | None = None,
) -> dict[str, float]:
    """Return the metrics of the batch of `step`; not-a-number where no function gave a reward. `sources_G` are the values of
    `data.source_key`, None without one.

    `reward` is the mean over groups of their mean reward; standard deviations are those of a sample (n - 1).
    """
    completions = spec.grpo.num_generations_per_prompt
    rewards_GCF = np.stack([np.frombuffer(g["rewards"], "<f4").reshape(completions, -1) for g in groups])
    rewards_SF = rewards_GCF.reshape(len(groups) * completions, rewards_GCF.shape[2])
    totals_GC = np.stack([group_totals(rewards_CF, spec.rewards, step) for rewards_CF in rewards_GCF])
    known = [
        float(totals_C[~np.isnan(totals_C)].mean()) for totals_C in totals_GC if not np.isnan(totals_C).all()
    ]
    ages = Counter(step - g["oldest_step"] for g in groups)
    spread = {
        "reward_std": _std(totals_GC),
        "unscored_fraction": float(np.isnan(totals_GC).mean()),
    }
    if completions > 1:
        spread["reward_group_std"] = _mean([_std(totals_C) for totals_C in totals_GC])
        if spec.rewards_decide_advantages and spec.environment.advantage == "outcome":
            without = [not has_advantage(rewards_CF, spec, step) for rewards_CF in rewards_GCF]
            spread["zero_variance_fraction"] = float(np.mean(without))
    return {
        "reward": float(np.mean(known)) if known else float("nan"),
        "completion_length": sum(g["tokens"] for g in groups) / (len(groups) * completions),
        "trained_tokens": float(sum(g["tokens"] for g in groups)),
        **(spread if spec.rewards else {}),
        **_by_function(spec.rewards, rewards_SF, step),
        **({} if sources_G is None else rewards_by_source(totals_GC, sources_G)),
        **{f"age/{age}": float(number) for age, number in sorted(ages.items())},
    }


def _by_function(
    functions: Sequence[RewardFunctionSection], rewards_SF: FloatArray, step: int
) -> dict[str, float]:
    """Return the metrics of each function: its rewards before weight and gates, and how both apply to them."""
    found: dict[str, float] = {}
    closed_SF = closed_gates(rewards_SF, functions)
    for index, function in enumerate(functions):
        values_S, label = rewards_SF[:, index], function.label
        found[f"reward/{label}"] = _mean(values_S)
        found[f"reward_std/{label}"] = _std(values_S)
        found[f"unscored_fraction/{label}"] = float(np.isnan(values_S).mean())
        if len(known := _known(values_S)):
            quantiles = np.quantile(known, [percentile / 100 for percentile in PERCENTILES])
            found |= {f"reward_p{p}/{label}": float(q) for p, q in zip(PERCENTILES, quantiles, strict=True)}
        if function.weight_schedule:
            found[f"reward_weight/{label}"] = function.weight_at(step)
        if function.gate_min is not None:
            found[f"closed_fraction/{label}"] = float(closed_SF[:, index].mean())
    return found


def _mean(values: Any) -> float:
    """Return the mean of the numbers among `values`; not-a-number without any."""
    known = _known(values)
    return float(known.mean()) if len(known) else float("nan")


def _std(values: Any) -> float:
    """Return the standard deviation of the numbers among `values`, exactly 0 where they are equal; not-a-number below two of
    them."""
    known = _known(values)
    if len(known) < 2:
        return float("nan")
    return float(known.std(ddof=1)) if (known != known[0]).any() else 0.0


def _known(values: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    flat = np.asarray(values, np.float64).ravel()
    return flat[~np.isnan(flat)]
