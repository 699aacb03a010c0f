"""Checks of the turns of episodes, alone and as parts of a whole group, off the event loop: what no state of the ledger
could make acceptable, and digests by which the transaction compares a group with its journal without reading either.

The digest of a turn is XXH3-128 over its sampled tokens, their log-probabilities and their versions; that of its context over
the tokens that the model read before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from paceline.array_frames import Buffer, RowArrays
from paceline.errors import WireError
from paceline.groups import FloatArray, Group, IntArray, Version, VersionSpan
from paceline.services.coordinator.exchange.uploads.array_checks import (
    FINISHED,
    Limits,
    check_ids,
    check_logprobs,
    check_text_size,
)
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import MAX_NOTE_BYTES, TurnArrays, parse_message

ENDINGS = ("done", "truncated")
"""How a finished sample can end. One that is given up has no last turn."""

MAX_SAMPLE_BYTES = 1 << 20
"""Bytes of a sample's texts beside those of its tokens: schemas of tools, what a program wrote into its messages."""


class UploadedTurn(NamedTuple):
    """A finished turn whose bytes are valid."""

    row_index: int
    num_context: int
    num_tokens: int
    max_id: int
    """Largest token id."""
    versions: frozenset[Version]
    digest: str
    context_digest: str
    left_out: tuple[int, ...]
    """Of the last turn of a sample."""

    @property
    def oldest_step(self) -> int:
        """Oldest version among its tokens."""
        return min(version.step for version in self.versions)


class GroupTurn(NamedTuple):
    """A turn of a whole group, as its rows have it."""

    sample: int
    row_index: int
    """Index of its row within the sample."""
    digest: str
    context_digest: str


def check_turn(turn: pb.EpisodeTurn, frames: Sequence[Buffer], limits: Limits | None) -> UploadedTurn:
    """Return what the ledger keeps of a turn. Raises WireError."""
    if len(frames) != 2:
        raise WireError(f"a turn has two payload frames, not {len(frames)}")
    if len(frames[1]) > MAX_NOTE_BYTES:
        raise WireError(
            f"the note of a turn has {len(frames[1])} bytes, {MAX_NOTE_BYTES} are the most; a large part of it may be the "
            "state that the environment's `save` returns"
        )
    arrays, note = TurnArrays.decode(frames[0]), parse_message(pb.TurnNote, frames[1])
    max_id = max(
        check_ids("context_ids", arrays.context_ids),
        check_ids("token_ids", arrays.token_ids),
    )
    check_logprobs("logprobs", arrays.logprobs)
    if limits is not None and len(arrays.token_ids) > limits.max_new_tokens:
        raise WireError(
            f"a turn of {len(arrays.token_ids)} tokens is longer than policy.generation.max_new_tokens "
            f"{limits.max_new_tokens}"
        )
    if note.finish_reason not in FINISHED:
        raise WireError(
            f"finish_reason is {note.finish_reason[:64]!r}, but has to be one of {', '.join(FINISHED)}"
        )
    _check_number("reward", note.reward)
    _check_sample(turn, note)
    return UploadedTurn(
        arrays.row,
        len(arrays.context_ids),
        len(arrays.token_ids),
        max_id,
        frozenset(Version(*span[:2]) for span in arrays.spans),
        turn_digest(arrays.token_ids, arrays.logprobs, arrays.spans),
        context_digest(arrays.context_ids),
        tuple(sorted(note.left_out)),
    )


def _check_sample(turn: pb.EpisodeTurn, note: pb.TurnNote) -> None:
    """Check what belongs to the last turn alone. Raises WireError."""
    if note.HasField("sample") != turn.last:
        raise WireError("the last turn of a sample, and no other, tells in `sample` how the sample ended")
    if not turn.last:
        if note.left_out:
            raise WireError("only the last turn of a sample names turns in `left_out`")
        return
    if note.sample.ending not in ENDINGS:
        raise WireError(f"ending is {note.sample.ending[:64]!r}, but has to be one of {', '.join(ENDINGS)}")
    _check_number("sample.reward", note.sample.reward)
    _check_number("sample.turn_rewards", note.sample.turn_rewards)
    if len(set(note.left_out)) != len(note.left_out) or max(note.left_out, default=0) > turn.index:
        raise WireError(
            f"left_out is {list(note.left_out[:16])}, but names each of turns 0 to {turn.index} once"
        )
    if len(note.left_out) > turn.index:
        raise WireError(
            f"left_out names all {turn.index + 1} turns, but a finished sample has one that trains"
        )


def _check_number(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise WireError(f"{name} is {value}, but has to be a number; leave it unset where there is none")


def check_rows(rows: RowArrays, lengths: Sequence[int], num_prompt: int, limits: Limits | None) -> None:
    """Check the sizes of a group's rows against the spec's limits. Raises WireError."""
    rows.check(num_prompt, lengths)
    if limits is None:
        return
    turns_UI = rows.turns
    longest_turn = int((turns_UI[:, 2] - turns_UI[:, 1]).max(initial=0))
    if longest_turn > limits.max_new_tokens:
        raise WireError(
            f"a turn of {longest_turn} tokens is longer than policy.generation.max_new_tokens {limits.max_new_tokens}"
        )
    longest = int((rows.prompt_lengths + np.array(lengths, np.int64)).max())
    check_row_length(longest, limits)


def check_row_length(length: int, limits: Limits) -> None:
    """Raises WireError for a row that is longer than the run allows."""
    if length > limits.max_total_tokens:
        raise WireError(
            f"a row of {length} tokens is longer than policy.max_total_sequence_length {limits.max_total_tokens}"
        )


def check_samples(texts: pb.Texts, num_samples: int, num_tokens: int, size_bytes: int) -> None:
    """Check the texts of a group's samples. Raises WireError."""
    if len(texts.samples) != num_samples:
        raise WireError(f"{len(texts.samples)} texts of samples for {num_samples} samples")
    check_text_size(size_bytes - num_samples * MAX_SAMPLE_BYTES, num_tokens, len(texts.finish_reasons))
    for sample in texts.samples:
        if sample.ending not in (*ENDINGS, "failed"):
            raise WireError(
                f"ending is {sample.ending[:64]!r}, but has to be one of {', '.join((*ENDINGS, 'failed'))}"
            )
        _check_number("sample.reward", sample.reward)
        _check_number("sample.turn_rewards", sample.turn_rewards)


def turns_of(group: Group) -> list[GroupTurn]:
    """Return the turns of a group with rows, in the order of its samples, rows and tokens. Raises WireError for tokens that
    belong to no turn."""
    assert group.rows is not None
    samples, turns = group.rows.samples, []
    first_rows = {sample: row for row, sample in reversed(list(enumerate(samples)))}
    ends = [0] * len(samples)
    """End of the last turn of each row so far."""
    for row, start, end, _ in group.rows.turns:
        completion = group.completions[row]
        context_ids = completion.token_ids[ends[row] : start]
        if ends[row] == 0:
            prompt_ids = group.prompt_ids if completion.prompt_ids is None else completion.prompt_ids
            context_ids = np.concatenate([prompt_ids, context_ids])
        spans = [
            span._replace(start=max(span.start, start) - start, end=min(span.end, end) - start)
            for span in completion.spans
            if span.start < end and span.end > start
        ]
        part = slice(start, end)
        digest = turn_digest(completion.token_ids[part], completion.logprobs[part], spans)
        sample = samples[row]
        turns.append(GroupTurn(sample, row - first_rows[sample], digest, context_digest(context_ids)))
        ends[row] = end
    for row, completion in enumerate(group.completions):
        if ends[row] != len(completion.token_ids):
            raise WireError(
                f"row {row} ends at token {len(completion.token_ids)}, its last turn at {ends[row]}"
            )
    return turns


def turn_digest(token_ids: IntArray, logprobs: FloatArray, spans: Iterable[VersionSpan]) -> str:
    """Return XXH3-128 over sampled tokens; equal for spans that name the same version of each token."""
    lengths: list[list[int]] = []
    for session, step, start, end in spans:
        if lengths and lengths[-1][:2] == [session, step]:
            lengths[-1][2] += end - start
        else:
            lengths.append([session, step, end - start])
    state = xxhash.xxh3_128()
    state.update(len(token_ids).to_bytes(8, "little"))
    state.update(np.ascontiguousarray(token_ids, "<i4").data)
    state.update(np.ascontiguousarray(logprobs, "<f4").data)
    state.update(repr(lengths).encode())
    return state.hexdigest()


def context_digest(context_ids: IntArray) -> str:
    """Return XXH3-128 over the tokens that a turn reads."""
    return xxhash.xxh3_128(np.ascontiguousarray(context_ids, "<i4").tobytes()).hexdigest()
