"""Builds the transcripts of a sample: a turn continues the transcript that its prompt extends token by token.

Promise: the tokens of a transcript are exactly what the model read and sampled, in order. Nothing is encoded again. A
turn that could continue two transcripts begins a new one.
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
"""Decodes the tokens of a transcript: `paceline.chat.completion_texts.text_of` with the run's tokenizer."""


class Continuation(NamedTuple):
    """The transcript that a turn continues, and the tokens to add before the turn."""

    transcript: int
    """Index of the transcript; the number of transcripts if it is new."""
    context_ids: IntArray
    """[K] tokens that the model reads and that the transcript does not have yet."""


class TranscriptTokens:
    def __init__(self) -> None:
        self._transcripts: list[IntArray] = []
        self._closed: set[int] = set()

    @property
    def count(self) -> int:
        return len(self._transcripts)

    def continuation(self, prompt_ids: IntArray) -> Continuation:
        """Return the longest transcript that the prompt extends; a new one if there is none, or if two are equally
        long."""
        best: list[int] = []
        for index, tokens in enumerate(self._transcripts):
            if index in self._closed or len(tokens) > len(prompt_ids):
                continue
            if best and len(tokens) < len(self._transcripts[best[0]]):
                continue
            if np.array_equal(prompt_ids[: len(tokens)], tokens):
                best = [*best, index] if best and len(tokens) == len(self._transcripts[best[0]]) else [index]
        if len(best) != 1:
            return Continuation(len(self._transcripts), prompt_ids)
        return Continuation(best[0], prompt_ids[len(self._transcripts[best[0]]) :])

    def add(self, arrays: TurnArrays) -> None:
        parts = [arrays.context_ids, arrays.token_ids]
        if arrays.row == len(self._transcripts):
            self._transcripts.append(np.concatenate(parts))
        else:
            self._transcripts[arrays.row] = np.concatenate([self._transcripts[arrays.row], *parts])

    def prompt_of(self, arrays: TurnArrays) -> IntArray:
        if arrays.row == len(self._transcripts):
            return arrays.context_ids
        return np.concatenate([self._transcripts[arrays.row], arrays.context_ids])

    def close(self, transcript: int) -> None:
        """Let no further turn continue a transcript."""
        self._closed.add(transcript)


def turn_arrays(continuation: Continuation, turn: SampledTurn) -> TurnArrays:
    return TurnArrays(
        continuation.transcript,
        np.ascontiguousarray(continuation.context_ids, np.int32),
        np.ascontiguousarray(turn.token_ids, np.int32),
        np.ascontiguousarray(turn.logprobs, np.float32),
        turn.spans,
    )


class SampleTranscripts(NamedTuple):
    transcripts: list[Completion]
    turns: list[Turn]
    """Turns in the order of transcripts and tokens. Transcripts are numbered from 0."""


def build_transcripts(
    turns: Sequence[tuple[TurnArrays, pb.TurnNote]],
    left_out: Collection[int] = (),
    text_of: TextOf | None = None,
    *,
    truncated: bool = False,
) -> SampleTranscripts:
    """Return the transcripts of the turns that are not left out; `text_of` decodes a transcript's tokens. The
    transcripts of a truncated episode have the finish reason `length`, so that the learner knows of the truncation.

    A turn in `left_out` comes after the last turn of its transcript that trains, or its transcript has no turn that
    trains.
    """
    kept = [(arrays, note) for index, (arrays, note) in enumerate(turns) if index not in left_out]
    transcripts: list[Completion] = []
    kept_turns: list[Turn] = []
    for number in sorted({arrays.row for arrays, _ in kept}):
        members = [(arrays, note) for arrays, note in kept if arrays.row == number]
        position = 0
        for index, (arrays, note) in enumerate(members):
            position += len(arrays.context_ids) if index else 0
            reward = note.reward if note.HasField("reward") else float("nan")
            kept_turns.append(Turn(len(transcripts), position, position + len(arrays.token_ids), reward))
            position += len(arrays.token_ids)
        reason = "length" if truncated else members[-1][1].finish_reason
        transcripts.append(_join_turns([arrays for arrays, _ in members], reason, text_of))
    return SampleTranscripts(transcripts, kept_turns)


def _join_turns(turns: Sequence[TurnArrays], finish_reason: str, text_of: TextOf | None) -> Completion:
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


def join_transcripts(
    samples: Iterable[SampleTranscripts],
) -> tuple[list[Completion], tuple[int, ...], tuple[Turn, ...]]:
    """Return the transcripts of all samples, the sample of each transcript, and the turns with the group's indices."""
    transcripts: list[Completion] = []
    owners: list[int] = []
    turns: list[Turn] = []
    for number, sample in enumerate(samples):
        turns += [turn._replace(row=turn.row + len(transcripts)) for turn in sample.turns]
        transcripts += sample.transcripts
        owners += [number] * len(sample.transcripts)
    return transcripts, tuple(owners), tuple(turns)
