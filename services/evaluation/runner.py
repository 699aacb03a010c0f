"""An evaluation outside of runs: sample the validation prompts, score them in reward processes, and summarise.

Promise: completions are sampled and scored as in a run's evaluation, by the same keys; a problem that cannot be scored is
counted as failed and never as 0.

Order of waiting: a problem waits for room, then for the engine, then for a reward process. Room bounds what is in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from paceline.data.rows import PromptSource, open_prompts
from paceline.data.tokens import encode_prompt
from paceline.errors import InvalidInput
from paceline.evaluation.results import problem_id
from paceline.evaluation.statistics import consensus, estimate, pass_at_k
from paceline.groups import Completion, FloatArray
from reward.builtin.answers import find_answer
from reward.runner import RewardRunner
from rollout.engine import GenerationRequest, sample_seed
from rollout.stop_strings import StopStrings
from services.coordinator.exchange.rewards import totals
from services.model_server.serving import ServedModel
from services.reward.group_inputs import inputs_of_completions

Json = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """A problem with its completions and their rewards."""

    index: int
    prompt: Any
    completions: tuple[Completion, ...]
    rewards_CF: FloatArray | None
    """[C, F]; None where scoring failed."""
    failure: str = ""


async def evaluate(served: ServedModel, seed: int, num_processes: int = 1) -> tuple[Json, list[Json]]:
    """Return metrics and samples of the model on the validation set of its spec. Raises InvalidInput without one, DataError,
    Unreadable, and the errors of the engine and of `RewardRunner.start`."""
    spec = served.spec
    if spec.data.validation is None:
        raise InvalidInput(
            "data.validation is not set, and an evaluation needs its problems; name a data set"
        )
    prompts = await asyncio.to_thread(open_prompts, spec.data, seed, validation=True)
    number = min(len(prompts), spec.grpo.max_val_samples)
    k = spec.grpo.val_samples_per_prompt
    room = asyncio.Semaphore(max(1, 2 * served.engine.max_batch_size // k))
    async with RewardRunner(spec.rewards, num_processes) as rewards, asyncio.TaskGroup() as tasks:
        under_way = [
            tasks.create_task(_problem(served, rewards, prompts, index, seed, room))
            for index in range(number)
        ]
    problems = [task.result() for task in under_way]
    return summary(served, problems, seed, prompts.fingerprint), samples_of(served, problems)


async def _problem(
    served: ServedModel,
    rewards: RewardRunner,
    prompts: PromptSource,
    index: int,
    seed: int,
    room: asyncio.Semaphore,
) -> Problem:
    async with room:
        prompt, columns = await asyncio.to_thread(prompts.draw, index)
        try:
            completions = await _completions(served, prompt, index, seed)
        except InvalidInput as error:
            return Problem(index, prompt, (), None, str(error))
        inputs = inputs_of_completions(prompt, columns, completions)
        scored = await rewards.score(
            inputs.prompts, inputs.completions, inputs.completion_ids, inputs.columns
        )
        failure = scored.failure.message if scored.failure is not None else ""
        return Problem(index, prompt, tuple(completions), scored.rewards_CF, failure)


async def _completions(served: ServedModel, prompt: Any, index: int, seed: int) -> list[Completion]:
    data, generation = served.spec.data, served.spec.policy.generation
    ids = encode_prompt(served.tokenizer, prompt, data.apply_chat_template, data.chat_template_kwargs)
    decode = partial(served.tokenizer.decode, skip_special_tokens=True)
    stop = StopStrings(generation.stop_strings, decode) if generation.stop_strings else None
    requests = [
        GenerationRequest(
            f"eval/{index}/{each}", ids, served.params, sample_seed(seed, index, each), stop=stop
        )
        for each in range(served.spec.grpo.val_samples_per_prompt)
    ]
    done = await asyncio.gather(*(served.engine.generate(request) for request in requests))
    return [replace(each, text=_text(each, stop, decode)) for each in done]


def _text(completion: Completion, stop: StopStrings | None, decode: Callable[[list[int]], str]) -> str:
    """Return the text of a completion; one that a stop string ended ends with that string."""
    if stop is not None and completion.finish_reason == "stop":
        return stop.text(completion.token_ids)
    return str(decode(completion.token_ids.tolist()))


def summary(served: ServedModel, problems: Sequence[Problem], seed: int, fingerprint: str) -> Json:
    """Return the metrics of scored problems, each with its bootstrap interval over problems, and the counts.

    `reward` and `reward/<function>` are avg@k. A function whose values are all 0 or 1 also has `pass@<j>` for the powers of
    two up to k, and with k above 1 `cons@<k>`, by the answers that the completions state.
    """
    spec = served.spec
    k = spec.grpo.val_samples_per_prompt
    scored = [problem for problem in problems if problem.rewards_CF is not None]
    values: dict[str, list[float]] = {}
    for problem in scored:
        assert problem.rewards_CF is not None
        _note(values, "reward", totals(problem.rewards_CF, spec.rewards, 0))
        for index, reward in enumerate(spec.rewards):
            _note(values, f"reward/{reward.label}", problem.rewards_CF[:, index])
    for index, reward in enumerate(spec.rewards):
        columns = [problem.rewards_CF[:, index] for problem in scored if problem.rewards_CF is not None]
        if k > 1 and columns and np.isin(np.array(columns), (0.0, 1.0)).all():
            for j in [1 << power for power in range(k.bit_length())]:
                values[f"pass@{j}/{reward.label}"] = [pass_at_k(k, int(each.sum()), j) for each in columns]
            values[f"cons@{k}/{reward.label}"] = [
                consensus([find_answer(c.text) for c in problem.completions], each.tolist())
                for problem, each in zip(scored, columns, strict=True)
            ]
    metrics = {name: estimate(np.array(found), seed)._asdict() for name, found in values.items()}
    return {
        "model": spec.policy.model_name,
        "k": k,
        "seed": seed,
        "problems": len(scored),
        "failed": len(problems) - len(scored),
        "failures": [f"problem {each.index}: {each.failure}" for each in problems if each.failure][:5],
        "data": fingerprint,
        "metrics": metrics,
    }


def _note(values: dict[str, list[float]], name: str, rewards_C: FloatArray) -> None:
    """Add a problem's mean over the completions that got a number; a problem without any is left out."""
    known = rewards_C[~np.isnan(rewards_C)]
    if len(known):
        values.setdefault(name, []).append(float(known.astype(np.float64).mean()))


def samples_of(served: ServedModel, problems: Sequence[Problem]) -> list[Json]:
    """Return one entry for each sample, in the order of the data set; None stands for a missing reward."""
    rewards = served.spec.rewards
    found: list[Json] = []
    seen: dict[str, int] = {}
    for problem in problems:
        name = problem_id(problem.prompt)
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            name = f"{name}-{seen[name]}"
        for index, completion in enumerate(problem.completions):
            row_F = None if problem.rewards_CF is None else problem.rewards_CF[index]
            total = None if row_F is None else _number(totals(row_F[None], rewards, 0)[0])
            found.append(
                {
                    "problem": name,
                    "index": problem.index,
                    "sample": index,
                    "prompt": problem.prompt,
                    "completion": completion.text,
                    "finish_reason": completion.finish_reason,
                    "reward": total,
                    "rewards": {
                        each.label: None if row_F is None else _number(row_F[place])
                        for place, each in enumerate(rewards)
                    },
                }
            )
    return found


def _number(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)
