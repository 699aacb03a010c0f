"""Prepares the inputs of reward functions for a group: one entry for each completion or (with an environment) episode.
Functions do not see an episode that was given up, and such an episode has no reward. Suffixes: C samples of a group, F
reward functions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.errors import WireError
from paceline.groups import Completion, FloatArray
from paceline.v1 import exchange_pb2 as pb

FAILED = "failed"
"""Ending of an episode that was given up."""


@dataclass(frozen=True)
class GroupInputs:
    """Arguments of reward functions, and the sample of each entry."""

    prompts: list[Any]
    completions: list[Any]
    """Texts, or lists of messages if the prompt is a list of messages; for episodes always lists of messages."""
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]
    samples: list[int]
    """Index in the group of each entry's sample."""
    num_samples: int
    """C: number of samples."""

    def all_rewards(self, rewards_EF: FloatArray) -> FloatArray:
        """Return [C, F] rewards of all samples; NaN for samples that were given up."""
        rewards_CF = np.full((self.num_samples, rewards_EF.shape[1]), np.nan, np.float32)
        rewards_CF[self.samples] = rewards_EF
        return rewards_CF

    def all_values(self, values: Sequence[Any]) -> list[Any]:
        """Return one value for each sample; None for samples that were given up."""
        by_sample = dict(zip(self.samples, values, strict=True))
        return [by_sample.get(sample) for sample in range(self.num_samples)]


def inputs_of_completions(prompt: Any, columns: dict[str, Any], completions: Sequence[Completion]) -> GroupInputs:
    """Return a group's inputs without an environment; completions include the beginning of the answer if the prompt has
    one."""
    count = len(completions)
    texts: list[Any] = [completion.text for completion in completions]
    if not isinstance(prompt, str):
        begun = ""
        if prompt and prompt[-1]["role"] == "assistant":
            prompt, begun = prompt[:-1], prompt[-1]["content"]
        texts = [[{"role": "assistant", "content": begun + text}] for text in texts]
    return GroupInputs(
        [prompt] * count,
        texts,
        [completion.token_ids.tolist() for completion in completions],
        {name: [value] * count for name, value in columns.items()},
        list(range(count)),
        count,
    )


def inputs_of_episodes(
    prompt: Any,
    columns: dict[str, Any],
    rows: Sequence[Completion],
    row_samples: Sequence[int],
    samples: Sequence[pb.SampleText],
    *,
    sums_turns: bool,
) -> GroupInputs:
    """Return the inputs of a group with an environment: each conversation as messages, its sampled tokens, and the
    columns `environment_reward`, `environment_turn_rewards` (sum over the turns) and `environment_ending`. With
    `sums_turns` an episode without its own reward gets the sum of its turns' rewards. Raises WireError if texts and
    transcripts differ."""
    if any(not 0 <= sample < len(samples) for sample in row_samples):
        raise WireError(
            f"the arrays have rows of samples {sorted(set(row_samples))[:8]}, but the header has {len(samples)} samples"
        )
    entries = [index for index, sample in enumerate(samples) if sample.ending != FAILED]
    texts = [samples[index] for index in entries]
    sampled: dict[int, list[int]] = {index: [] for index in entries}
    for row, sample in zip(rows, row_samples, strict=True):
        ids = row.token_ids if row.sampled_T is None else row.token_ids[row.sampled_T]
        sampled.setdefault(sample, []).extend(ids.tolist())
    turns = [text.turn_rewards if text.HasField("turn_rewards") else None for text in texts]
    rewards = [
        text.reward if text.HasField("reward") else of_turns if sums_turns else None
        for text, of_turns in zip(texts, turns, strict=True)
    ]
    lists = {name: [value] * len(entries) for name, value in columns.items()}
    lists |= {
        "environment_reward": rewards,
        "environment_turn_rewards": turns,
        "environment_ending": [text.ending for text in texts],
    }
    return GroupInputs(
        [_parsed(text.prompt_json, "prompt_json") if text.prompt_json else prompt for text in texts],
        [_parsed(text.messages_json, "messages_json") for text in texts],
        [sampled[index] for index in entries],
        lists,
        entries,
        len(samples),
    )


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise WireError(f"{name} of a sample is not JSON: {error}") from None
