"""Arrays of the rows of a group with an environment, in its payload frame; `exchange.proto`, GroupResult, names them.

Promise: rows that decode belong to samples in order, their masks are what their version spans and turns cover, and nothing that
was not sampled has a log-probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.array_frames import concatenated, named_array
from paceline.errors import WireError
from paceline.groups import BoolArray, Completion, FloatArray, IntArray, Rows, Turn, VersionSpan

MAX_SAMPLES = 1 << 16
"""Most samples of a group."""


def encode_rows(prompt_ids: IntArray, completions: Sequence[Completion], rows: Rows) -> dict[str, np.ndarray]:
    prompts = [prompt_ids if c.prompt_ids is None else c.prompt_ids for c in completions]
    sampled = [np.ones(len(c.token_ids), bool) if c.sampled_T is None else c.sampled_T for c in completions]
    return {
        "prompt_ids": concatenated(prompts, np.int32),
        "prompt_lengths": np.array([len(ids) for ids in prompts], np.int32),
        "row_samples": np.array(rows.samples, np.int32),
        "num_samples": np.array([rows.num_samples], np.int32),
        "sampled": concatenated(sampled, np.bool_),
        "turns": np.array([turn[:3] for turn in rows.turns], np.int32).reshape(-1, 3),
        "turn_rewards": np.array([turn.reward for turn in rows.turns], np.float32),
    }


class RowArrays(NamedTuple):
    """Arrays of the rows of a group with an environment, as views into its payload frame."""

    prompt_lengths: IntArray
    row_samples: IntArray
    num_samples: int
    sampled: BoolArray
    turns: np.ndarray
    turn_rewards: FloatArray

    @classmethod
    def of(cls, arrays: dict[str, np.ndarray]) -> RowArrays | None:
        """Return the arrays; None for a group without rows. Raises WireError."""
        if "row_samples" not in arrays:
            return None
        num_samples = named_array(arrays, "num_samples", "i4", 1)
        if len(num_samples) != 1 or not 0 < num_samples[0] <= MAX_SAMPLES:
            raise WireError(
                f"num_samples is {num_samples[:4].tolist()}, has to be one number up to {MAX_SAMPLES}"
            )
        return cls(
            named_array(arrays, "prompt_lengths", "i4", 1),
            named_array(arrays, "row_samples", "i4", 1),
            int(num_samples[0]),
            named_array(arrays, "sampled", "b1", 1),
            named_array(arrays, "turns", "i4", 2),
            named_array(arrays, "turn_rewards", "f4", 1),
        )

    def check(self, num_prompt: int, lengths: Sequence[int]) -> None:
        """Check that they fit the row lengths and the number of prompt tokens. Raises WireError."""
        count, prompts = len(lengths), self.prompt_lengths.tolist()
        if not count or len(prompts) != count or len(self.row_samples) != count:
            raise WireError(
                f"{count} rows, but {len(prompts)} prompt_lengths and {len(self.row_samples)} row_samples; a group has a row"
            )
        if min(prompts) < 1 or sum(prompts) != num_prompt:
            raise WireError(
                f"prompt_lengths sum to {sum(prompts)} and are at least {min(prompts)}, with {num_prompt} prompt_ids"
            )
        samples = self.row_samples.tolist()
        if samples != sorted(samples) or samples[0] < 0 or samples[-1] >= self.num_samples:
            raise WireError(
                f"row_samples has to rise from 0 to below {self.num_samples}, and is {samples[:16]}"
            )
        if len(self.sampled) != sum(lengths):
            raise WireError(f"sampled has {len(self.sampled)} values for {sum(lengths)} tokens")
        if self.turns.shape[1] != 3 or len(self.turns) != len(self.turn_rewards):
            raise WireError(f"turns of shape {self.turns.shape} with {len(self.turn_rewards)} turn_rewards")
        if np.isinf(self.turn_rewards).any():
            raise WireError("turn_rewards holds an infinite number; a turn without reward has NaN")

    def rows(self, sampled: Sequence[BoolArray]) -> Rows:
        """Return the rows; `sampled` is the mask of each. Raises WireError where the turns are not the sampled tokens."""
        turns = [
            Turn(turn[0], turn[1], turn[2], reward)
            for turn, reward in zip(self.turns.tolist(), self.turn_rewards.tolist(), strict=True)
        ]
        covered = [np.zeros(len(mask), bool) for mask in sampled]
        before = (-1, 0)
        for turn in turns:
            fits = 0 <= turn.row < len(sampled) and 0 <= turn.start < turn.end <= len(sampled[turn.row])
            if not fits or (turn.row, turn.start) < before:
                raise WireError(f"turn {tuple(turn[:3])} is not after {before}, or not within a row")
            covered[turn.row][turn.start : turn.end] = True
            before = (turn.row, turn.end)
        for row, (mask, own) in enumerate(zip(sampled, covered, strict=True)):
            if not np.array_equal(mask, own):
                raise WireError(f"row {row}: its turns are not the tokens that `sampled` names")
        return Rows(self.num_samples, tuple(self.row_samples.tolist()), tuple(turns))


def check_spans_of_row(index: int, spans: list[VersionSpan], sampled_T: BoolArray) -> None:
    """Check that the spans of a row cover the tokens that were sampled, and no other. Raises WireError."""
    covered = np.zeros(len(sampled_T), bool)
    position = 0
    for span in spans:
        if span.start < position or span.end <= span.start or span.end > len(sampled_T):
            raise WireError(
                f"row {index}: span {tuple(span)} is not after token {position} and within the row"
            )
        covered[span.start : span.end] = True
        position = span.end
    if not np.array_equal(covered, sampled_T):
        raise WireError(f"row {index}: its version spans do not cover the tokens that `sampled` names")
