"""Computes the metrics of a batch, and of the groups of each source.

Suffixes: G groups, C completions of a group, F reward functions."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.advantages import Rewards, closed_gates, group_totals, have_advantage
from paceline.groups import FloatArray
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange
from paceline.spec import RewardFunctionSection, RunSpec

PERCENTILES = (10, 50, 90)
"""Percentiles of each reward function's rewards that are reported as metrics."""


def batch_metrics(
    spec: RunSpec,
    groups: Sequence[sqlite3.Row | Mapping[str, Any]],
    step: int,
    sources_G: Sequence[object] | None = None,
) -> dict[str, float]:
    """Return the metrics of the batch of `step` by name; `reward` is NaN if no function gave a reward. `sources_G` are
    the values of `data.source_key`, None without that key. `reward` is the mean over groups of their mean reward;
    standard deviations are those of a sample (n - 1)."""
    completions = spec.grpo.num_generations_per_prompt
    rewards_GCF = np.stack([np.frombuffer(g["rewards"], "<f4").reshape(completions, -1) for g in groups])
    rewards_SF = rewards_GCF.reshape(len(groups) * completions, rewards_GCF.shape[2])
    totals_GC = group_totals(rewards_GCF, spec.rewards, step)
    numbers_G = [totals_C[~np.isnan(totals_C)] for totals_C in totals_GC]
    means = [float(numbers.mean()) for numbers in numbers_G if len(numbers)]
    ages = Counter(step - g["oldest_step"] for g in groups)
    spread = {"reward_std": _std(totals_GC), "unscored_fraction": float(np.isnan(totals_GC).mean())}
    if completions > 1:
        spread["reward_group_std"] = _mean([_std(totals_C) for totals_C in totals_GC])
        if spec.rewards_decide_advantages and spec.environment.advantage == "outcome":
            spread["zero_variance_fraction"] = float(np.mean(~have_advantage(rewards_GCF, totals_GC, spec, step)))
    return {
        "reward": float(np.mean(means)) if means else float("nan"),
        "completion_length": sum(g["tokens"] for g in groups) / (len(groups) * completions),
        "trained_tokens": float(sum(g["tokens"] for g in groups)),
        **(spread if spec.rewards else {}),
        **_by_function(spec.rewards, rewards_SF, step),
        **({} if sources_G is None else rewards_by_source(totals_GC, sources_G)),
        **{f"age/{age}": float(number) for age, number in sorted(ages.items())},
    }


def _by_function(functions: Sequence[RewardFunctionSection], rewards_SF: FloatArray, step: int) -> dict[str, float]:
    """Return each reward function's metrics: rewards before weight and gates, weight, and share of closed gates."""
    metrics: dict[str, float] = {}
    closed_SF = closed_gates(rewards_SF, functions)
    for index, function in enumerate(functions):
        values_S, label = rewards_SF[:, index], function.label
        metrics[f"reward/{label}"] = _mean(values_S)
        metrics[f"reward_std/{label}"] = _std(values_S)
        metrics[f"unscored_fraction/{label}"] = float(np.isnan(values_S).mean())
        if len(numbers := _numbers(values_S)):
            quantiles = np.quantile(numbers, [percentile / 100 for percentile in PERCENTILES])
            metrics |= {f"reward_p{p}/{label}": float(q) for p, q in zip(PERCENTILES, quantiles, strict=True)}
        if function.weight_schedule:
            metrics[f"reward_weight/{label}"] = function.weight_at(step)
        if function.gate_min is not None:
            metrics[f"closed_fraction/{label}"] = float(closed_SF[:, index].mean())
    return metrics


def _mean(values: Any) -> float:
    """Return the mean of the numbers among `values`; NaN if there are none."""
    numbers = _numbers(values)
    return float(numbers.mean()) if len(numbers) else float("nan")


def _std(values: Any) -> float:
    """Return the standard deviation of the numbers in `values`: exactly 0 if all are equal, NaN for fewer than two."""
    numbers = _numbers(values)
    if len(numbers) < 2:
        return float("nan")
    return float(numbers.std(ddof=1)) if (numbers != numbers[0]).any() else 0.0


def _numbers(values: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    flat = np.asarray(values, np.float64).ravel()
    return flat[~np.isnan(flat)]


MAX_SOURCES = 32
"""Largest number of sources with separate metrics. If there are more, the rarest are counted together as `other`."""

MAX_NAME = 40

OTHER = "other"


def rewards_by_source(totals_GC: Rewards, sources_G: Sequence[object]) -> dict[str, float]:
    """Return two metrics for each source: `reward_of/<source>`, the mean of its groups' mean rewards, and
    `groups_of/<source>`, the number of its groups. A group without any reward counts only in the number; a source
    without any reward has no mean."""
    names_G = source_names(sources_G)
    metrics: dict[str, float] = {}
    for name in sorted(set(names_G)):
        rows_GC = [totals_C for totals_C, of in zip(totals_GC, names_G, strict=True) if of == name]
        means = [float(np.nanmean(totals_C)) for totals_C in rows_GC if not np.isnan(totals_C).all()]
        if means:
            metrics[f"reward_of/{name}"] = float(np.mean(means))
        metrics[f"groups_of/{name}"] = float(len(rows_GC))
    return metrics


def source_names(sources: Sequence[object]) -> list[str]:
    """Return the values of a column as parts of metric names, bounded in length and number; the most frequent are kept."""
    names = [re.sub(r"[^\w.-]+", "_", str(source))[:MAX_NAME] or "none" for source in sources]
    counts = Counter(names)
    if len(counts) <= MAX_SOURCES:
        return names
    kept = {name for name, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[: MAX_SOURCES - 1]}
    return [name if name in kept else OTHER for name in names]


def sources_of(exchange: Exchange, run: ActiveRun, rows: Sequence[sqlite3.Row]) -> list[object] | None:
    """Return the source of each group; None if the run has no `data.source_key`."""
    key = run.spec.data.source_key
    if key is None:
        return None
    values = exchange.group_queries.column_values(run.run_id, [row["group_id"] for row in rows], key)
    return [values.get(row["group_id"]) for row in rows]
