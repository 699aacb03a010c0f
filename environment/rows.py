"""Rows of one sample, by exact token prefix: a turn whose prompt extends a row token by token goes on in it.

Promise: the tokens of a row are exactly what the model read and sampled, in order; nothing is encoded again, and where two rows
could be meant a new one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from paceline.environment.protocols import SampledTurn
from paceline.groups import Completion, IntArray, Turn, VersionSpan
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import TurnArrays

TextOf = Callable[[list[int]], str]
"""Decoder of the tokens of a row: `paceline.chat.completion_texts.text_of` with the run's tokenizer."""


class Place(NamedTuple):
    """Where a turn goes on."""

    row: int
    """A row, or the number of rows so far for a new one."""
    context_ids: IntArray
    """[K] tokens that the model reads and that the row does not have yet."""


class RowTokens:
    """Tokens of the rows so far."""

    def __init__(self) -> None:
        self._rows: list[IntArray] = []
        self._closed: set[int] = set()

    @property
    def count(self) -> int:
        return len(self._rows)

    def place(self, prompt_ids: IntArray) -> Place:
        """Return where a turn with this prompt goes on: in the longest row that it extends. Two rows of the same tokens are
        ambiguous, so a new row begins."""
        best: list[int] = []
        for row, tokens in enumerate(self._rows):
            if row in self._closed or len(tokens) > len(prompt_ids):
                continue
            if best and len(tokens) < len(self._rows[best[0]]):
                continue
            if np.array_equal(prompt_ids[: len(tokens)], tokens):
                best = [*best, row] if best and len(tokens) == len(self._rows[best[0]]) else [row]
        if len(best) != 1:
            return Place(len(self._rows), prompt_ids)
        return Place(best[0], prompt_ids[len(self._rows[best[0]]) :])

    def add(self, arrays: TurnArrays) -> None:
        parts = [arrays.context_ids, arrays.token_ids]
        if arrays.row == len(self._rows):
            self._rows.append(np.concatenate(parts))
        else:
            self._rows[arrays.row] = np.concatenate([self._rows[arrays.row], *parts])

    def prompt_of(self, arrays: TurnArrays) -> IntArray:
        """Return [P] what the model read for a turn that comes next."""
        if arrays.row == len(self._rows):
            return arrays.context_ids
        return np.concatenate([self._rows[arrays.row], arrays.context_ids])

    def close(self, row: int) -> None:
        """Let no turn go on in a row."""
        self._closed.add(row)


def turn_arrays(place: Place, turn: SampledTurn) -> TurnArrays:
    return TurnArrays(
        place.row,
        np.ascontiguousarray(place.context_ids, np.int32),
        np.ascontiguousarray(turn.token_ids, np.int32),
        np.ascontiguousarray(turn.logprobs, np.float32),
        turn.spans,
    )


class SampleRows(NamedTuple):
    """The rows of a finished sample."""

    rows: list[Completion]
    turns: list[Turn]
    """In the order of their rows and tokens; rows count from 0."""


def build_rows(
    turns: Sequence[tuple[TurnArrays, pb.TurnNote]],
    left_out: Collection[int] = (),
    text_of: TextOf | None = None,
    *,
    truncated: bool = False,
) -> SampleRows:
    """Return the rows that turns built, without those that are left out. `text_of` decodes the tokens of a row. Rows of a
    truncated episode end by `length`, whatever ended their last turn: that tells the learner.

    A turn that is left out is the last one of its row that trains, or nothing of its row trains.
    """
    kept = [(arrays, note) for index, (arrays, note) in enumerate(turns) if index not in left_out]
    rows: list[Completion] = []
    found: list[Turn] = []
    for number in sorted({arrays.row for arrays, _ in kept}):
        own = [(arrays, note) for arrays, note in kept if arrays.row == number]
        position = 0
        for index, (arrays, note) in enumerate(own):
            position += len(arrays.context_ids) if index else 0
            reward = note.reward if note.HasField("reward") else float("nan")
            found.append(Turn(len(rows), position, position + len(arrays.token_ids), reward))
            position += len(arrays.token_ids)
        reason = "length" if truncated else own[-1][1].finish_reason
        rows.append(_row([arrays for arrays, _ in own], reason, text_of))
    return SampleRows(rows, found)


def _row(turns: Sequence[TurnArrays], finish_reason: str, text_of: TextOf | None) -> Completion:
    token_ids: list[IntArray] = []
    sampled: list[np.ndarray] = []
    logprobs: list[np.ndarray] = []
    spans: list[VersionSpan] = []
    position = 0
    for index, arrays in enumerate(turns):
        if index:
            token_ids.append(arrays.context_ids)
            sampled.append(np.zeros(len(arrays.context_ids), bool))
            logprobs.append(np.zeros(len(arrays.context_ids), np.float32))
            position += len(arrays.context_ids)
        token_ids.append(arrays.token_ids)
        sampled.append(np.ones(len(arrays.token_ids), bool))
        logprobs.append(arrays.logprobs)
        spans += [s._replace(start=s.start + position, end=s.end + position) for s in arrays.spans]
        position += len(arrays.token_ids)
    ids = np.concatenate(token_ids)
    return Completion(
        ids,
        np.concatenate(logprobs),
        tuple(spans),
        finish_reason,
        text_of(ids.tolist()) if text_of is not None else "",
        prompt_ids=turns[0].context_ids,
        sampled_T=np.concatenate(sampled),
    )


def joined(samples: Iterable[SampleRows]) -> tuple[list[Completion], tuple[int, ...], tuple[Turn, ...]]:
    """Return the rows of all samples of a group, the sample of each row, and the turns with rows of the group."""
    rows: list[Completion] = []
    owners: list[int] = []
    turns: list[Turn] = []
    for sample, own in enumerate(samples):
        turns += [turn._replace(row=turn.row + len(rows)) for turn in own.turns]
        rows += own.rows
        owners += [sample] * len(own.rows)
    return rows, tuple(owners), tuple(turns)
