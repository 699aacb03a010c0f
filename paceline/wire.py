"""Messages of the exchange: a protobuf header frame, then frames of arrays (safetensors) and texts (protobuf).

Tensors travel as safetensors, so no byte from a peer is ever executed. Unreadable bytes raise a WireError with the
fault; a service answers it and continues.

An episode is a sample of several turns (`exchange.proto`, EpisodeTurn). A turn appends to one transcript: first tokens
that the model reads (the prompt, or the environment's answer), then sampled ones. A sample's transcripts are in the
order in which its turns began them.

Suffixes: K tokens that were only read, T sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import safetensors.numpy
from google.protobuf.message import DecodeError, Message

from paceline.array_frames import (
    Buffer,
    RowArrays,
    check_spans_of_row,
    concatenated,
    decode_samplers,
    encode_rows,
    encode_samplers,
    load_arrays,
    named_array,
)
from paceline.errors import WireError
from paceline.groups import BoolArray, Completion, FloatArray, Group, IntArray, Rows, VersionSpan
from paceline.v1 import exchange_pb2 as pb

PROTOCOL = 4
"""Version of the exchange's messages and of the worker stream."""
MAX_MESSAGE_BYTES = 256 << 20
"""Largest frame in bytes that a socket accepts; ZeroMQ closes the connection of a sender of a larger frame."""
MAX_VERSION = 2**31 - 1
"""Largest session and step of a version: the learner keeps them in 32 bits."""

MessageT = TypeVar("MessageT", bound=Message)


def parse_message(kind: type[MessageT], frame: Buffer) -> MessageT:
    """Return the protobuf message in `frame`. Raises WireError if the frame is truncated or foreign."""
    try:
        return kind.FromString(frame)  # type: ignore[arg-type]  # it takes any buffer
    except DecodeError as error:
        raise WireError(f"the frame of {len(frame)} bytes is not of type {kind.DESCRIPTOR.name}: {error}") from None


def encode_result(
    prompt_ids: IntArray,
    completions: Sequence[Completion],
    rows: Rows | None = None,
    samples: Sequence[pb.SampleText] = (),
) -> list[bytes]:
    """Return a group's payload frames: arrays and texts, with an environment also transcripts and samples."""
    texts = pb.Texts(
        texts=[completion.text for completion in completions],
        finish_reasons=[completion.finish_reason for completion in completions],
        samples=samples,
    )
    return [encode_completions(prompt_ids, completions, rows), texts.SerializeToString()]


def decode_result(arrays: Buffer, texts: Buffer) -> tuple[IntArray, tuple[Completion, ...]]:
    """Return prompt tokens and completions of a generated group's frames. Raises WireError unless all match."""
    message = parse_message(pb.Texts, texts)
    return decode_completions(arrays, message.finish_reasons, message.texts)


def encode_completions(prompt_ids: IntArray, completions: Sequence[Completion], rows: Rows | None = None) -> bytes:
    """Return the payload frame of a group's arrays (`exchange.proto`, GroupResult)."""
    spans = [(index, *span[:4]) for index, completion in enumerate(completions) for span in completion.spans]
    arrays = {
        "prompt_ids": np.ascontiguousarray(prompt_ids, np.int32),
        "token_ids": concatenated([c.token_ids for c in completions], np.int32),
        "logprobs": concatenated([c.logprobs for c in completions], np.float32),
        "lengths": np.array([len(c.token_ids) for c in completions], np.int32),
        "spans": np.array(spans, np.int64).reshape(-1, 5),
        "truncated": np.array([c.finish_reason == "length" for c in completions], np.bool_),
    }
    arrays |= encode_samplers(span for completion in completions for span in completion.spans)
    if rows is not None:
        arrays |= encode_rows(prompt_ids, completions, rows)
    return safetensors.numpy.save(arrays)


class CompletionArrays(NamedTuple):
    """Arrays of a group's payload frame, as views into the frame (`exchange.proto`, GroupResult)."""

    prompt_ids: IntArray
    token_ids: IntArray
    lengths: IntArray
    logprobs: FloatArray
    spans: np.ndarray
    rows: RowArrays | None
    truncated: BoolArray
    """[C] true for a completion that was cut off at its token limit."""
    samplers: Sequence[str]
    """[S] sampler of each span; empty if unknown."""

    @classmethod
    def of(cls, payload: Buffer) -> CompletionArrays:
        """Return the arrays in a group's payload frame. Raises WireError."""
        arrays = load_arrays(payload)
        return cls(
            named_array(arrays, "prompt_ids", "i4", 1),
            named_array(arrays, "token_ids", "i4", 1),
            named_array(arrays, "lengths", "i4", 1),
            named_array(arrays, "logprobs", "f4", 1),
            spans := named_array(arrays, "spans", "i8", 2),
            RowArrays.of(arrays),
            named_array(arrays, "truncated", "b1", 1),
            decode_samplers(arrays, len(spans)),
        )


def decode_completions(
    payload: Buffer, finish_reasons: Sequence[str], texts: Sequence[str]
) -> tuple[IntArray, tuple[Completion, ...]]:
    """Return prompt tokens and completions of a payload frame. Raises WireError if anything does not match."""
    arrays = CompletionArrays.of(payload)
    if not np.isfinite(arrays.logprobs).all():
        raise WireError("logprobs has values that are not finite")
    return split_completions(arrays, finish_reasons, texts)


def split_completions(
    arrays: CompletionArrays, finish_reasons: Sequence[str], texts: Sequence[str]
) -> tuple[IntArray, tuple[Completion, ...]]:
    """Return prompt tokens (the first transcript's) and completions or transcripts. Raises WireError for a mismatch."""
    prompt_ids, token_ids, lengths, logprobs, _, row_arrays, *_ = arrays
    if not len(lengths) == len(finish_reasons) == len(texts):
        raise WireError(
            f"there are {len(lengths)} completions, but {len(finish_reasons)} finish reasons and {len(texts)} texts"
        )
    sizes = lengths.tolist()  # few numbers: Python is faster than numpy
    if min(sizes, default=0) < 0 or sum(sizes) != len(token_ids) or len(logprobs) != len(token_ids):
        raise WireError(
            f"lengths have sum {sum(sizes)}, but there are {len(token_ids)} tokens and {len(logprobs)} logprobs"
        )
    if row_arrays is not None:
        row_arrays.check(len(prompt_ids), sizes)
        if np.any(logprobs[~row_arrays.sampled]):
            raise WireError("logprobs of tokens that were not sampled must be 0")
    completions: list[Completion] = []
    start = prompt_start = 0
    for index, (size, completion_spans) in enumerate(zip(sizes, _spans_by_completion(arrays, len(sizes)), strict=True)):
        part = slice(start, start + size)
        row: dict[str, Any] = {}
        start += size
        if row_arrays is None:
            _check_spans(completion_spans, size, f"completion {index}: ")
        else:
            prompt_end = prompt_start + int(row_arrays.prompt_lengths[index])
            row = {"prompt_ids": prompt_ids[prompt_start:prompt_end], "sampled_T": row_arrays.sampled[part]}
            prompt_start = prompt_end
            check_spans_of_row(index, completion_spans, row["sampled_T"])
        reason, text = finish_reasons[index], texts[index]
        completions.append(Completion(token_ids[part], logprobs[part], tuple(completion_spans), reason, text, **row))
    first = prompt_ids if row_arrays is None else prompt_ids[: int(row_arrays.prompt_lengths[0])]
    return first, tuple(completions)


def split_rows(arrays: CompletionArrays, completions: Sequence[Completion]) -> Rows | None:
    """Return the transcripts of each sample; None for a group without an environment. Raises WireError."""
    if arrays.rows is None:
        return None
    return arrays.rows.rows([c.sampled_T for c in completions if c.sampled_T is not None])


def encode_reference(logprobs: Sequence[FloatArray]) -> bytes:
    """Return the frame of the reference's log-probabilities, [T] per completion (`exchange.proto`, ScoreResult)."""
    return safetensors.numpy.save({"reference_logprobs": concatenated(logprobs, np.float32)})


def decode_reference(payload: Buffer) -> FloatArray:
    """Return [ΣT] the reference's log-probabilities in a payload frame. Raises WireError."""
    logprobs = named_array(load_arrays(payload), "reference_logprobs", "f4", 1)
    if not np.isfinite(logprobs).all():
        raise WireError("reference_logprobs has values that are not finite")
    return logprobs


def decode_rewards(rewards: Sequence[float], num_completions: int) -> FloatArray:
    """Return [C, F] the rewards in a header's flat list. Raises WireError unless C divides the number of rewards."""
    if num_completions == 0 or len(rewards) % num_completions:
        raise WireError(f"{len(rewards)} rewards cannot be split over {num_completions} completions")
    rewards_CF = np.array(rewards, np.float32).reshape(num_completions, -1)
    # one bit pattern for NaN, so that equal rewards have equal digests
    rewards_CF[np.isnan(rewards_CF)] = np.nan
    return rewards_CF


def decode_group(group_id: int, payload: Buffer, rewards: Sequence[float], reference: Buffer | None = None) -> Group:
    """Return a group for a learner rank: arrays and rewards, without texts. The `reference` payload has the reference's
    log-probabilities. Finish reasons are `length` or `stop`. Raises WireError."""
    arrays = CompletionArrays.of(payload)
    count = len(arrays.lengths)
    if len(arrays.truncated) != count:
        raise WireError(f"truncated has {len(arrays.truncated)} values for {count} completions")
    reasons = ["length" if cut else "stop" for cut in arrays.truncated.tolist()]
    prompt_ids, completions = decode_completions(payload, reasons, [""] * count)
    rows = split_rows(arrays, completions)
    if reference is not None:
        completions = _with_reference(completions, decode_reference(reference))
    num_samples = count if rows is None else rows.num_samples
    return Group(group_id, prompt_ids, completions, rewards_CF=decode_rewards(rewards, num_samples), rows=rows)


def _with_reference(completions: tuple[Completion, ...], logprobs: FloatArray) -> tuple[Completion, ...]:
    ends = np.cumsum([len(completion.token_ids) for completion in completions])
    if ends[-1] != len(logprobs):
        raise WireError(f"there are {len(logprobs)} reference_logprobs, but the group has {ends[-1]} tokens")
    parts = np.split(logprobs, ends[:-1])
    return tuple(replace(c, reference_logprobs=part) for c, part in zip(completions, parts, strict=True))


def _spans_by_completion(arrays: CompletionArrays, count: int) -> list[list[VersionSpan]]:
    spans = arrays.spans
    rows = spans.tolist()
    if spans.shape[1] != 5 or any(min(row) < 0 or max(row) > MAX_VERSION or row[0] >= count for row in rows):
        raise WireError(
            f"spans of shape {spans.shape} must be rows (completion, session, step, start, end), from 0 to "
            f"{MAX_VERSION}, of the {count} completions"
        )
    by_completion: list[list[VersionSpan]] = [[] for _ in range(count)]
    for (index, session, step, start, end), sampler in zip(rows, arrays.samplers, strict=True):
        by_completion[index].append(VersionSpan(session, step, start, end, sampler))
    return by_completion


def _check_spans(spans: Sequence[VersionSpan], length: int, what: str = "") -> None:
    position = 0
    for span in spans:
        if span.start != position or span.end <= span.start:
            raise WireError(f"{what}span {span[:4]} does not follow token {position}")
        position = span.end
    if position != length:
        raise WireError(f"{what}version spans end at token {position}, but there are {length} tokens")


MAX_ROW = 1 << 16
MAX_NOTE_BYTES = 16 << 20
"""Largest serialized TurnNote: messages, text and the environment's saved state."""


class TurnArrays(NamedTuple):
    row: int
    """Index of the transcript that the turn extends; the last transcript's index plus 1 begins a new transcript."""
    context_ids: IntArray
    """[K] tokens that the model reads before it samples; in a new transcript, the transcript's prompt."""
    token_ids: IntArray
    """[T] sampled tokens, at least one."""
    logprobs: FloatArray
    """[T] behaviour log-probabilities, in nats."""
    spans: tuple[VersionSpan, ...]
    """Version spans, which cover [0, T) without gaps."""

    def encode(self) -> bytes:
        arrays: dict[str, np.ndarray] = {
            "row": np.array([self.row], np.int32),
            "context_ids": np.ascontiguousarray(self.context_ids, np.int32),
            "token_ids": np.ascontiguousarray(self.token_ids, np.int32),
            "logprobs": np.ascontiguousarray(self.logprobs, np.float32),
            "spans": np.array([span[:4] for span in self.spans], np.int64).reshape(-1, 4),
        }
        return safetensors.numpy.save(arrays | encode_samplers(self.spans))

    @classmethod
    def decode(cls, payload: Buffer) -> TurnArrays:
        """Return the turn in a payload frame. Raises WireError if its arrays do not match; values of ids and
        log-probabilities are not checked."""
        arrays = load_arrays(payload)
        row = named_array(arrays, "row", "i4", 1)
        if len(row) != 1 or not 0 <= row[0] <= MAX_ROW:
            raise WireError(f"row is {row[:4].tolist()}, not one number from 0 to {MAX_ROW}")
        token_ids = named_array(arrays, "token_ids", "i4", 1)
        logprobs = named_array(arrays, "logprobs", "f4", 1)
        if len(token_ids) == 0 or len(token_ids) != len(logprobs):
            raise WireError(
                f"a turn has {len(token_ids)} tokens and {len(logprobs)} logprobs; it needs at least one "
                "token, and one logprob for each"
            )
        table = named_array(arrays, "spans", "i8", 2)
        if table.shape[1] != 4 or (table.size and (table.min() < 0 or table.max() > MAX_VERSION)):
            raise WireError(
                f"spans of shape {table.shape} must be rows (session, step, start, end) from 0 to {MAX_VERSION}"
            )
        samplers = decode_samplers(arrays, len(table))
        spans = tuple(
            VersionSpan(session, step, start, end, sampler)
            for (session, step, start, end), sampler in zip(table.tolist(), samplers, strict=True)
        )
        _check_spans(spans, len(token_ids))
        return cls(int(row[0]), named_array(arrays, "context_ids", "i4", 1), token_ids, logprobs, spans)
