"""An evaluation outside of runs: ask a model the validation problems, score its answers in reward processes, and summarise.

Promise: completions are scored as in a run's evaluation, by the same keys; a problem that cannot be scored is counted as
failed and never as 0.

Order of waiting: a problem waits for room, then for the model, then for a reward process. Room bounds what is in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.apps.evaluation.models import AskedModel
from paceline.apps.evaluation.problems import Problem, solved
from paceline.apps.evaluation.summary import samples_of, summary
from paceline.data.overlap import text_of
from paceline.data.prompts import PromptSource, open_prompts
from paceline.errors import InvalidInput
from paceline.reward.runner import RewardRunner
from paceline.services.rollout.group_sampler import gather_or_cancel
from paceline.spec import RunSpec

Json = dict[str, Any]


class Evaluated(NamedTuple):
    """What an evaluation gives."""

    result: Json
    samples: list[Json]
    questions: list[str]
    """Text of each problem, for a comparison with training data."""


async def evaluate(model: AskedModel | None, spec: RunSpec, seed: int, num_processes: int = 1) -> Evaluated:
    """Evaluate a model on the validation set of `spec`; None where the method is `prefer`, whose reward functions are what is
    measured. Raises InvalidInput without a set, DataError, Unreadable, and the errors of the model and of
    `RewardRunner.start`."""
    if spec.data.validation is None:
        raise InvalidInput(
            "data.validation is not set, and an evaluation needs its problems; name a data set"
        )
    prompts = await asyncio.to_thread(open_prompts, spec.data, seed, validation=True)
    _check(spec, prompts)
    number = min(len(prompts), spec.grpo.max_val_samples)
    places = num_processes if model is None else model.concurrency
    room = asyncio.Semaphore(max(1, 2 * places // _requests_of(spec)))

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


def _requests_of(spec: RunSpec) -> int:
    """Return the requests of a problem."""
    return spec.grpo.val_samples_per_prompt if spec.evaluation.method == "sample" else 4


def _check(spec: RunSpec, prompts: PromptSource) -> None:
    """Raise InvalidInput for settings that no row of the data set can serve."""
    for column in spec.evaluation.group_by:
        if column not in prompts.columns:
            raise InvalidInput(
                f"evaluation.group_by names {column!r}, but the columns are {sorted(prompts.columns)}; name some of them"
            )
    if spec.evaluation.method == "choose" and spec.data.choices is None:
        raise InvalidInput(
            "evaluation.method is 'choose', but data.choices is not set; name the columns with the answers"
        )
