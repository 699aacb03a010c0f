"""What a harness scored, in the form of an evaluation's result. Pure.

Promise: a score of the harness is taken as it is; every sample names every score, None where its task has no such score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.apps.evaluation.statistics import estimate
from paceline.errors import InvalidInput
from paceline.models.evaluation_results import problem_id

Json = dict[str, Any]


@dataclass(frozen=True)
class ScoredSample:
    """One sample of a harness."""

    task: str
    index: int
    """Number of the problem in its task."""
    sample: int
    """Number of the sample of its problem."""
    prompt: Any
    completion: str
    scores: Mapping[str, float]
    """By name, the first one counts as the reward."""
    choices: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    """Log-probability and greediness of each answer, of a task that chooses among them."""


@dataclass(frozen=True)
class HarnessRun:
    """What a harness left behind."""

    version: str
    samples: Sequence[ScoredSample]
    results: Json
    """Its own metrics by task."""


def result_of(
    run: HarnessRun, harness: str, arguments: Sequence[str], model: str, seed: int
) -> tuple[Json, list[Json]]:
    """Return result and samples. Raises InvalidInput for a run without a score."""
    labels = list(dict.fromkeys(f"{each.task}/{name}" for each in run.samples for name in each.scores))
    if not labels:
        raise InvalidInput(
            f"{harness} has scored no sample by itself; its own results are in its output, and a comparison needs samples"
        )
    samples = [_sample(each, labels) for each in run.samples]
    means: dict[str, dict[str, list[float]]] = {}
    for each in samples:
        values = {"reward": each["reward"], **{f"reward/{name}": v for name, v in each["rewards"].items()}}
        for name, value in values.items():
            if value is not None:
                means.setdefault(name, {}).setdefault(each["problem"], []).append(value)
    metrics = {
        name: estimate(np.array([sum(found) / len(found) for found in by_problem.values()]), seed)._asdict()
        for name, by_problem in means.items()
    }
    problems = {each["problem"] for each in samples}
    result: Json = {
        "model": model,
        "k": max(each["sample"] for each in samples) + 1,
        "seed": seed,
        "problems": len(problems),
        "failed": sum(not each.scores for each in run.samples),
        "failures": [],
        "metrics": metrics,
        "harness": {
            "name": harness,
            "version": run.version,
            "arguments": list(arguments),
            "results": run.results,
        },
    }
    return result, samples


def _sample(scored: ScoredSample, labels: Sequence[str]) -> Json:
    own = {f"{scored.task}/{name}": value for name, value in scored.scores.items()}
    entry: Json = {
        "problem": problem_id([scored.task, scored.index, scored.prompt]),
        "task": scored.task,
        "index": scored.index,
        "sample": scored.sample,
        "prompt": scored.prompt,
        "completion": scored.completion,
        "reward": next(iter(own.values()), None),
        "rewards": {label: own.get(label) for label in labels},
    }
    return entry | ({"choices": list(scored.choices)} if scored.choices else {})
