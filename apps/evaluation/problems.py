"""Evaluates a problem, from its row to its rewards, by each of the three methods.

Promise: reward functions get the arguments that they get in a run. `choose` passes them the letter of the likeliest
answer as a completion, `prefer` the two completions of the row.

Suffixes: C completions of a problem, F reward functions, L names of rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from paceline.advantages import Rewards, group_totals
from paceline.data.example_rows import preference_of
from paceline.data.messages import tools_of_prompt
from paceline.data.row_prompts import LETTERS, TEXTS
from paceline.errors import InvalidInput
from paceline.groups import Completion, FloatArray
from paceline.reward.runner import RewardRunner
from paceline.services.reward.group_inputs import inputs_of_completions
from paceline.spec import RunSpec
from paceline.spec.templates import fill


class ContinuationScore(NamedTuple):
    """Log-probability of a text after a prompt."""

    logprob: float
    """Sum of the log-probabilities of the text's tokens, in nats, under the model itself (temperature 1)."""
    is_greedy: bool
    """True if each token of the text is the likeliest one at its position."""


class EvaluatedModel(Protocol):
    """A model that completes prompts or computes log-probabilities."""

    name: str
    concurrency: int
    """Number of completions that are generated at a time; further requests wait."""

    async def sample(self, prompt: Any, index: int, seed: int, tools: list[Any] | None = None) -> list[Completion]:
        """Return `grpo.val_samples_per_prompt` completions of problem number `index`, with their texts. The chat
        template gets `tools`.

        Raises InvalidInput for a prompt that the model cannot take, Unavailable if it does not answer.
        """

    async def score(self, prompt: Any, continuations: Sequence[str]) -> list[ContinuationScore]:
        """Return the log-probability of each text after the prompt. Raises InvalidInput for a prompt that the model
        cannot take, Unavailable if the model does not answer."""


def split(prompt: str, continuation: str) -> tuple[str, str]:
    """Return prompt and continuation; white space at the prompt's end moves to the continuation, because tokens begin
    with white space. lm-eval's `TemplateLM._encode_pair` does the same."""
    kept = prompt.rstrip()
    return kept, prompt[len(kept) :] + continuation


NORMALISED = "_norm"
"""Suffix of a reward's name: the reward of the answer that is likeliest per character."""


@dataclass(frozen=True)
class Problem:
    index: int
    prompt: Any
    columns: Mapping[str, Any]
    completions: tuple[Completion, ...] = ()
    rewards_CL: FloatArray | None = None
    """[C, L] rewards. None if scoring failed."""
    totals_C: Rewards | None = None
    failure: str = ""
    scores: tuple[ContinuationScore, ...] = ()
    """Log-probability of each answer, with the method `choose`."""

    @property
    def texts(self) -> list[str]:
        return [completion.text for completion in self.completions]


def labels_of(spec: RunSpec) -> list[str]:
    """Return the [L] names of rewards. With `choose`, each name is there again, with a suffix, for the answer that is
    likeliest per character."""
    names = [reward.label for reward in spec.rewards]
    return [*names, *(name + NORMALISED for name in names)] if spec.evaluation.method == "choose" else names


async def solved(
    model: EvaluatedModel | None,
    rewards: RewardRunner,
    spec: RunSpec,
    seed: int,
    index: int,
    prompt: Any,
    columns: dict[str, Any],
) -> Problem:
    """Return the problem with its rewards, or with a failure if it cannot be completed or scored. `model`
    is None only with the method `prefer`. Raises Unavailable, and the engine's errors."""
    problem = Problem(index, prompt, columns)
    try:
        match spec.evaluation.method:
            case "choose":
                assert model is not None
                return await _chosen(problem, model, rewards, spec)
            case "prefer":
                return await _preferred(problem, rewards, spec)
            case _:
                assert model is not None
                tools = tools_of_prompt(prompt, columns)
                completions = await model.sample(prompt, index, seed, tools)
                rewards_CF = await _scored(problem, completions, rewards)
    except InvalidInput as error:
        return Problem(index, prompt, columns, failure=str(error))
    except _NotScored as error:
        return Problem(index, prompt, columns, error.completions, failure=str(error))
    total_C = group_totals(rewards_CF, spec.rewards, 0)
    return Problem(index, prompt, columns, tuple(completions), rewards_CF, total_C)


class _NotScored(Exception):
    def __init__(self, text: str, completions: Sequence[Completion]) -> None:
        super().__init__(text)
        self.completions = tuple(completions)


async def _chosen(problem: Problem, model: EvaluatedModel, rewards: RewardRunner, spec: RunSpec) -> Problem:
    """Return the problem with the letter of the likeliest answer as its completion, and the rewards of two choices: the
    likeliest answer, and the likeliest per character of its text (lm-eval's `acc_norm`)."""
    if tools_of_prompt(problem.prompt, problem.columns) is not None:
        raise InvalidInput(
            "the row has tools, which evaluation.method 'choose' does not pass to a model; rename the column 'tools'"
        )
    texts = problem.columns[TEXTS]
    continuations = [
        fill(spec.evaluation.continuation, {"letter": letter, "choice": text})
        for letter, text in zip(LETTERS, texts, strict=False)
    ]
    scores = await model.score(problem.prompt, continuations)
    logprobs = np.array([score.logprob for score in scores])
    picks = [logprobs.argmax(), (logprobs / np.array([len(text) for text in texts])).argmax()]
    nothing = np.empty(0)
    completions = tuple(
        Completion(nothing.astype(np.int32), nothing.astype(np.float32), (), "stop", LETTERS[pick]) for pick in picks
    )
    rewards_2F = await _scored(problem, completions, rewards)
    return Problem(
        problem.index,
        problem.prompt,
        problem.columns,
        completions[:1],
        rewards_2F.reshape(1, -1),
        group_totals(rewards_2F[:1], spec.rewards, 0),
        scores=tuple(scores),
    )


async def _preferred(problem: Problem, rewards: RewardRunner, spec: RunSpec) -> Problem:
    """Return the problem with the chosen text as its completion. Its rewards say whether the chosen text scores above
    the rejected one; a tie counts half. Raises InvalidInput for a row that prefers neither text."""
    data, preference = spec.data, preference_of(problem.columns, spec.data)
    if preference == 0:
        raise InvalidInput(
            f"column {data.preference_key!r} is 0 (no completion is better), so the row cannot be evaluated; remove it"
        )
    keys = (data.chosen_key, data.rejected_key)
    texts = [_text(problem.columns, key) for key in (keys if preference < 0 else keys[::-1])]
    nothing = np.empty(0)
    completions = [Completion(nothing.astype(np.int32), nothing.astype(np.float32), (), "stop", text) for text in texts]
    rewards_2F = await _scored(problem, completions, rewards)
    totals_2 = group_totals(rewards_2F, spec.rewards, 0)
    return Problem(
        problem.index,
        problem.prompt,
        problem.columns,
        tuple(completions[:1]),
        _wins(rewards_2F[0], rewards_2F[1])[None],
        _wins(totals_2[:1], totals_2[1:]),
    )


def _wins(chosen: Rewards, rejected: Rewards) -> FloatArray:
    """Return 1 if the chosen completion scores higher, 0 if lower, 0.5 for a tie, NaN if either has no number."""
    return np.asarray((np.sign(chosen - rejected) + 1) / 2, np.float32)


async def _scored(problem: Problem, completions: Sequence[Completion], rewards: RewardRunner) -> FloatArray:
    inputs = inputs_of_completions(problem.prompt, dict(problem.columns), completions)
    found = await rewards.score(inputs.prompts, inputs.completions, inputs.completion_ids, inputs.columns)
    if found.failure is not None or found.rewards_CF is None:
        raise _NotScored(found.failure.message if found.failure else "no rewards", completions)
    return found.rewards_CF


def _text(columns: Mapping[str, Any], key: str) -> str:
    """Return the text in a column, or the content of its last message."""
    value = columns.get(key)
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        value = value[-1].get("content")
    if not isinstance(value, str) or not value:
        raise InvalidInput(
            f"column {key!r} is {value!r:.80}, but must be the text of a completion; set data.chosen_key and "
            "data.rejected_key to such columns"
        )
    return value
