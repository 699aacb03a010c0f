"""Decides between two models: by evaluations on the same problems (the gate), and by rewards of traces in use. Pure.

The gate. Promise: a candidate equal to the baseline fails with the probability of one tail of the interval (2.5 %). A
metric is compared problem by problem. If the evaluations cannot separate the two models, the outcome is `undecided`,
never `passed`.

The comparison in use promotes the candidate, holds, or rolls back. The models have answered different requests, so two
means are compared, not pairs. Requests with the same prompt are correlated, so the bootstrap resamples prompts, not
traces. Promise: a candidate equal to the champion is rolled back with the probability of one tail of the interval (2.5
%). If the traces cannot separate the two models, the decision is `hold`.

Suffixes: G prompts, B resamples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from paceline.apps.evaluation.statistics import (
    Estimate,
    Floats,
    below,
    differences,
    drawn,
    estimate,
    interval,
    paired_p,
)
from paceline.errors import InvalidInput, counted

MIN_PROBLEMS = 20
"""Smallest number of problems for a decision. With fewer problems, the bootstrap's interval has a wrong width."""

Outcome = Literal["passed", "failed", "undecided"]


@dataclass(frozen=True)
class Bounds:
    """Limits that a candidate must meet."""

    max_drop: float = 0.0
    """Largest accepted drop of the metric against the baseline."""
    margin: float = 0.05
    """The candidate passes only if the interval excludes a drop of `max_drop` plus this value."""
    minima: Mapping[str, float] | None = None
    """Maps a metric to the smallest value that the candidate must reach."""
    maxima: Mapping[str, float] | None = None
    """Maps a metric, such as a gap between groups, to the largest value that the candidate may have."""


def judge(
    candidate: Mapping[str, Any],
    candidate_samples: Sequence[Mapping[str, Any]],
    baseline: Mapping[str, Any],
    baseline_samples: Sequence[Mapping[str, Any]],
    bounds: Bounds,
    *,
    metric: str = "reward",
    seed: int = 0,
) -> dict[str, Any]:
    """Return the verdict on a candidate: its outcome, the reasons, the paired difference, the results' digests.

    The difference is candidate minus baseline: the mean over problems of each problem's mean over samples, with a 95 %
    bootstrap interval over problems, and `p` of a sign-flip test. The candidate fails if the interval lies below
    -max_drop, passes if it lies above -(max_drop + margin), and is undecided otherwise. Raises InvalidInput if a metric
    is unknown, or if the results have no problem in common.
    """
    ours, theirs = _by_problem(candidate_samples, metric), _by_problem(baseline_samples, metric)
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        raise InvalidInput(
            f"the two evaluations have no problem with {metric!r} in common; evaluate both models with the same file"
        )
    differences_G = differences(np.array([ours[name] for name in common]), np.array([theirs[name] for name in common]))
    difference, p = estimate(differences_G, seed), paired_p(differences_G, seed)
    reasons, outcomes = [], [compared(difference.low, difference.high, len(common), bounds)]
    reasons.append(
        f"{metric} differs by {difference.value:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}] over "
        f"{counted(len(common), 'problem')}, paired p {p:.2g}; max_drop {bounds.max_drop:g}, margin {bounds.margin:g}: {outcomes[0]}"
    )
    for name, least in (bounds.minima or {}).items():
        value = _value(candidate, name, f"--min {name}={least:g}")
        outcomes.append("failed" if below(value, least) else "passed")
        reasons.append(f"{name} is {value:.4f} and must be at least {least:g}: {outcomes[-1]}")
    for name, most in (bounds.maxima or {}).items():
        value = _value(candidate, name, f"--max {name}={most:g}")
        outcomes.append("failed" if below(most, value) else "passed")
        reasons.append(f"{name} is {value:.4f} and must be at most {most:g}: {outcomes[-1]}")
    outcome: Outcome = "failed" if "failed" in outcomes else "undecided" if "undecided" in outcomes else "passed"
    return {
        "outcome": outcome,
        "metric": metric,
        "difference": difference._asdict(),
        "p": p,
        "problems": len(common),
        "unpaired": len(ours.keys() ^ theirs.keys()),
        "bounds": {
            "max_drop": bounds.max_drop,
            "margin": bounds.margin,
            "min": dict(bounds.minima or {}),
            "max": dict(bounds.maxima or {}),
        },
        "seed": seed,
        "reasons": reasons,
        "digests": {"candidate": candidate["digest"], "baseline": baseline["digest"]},
    }


def compared(low: float, high: float, num_problems: int, bounds: Bounds) -> Outcome:
    if num_problems < MIN_PROBLEMS:
        return "undecided"
    if below(high, -bounds.max_drop):
        return "failed"
    return "passed" if low > -(bounds.max_drop + bounds.margin) else "undecided"


def _value(result: Mapping[str, Any], name: str, bound: str) -> float:
    if name not in result["metrics"]:
        known = ", ".join(sorted(result["metrics"]))
        raise InvalidInput(f"{bound}: the candidate has no such metric; it has {known}")
    return float(result["metrics"][name]["value"])


def _by_problem(samples: Sequence[Mapping[str, Any]], metric: str) -> dict[str, float]:
    """Return, for each problem, the mean of a metric over its samples; for `reward[kind=sums]`, only for the problems
    of that group. Samples that no function scored are not counted."""
    values: dict[str, list[float]] = defaultdict(list)
    metric, _, group = metric.removesuffix("]").partition("[")
    column, _, value_of_group = group.partition("=")
    label = metric.removeprefix("reward/")
    for sample in samples:
        if group and str(sample.get("groups", {}).get(column)) != value_of_group:
            continue
        if metric != "reward" and label not in sample["rewards"]:
            known = ", ".join(["reward", *(f"reward/{name}" for name in sample["rewards"])])
            raise InvalidInput(f"the samples have no {metric!r}; they have {known}")
        value = sample["reward"] if metric == "reward" else sample["rewards"][label]
        if value is not None:
            values[sample["problem"]].append(value)
    return {problem: sum(found) / len(found) for problem, found in values.items()}


Decision = Literal["promote", "hold", "roll back"]
DECISIONS: Mapping[str, Decision] = {"passed": "promote", "undecided": "hold", "failed": "roll back"}

Rewards = Mapping[Any, Sequence[float]]
"""Maps a prompt to the rewards of a model's traces with this prompt."""


def compare(champion: Rewards, candidate: Rewards, bounds: Bounds, seed: int = 0) -> dict[str, Any]:
    """Return the decision with both means, their difference (candidate minus champion) and its 95 % interval.

    With fewer than 20 prompts of either model the decision is to hold. Otherwise it is to roll back if the interval
    lies below -max_drop, to promote if the interval lies above -(max_drop + margin), else to hold. Raises InvalidInput
    for a model without rewards.
    """
    for name, rewards in (("champion", champion), ("candidate", candidate)):
        if not rewards:
            raise InvalidInput(f"the {name} has no trace with a reward; wait for feedback")
    means = [_means(rewards, seed + index) for index, rewards in enumerate((champion, candidate))]
    values = [_mean(champion), _mean(candidate)]
    value = float(differences(np.array(values[1]), np.array(values[0])))
    difference = interval(value, differences(means[1], means[0]))
    number = min(len(champion), len(candidate))
    decision = DECISIONS[compared(difference.low, difference.high, number, bounds)]
    return {
        "decision": decision,
        "difference": difference._asdict(),
        "champion": _side(champion, interval(values[0], means[0])),
        "candidate": _side(candidate, interval(values[1], means[1])),
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
    sums_G = np.array([sum(each) for each in rewards.values()], np.float64)
    counts_G = np.array([len(each) for each in rewards.values()], np.float64)
    parts = [sums_G[each].sum(axis=1) / counts_G[each].sum(axis=1) for each in drawn(len(sums_G), seed)]
    return np.concatenate(parts)
