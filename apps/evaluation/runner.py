"""Runs an evaluation outside of runs: samples answers to the validation problems, scores them in processes, summarises.

Promise: completions are scored as in a run's evaluation, by the same keys; a problem that cannot be scored counts as
failed, never as 0, and a missing reward is None. A problem first waits for room, which bounds memory, then for the
model, then for a reward process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from paceline.advantages import Rewards
from paceline.apps.evaluation.problems import EvaluatedModel, Problem, labels_of, solved
from paceline.apps.evaluation.statistics import Floats, bootstrap_gap, consensus, estimate, pass_at_k
from paceline.data.preparation.filters import text_of
from paceline.data.prompts import PromptSource, open_prompts
from paceline.errors import InvalidInput
from paceline.models.evaluation_results import problem_id
from paceline.reward.builtin.votes import same_vote, votes_of
from paceline.reward.runner import RewardRunner
from paceline.services.rollout.group_sampler import gather_or_cancel
from paceline.spec import RunSpec

Json = dict[str, Any]
MAX_GROUPS = 200
"""Largest number of different values in a column of evaluation.group_by."""


def summary(spec: RunSpec, model: str, problems: Sequence[Problem], seed: int, fingerprint: str) -> Json:
    """Return the metrics of scored problems, each with its bootstrap interval over problems, and the counts.

    `reward` and `reward/<function>` are avg@k. A function whose values are all 0 or 1 also has `pass@<j>` for the powers of
    two up to k, and, if k is above 1 and a completion states an answer, `cons@<k>`. Both cover the problems with j or k completions
    that got a number; `unscored` counts the other completions of each function. `reward[<column>=<value>]` is the reward of a group of
    problems, `gap/reward[<column>]` the best group's minus the worst group's; `grouping_columns` names the columns.
    Raises InvalidInput for a column with too many values.
    """
    scored = [problem for problem in problems if problem.rewards_CL is not None]
    means = [_means(problem, labels_of(spec)) for problem in scored]
    metrics = {
        name: estimate(values, seed)._asdict() for name, values in (_by_name(means) | _of_k(spec, scored)).items()
    }
    for column in grouping_columns(spec, [problem.columns for problem in problems]):
        metrics |= _of_groups(column, scored, means, seed)
    return {
        "model": model,
        "k": spec.grpo.val_samples_per_prompt if spec.evaluation.method == "sample" else 1,
        "method": spec.evaluation.method,
        "seed": seed,
        "problems": len(scored),
        "failed": len(problems) - len(scored),
        "unscored": _unscored(spec, scored),
        "failures": [f"problem {each.index}: {each.failure}" for each in problems if each.failure][:5],
        "data": fingerprint,
        "metrics": metrics,
    }


def grouping_columns(spec: RunSpec, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns that group the problems: `evaluation.group_by`, and `data.source_key` if any row has it."""
    key = spec.data.source_key
    by_source = [key] if key is not None and any(key in row for row in rows) else []
    return list(dict.fromkeys([*spec.evaluation.group_by, *by_source]))


def _means(problem: Problem, labels: Sequence[str]) -> dict[str, float]:
    """Return a problem's mean of each reward over the completions with a number; empty if none has one."""
    assert problem.rewards_CL is not None
    assert problem.totals_C is not None
    columns = {"reward": problem.totals_C}
    columns |= {f"reward/{label}": problem.rewards_CL[:, index] for index, label in enumerate(labels)}
    numbers = {name: values[~np.isnan(values)].astype(np.float64) for name, values in columns.items()}
    return {name: float(values.mean()) for name, values in numbers.items() if len(values)}


def _by_name(means: Sequence[Mapping[str, float]]) -> dict[str, Floats]:
    names = dict.fromkeys(name for each in means for name in each)
    return {name: np.array([each[name] for each in means if name in each]) for name in names}


def _unscored(spec: RunSpec, scored: Sequence[Problem]) -> dict[str, int]:
    """Return, by function label, the number of scored problems' completions that got no number, if there are any."""
    if not scored or spec.evaluation.method != "sample":
        return {}
    counts = np.isnan(np.concatenate([each.rewards_CL for each in scored if each.rewards_CL is not None])).sum(axis=0)
    return {label: int(count) for label, count in zip(labels_of(spec), counts, strict=True) if count}


def _of_k(spec: RunSpec, scored: Sequence[Problem]) -> dict[str, Floats]:
    """Return pass@j and cons@k of each 0/1 function, for several completions of a problem."""
    k, values = spec.grpo.val_samples_per_prompt, {}
    if spec.evaluation.method != "sample" or k == 1:
        return {}
    for index, reward in enumerate(spec.rewards):
        columns = [problem.rewards_CL[:, index] for problem in scored if problem.rewards_CL is not None]
        numbers = [each[~np.isnan(each)] for each in columns]
        if not any(map(len, numbers)) or not np.isin(np.concatenate(numbers), (0.0, 1.0)).all():
            continue
        for j in [1 << power for power in range(k.bit_length())]:
            found = [pass_at_k(len(each), int(each.sum()), j) for each in numbers if len(each) >= j]
            values[f"pass@{j}/{reward.label}"] = np.array(found)
        votes = [
            (votes_of(reward, problem.columns, problem.texts, scores := each.tolist()), scores)
            for problem, each in zip(scored, numbers, strict=True)
            if len(each) == k
        ]
        if any(vote is not None for found, _ in votes for vote in found):
            agreed = [consensus(*each, partial(same_vote, reward)) for each in votes]
            values[f"cons@{k}/{reward.label}"] = np.array(agreed)
    return {name: found for name, found in values.items() if len(found)}


def _of_groups(column: str, scored: Sequence[Problem], means: Sequence[Mapping[str, float]], seed: int) -> Json:
    groups: dict[str, list[Mapping[str, float]]] = {}
    for problem, found in zip(scored, means, strict=True):
        groups.setdefault(str(problem.columns.get(column)), []).append(found)
    if len(groups) > MAX_GROUPS:
        raise InvalidInput(
            f"column {column!r} of evaluation.group_by or data.source_key has {len(groups)} values, but at most "
            f"{MAX_GROUPS} are allowed; name another column"
        )
    metrics: Json = {}
    for name in dict.fromkeys(name for each in means for name in each):
        of_groups = {value: _by_name(found).get(name) for value, found in sorted(groups.items())}
        numbers = {value: values for value, values in of_groups.items() if values is not None}
        for value, values in numbers.items():
            metrics[f"{name}[{column}={value}]"] = estimate(values, seed)._asdict()
        if len(numbers) > 1 or len(groups) == 1:  # without numbers there is no gap, not a gap of 0
            metrics[f"gap/{name}[{column}]"] = bootstrap_gap(list(numbers.values()), seed)._asdict()
    return metrics


def samples_of(spec: RunSpec, problems: Sequence[Problem]) -> list[Json]:
    labels = labels_of(spec)
    columns = grouping_columns(spec, [problem.columns for problem in problems])
    found: list[Json] = []
    seen: dict[str, int] = {}
    for problem in problems:
        name = problem_id(problem.prompt)
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            name = f"{name}-{seen[name]}"
        groups = {column: str(problem.columns.get(column)) for column in columns}
        for index, completion in enumerate(problem.completions):
            entry: Json = {
                "problem": name,
                "index": problem.index,
                "sample": index,
                "prompt": problem.prompt,
                "completion": completion.text,
                "finish_reason": completion.finish_reason,
                "reward": _number(problem.totals_C, index),
                "rewards": {label: _number(problem.rewards_CL, (index, place)) for place, label in enumerate(labels)},
            }
            if groups:
                entry["groups"] = groups
            if problem.scores:
                entry["choices"] = [score._asdict() for score in problem.scores]
            found.append(entry)
    return found


def _number(values: Rewards | None, index: int | tuple[int, int]) -> float | None:
    return None if values is None or np.isnan(values[index]) else float(values[index])


class Evaluated(NamedTuple):
    result: Json
    samples: list[Json]
    questions: list[str]
    """Text of each problem, to compare with training data."""


async def evaluate(model: EvaluatedModel | None, spec: RunSpec, seed: int, num_processes: int = 1) -> Evaluated:
    """Evaluate `model` on the validation set of `spec`. `model` is None with the method `prefer`, which measures reward
    functions. Raises InvalidInput without a validation set, DataError, Unreadable, and errors of the model and
    `RewardRunner.start`."""
    if spec.data.validation is None:
        raise InvalidInput("data.validation is not set, but an evaluation needs its problems; set it to a data set")
    prompts = await asyncio.to_thread(open_prompts, spec.data, seed, validation=True)
    _check(spec, prompts)
    number = min(len(prompts), spec.grpo.max_val_samples)
    places = num_processes if model is None else model.concurrency
    requests = spec.grpo.val_samples_per_prompt if spec.evaluation.method == "sample" else 4  # of a problem
    room = asyncio.Semaphore(max(1, 2 * places // requests))

    async def problem(index: int) -> Problem:
        async with room:
            prompt, columns = await asyncio.to_thread(prompts.draw, index)
            return await solved(model, rewards, spec, seed, index, prompt, columns)

    async with RewardRunner(spec.rewards, num_processes) as rewards:
        problems: Sequence[Problem] = await gather_or_cancel(problem(index) for index in range(number))
    name = spec.policy.model_name if model is None else model.name
    return Evaluated(
        summary(spec, name, problems, seed, prompts.fingerprint),
        samples_of(spec, problems),
        [text_of(each.columns.get(spec.data.prompt_key) or each.prompt) for each in problems],
    )


def _check(spec: RunSpec, prompts: PromptSource) -> None:
    """Raise InvalidInput for settings that the data set cannot meet."""
    for column in spec.evaluation.group_by:
        if column not in prompts.columns:
            raise InvalidInput(
                f"evaluation.group_by names {column!r}, but the columns are {sorted(prompts.columns)}; name some of them"
            )
    if spec.evaluation.method == "choose" and spec.data.choices is None:
        raise InvalidInput(
            "evaluation.method is 'choose', but data.choices is not set; name the columns with the answers"
        )
