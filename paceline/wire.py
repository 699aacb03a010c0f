"""Messages of the exchange: a protobuf header frame, then payload frames: safetensors for arrays, protobuf for texts,
nothing else.

Tensors travel as safetensors, so no byte that a peer sends is ever executed. Bytes that cannot be read raise a
WireError with the fault; a service answers it and goes on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import safetensors.numpy
from google.protobuf.message import DecodeError, Message

from paceline.errors import WireError
from paceline.groups import BoolArray, Completion, FloatArray, Group, IntArray, Rows, Turn, VersionSpan
from protos.paceline.v1 import exchange_pb2 as pb

PROTOCOL = 3
"""Version of the exchange's messages and of the worker stream."""

MAX_MESSAGE_BYTES = 256 << 20
"""Largest frame that a socket takes; ZeroMQ closes the connection of a sender that exceeds it."""

MAX_TENSOR_HEADER_BYTES = 64 << 10
"""Largest JSON header of a payload frame; five arrays need a few hundred bytes."""

MAX_SAMPLES = 1 << 16
"""Most samples of a group."""

MAX_VERSION = 2**31 - 1
"""Largest session and step of a version: the learner keeps them in 32 bits."""

DTYPES = {
    name: np.dtype(code)
    for name, code in {
        "BOOL": "|b1", "U8": "|u1", "I8": "|i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
        "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
    }.items()
}  # fmt: skip
"""safetensors' names of the types that numpy has."""

MessageT = TypeVar("MessageT", bound=Message)
Buffer = bytes | memoryview


def parse_message(kind: type[MessageT], frame: Buffer) -> MessageT:
    """Return the protobuf message in `frame`. Raises WireError when it is truncated or not ours."""
    try:
        return kind.FromString(frame)  # type: ignore[arg-type]  # it takes any buffer
    except DecodeError as error:
        raise WireError(f"the frame of {len(frame)} bytes is no {kind.DESCRIPTOR.name}: {error}") from None


def encode_result(
    prompt_ids: IntArray,
    completions: Sequence[Completion],
    rows: Rows | None = None,
    samples: Sequence[pb.SampleText] = (),
) -> list[bytes]:
    """Return the payload frames of a generated group: its arrays, its texts; with an environment also its rows and samples."""
    texts = pb.Texts(
        texts=[completion.text for completion in completions],
        finish_reasons=[completion.finish_reason for completion in completions],
        samples=samples,
    )
    return [encode_completions(prompt_ids, completions, rows), texts.SerializeToString()]


def decode_result(arrays: Buffer, texts: Buffer) -> tuple[IntArray, tuple[Completion, ...]]:
    """Prompt tokens and completions of a generated group. Raises WireError when anything does not fit together."""
    message = parse_message(pb.Texts, texts)
    return decode_completions(arrays, message.finish_reasons, message.texts)


def encode_completions(
    prompt_ids: IntArray, completions: Sequence[Completion], rows: Rows | None = None
) -> bytes:
    """Payload frame of a group's arrays; `exchange.proto`, GroupResult, names them."""
    spans = [(index, *span) for index, completion in enumerate(completions) for span in completion.spans]
    arrays = {
        "prompt_ids": np.ascontiguousarray(prompt_ids, np.int32),
        "token_ids": _concatenated([c.token_ids for c in completions], np.int32),
        "logprobs": _concatenated([c.logprobs for c in completions], np.float32),
        "lengths": np.array([len(c.token_ids) for c in completions], np.int32),
        "spans": np.array(spans, np.int64).reshape(-1, 5),
    }
    if rows is not None:
        arrays |= _encode_rows(prompt_ids, completions, rows)
    return safetensors.numpy.save(arrays)


def _encode_rows(
    prompt_ids: IntArray, completions: Sequence[Completion], rows: Rows
) -> dict[str, np.ndarray]:
    prompts = [prompt_ids if c.prompt_ids is None else c.prompt_ids for c in completions]
    sampled = [np.ones(len(c.token_ids), bool) if c.sampled_T is None else c.sampled_T for c in completions]
    return {
        "prompt_ids": _concatenated(prompts, np.int32),
        "prompt_lengths": np.array([len(ids) for ids in prompts], np.int32),
        "row_samples": np.array(rows.samples, np.int32),
        "num_samples": np.array([rows.num_samples], np.int32),
        "sampled": _concatenated(sampled, np.bool_),
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


class CompletionArrays(NamedTuple):
    """Arrays of a group's payload frame, as views into it; `exchange.proto`, GroupResult, names them."""

    prompt_ids: IntArray
    token_ids: IntArray
    lengths: IntArray
    logprobs: FloatArray
    spans: np.ndarray
    rows: RowArrays | None = None

    @classmethod
    def of(cls, payload: Buffer) -> CompletionArrays:
        """Return the arrays of a frame. Raises WireError."""
        arrays = load_arrays(payload)
        return cls(
            named_array(arrays, "prompt_ids", "i4", 1),
            named_array(arrays, "token_ids", "i4", 1),
            named_array(arrays, "lengths", "i4", 1),
            named_array(arrays, "logprobs", "f4", 1),
            named_array(arrays, "spans", "i8", 2),
            RowArrays.of(arrays),
        )


def decode_completions(
    payload: Buffer, finish_reasons: Sequence[str], texts: Sequence[str]
) -> tuple[IntArray, tuple[Completion, ...]]:
    """Prompt tokens and completions of a payload frame. Raises WireError when anything does not fit together."""
    arrays = CompletionArrays.of(payload)
    if not np.isfinite(arrays.logprobs).all():
        raise WireError("logprobs holds values that are not finite")
    return split_completions(arrays, finish_reasons, texts)


def split_completions(
    arrays: CompletionArrays, finish_reasons: Sequence[str], texts: Sequence[str]
) -> tuple[IntArray, tuple[Completion, ...]]:
    """Prompt tokens and completions of arrays whose values were checked. Raises WireError when they do not fit together."""
    prompt_ids, token_ids, lengths, logprobs, spans, row_arrays = arrays
    if not len(lengths) == len(finish_reasons) == len(texts):
        raise WireError(
            f"{len(lengths)} completions, but {len(finish_reasons)} reasons and {len(texts)} texts"
        )
    sizes = lengths.tolist()  # few numbers: Python is faster than numpy
    if min(sizes, default=0) < 0 or sum(sizes) != len(token_ids) or len(logprobs) != len(token_ids):
        raise WireError(
            f"lengths sum to {sum(sizes)}, but there are {len(token_ids)} tokens and {len(logprobs)} logprobs"
        )
    if row_arrays is not None:
        return _split_rows(arrays, row_arrays, finish_reasons, texts)
    completions, start = [], 0
    for index, (size, own) in enumerate(zip(sizes, _spans_by_completion(spans, len(sizes)), strict=True)):
        _check_spans(index, own, size)
        part = slice(start, start + size)
        completions.append(
            Completion(token_ids[part], logprobs[part], tuple(own), finish_reasons[index], texts[index])
        )
        start += size
    return prompt_ids, tuple(completions)


def _split_rows(
    arrays: CompletionArrays, row_arrays: RowArrays, finish_reasons: Sequence[str], texts: Sequence[str]
) -> tuple[IntArray, tuple[Completion, ...]]:
    """Prompt tokens of the first row, and the rows. Raises WireError."""
    sizes = arrays.lengths.tolist()
    row_arrays.check(len(arrays.prompt_ids), sizes)
    if np.any(arrays.logprobs[~row_arrays.sampled]):
        raise WireError("logprobs of tokens that were not sampled have to be 0")
    completions, start, prompt_start = [], 0, 0
    for index, (size, own) in enumerate(
        zip(sizes, _spans_by_completion(arrays.spans, len(sizes)), strict=True)
    ):
        part = slice(start, start + size)
        prompt_end = prompt_start + int(row_arrays.prompt_lengths[index])
        sampled_T = row_arrays.sampled[part]
        _check_spans_of_row(index, own, sampled_T)
        completions.append(
            Completion(
                arrays.token_ids[part],
                arrays.logprobs[part],
                tuple(own),
                finish_reasons[index],
                texts[index],
                prompt_ids=arrays.prompt_ids[prompt_start:prompt_end],
                sampled_T=sampled_T,
            )
        )
        start, prompt_start = start + size, prompt_end
    first = completions[0].prompt_ids
    assert first is not None
    return first, tuple(completions)


def split_rows(arrays: CompletionArrays, completions: Sequence[Completion]) -> Rows | None:
    """Return how the rows belong to samples; None for a group without an environment. Raises WireError."""
    if arrays.rows is None:
        return None
    return arrays.rows.rows([c.sampled_T for c in completions if c.sampled_T is not None])


def encode_reference(logprobs: Sequence[FloatArray]) -> bytes:
    """Return the payload frame of the reference's log-probabilities, one [T] for each completion; `exchange.proto`,
    ScoreResult, names it."""
    return safetensors.numpy.save({"reference_logprobs": _concatenated(logprobs, np.float32)})


def decode_reference(payload: Buffer) -> FloatArray:
    """[ΣT] the reference's log-probabilities of a payload frame. Raises WireError."""
    logprobs = named_array(load_arrays(payload), "reference_logprobs", "f4", 1)
    if not np.isfinite(logprobs).all():
        raise WireError("reference_logprobs holds values that are not finite")
    return logprobs


def decode_rewards(rewards: Sequence[float], num_completions: int) -> FloatArray:
    """Return [C, F] from the rows of a header. Raises WireError when they do not divide evenly."""
    if num_completions == 0 or len(rewards) % num_completions:
        raise WireError(f"{len(rewards)} rewards cannot be split over {num_completions} completions")
    rewards_CF = np.array(rewards, np.float32).reshape(num_completions, -1)
    rewards_CF[np.isnan(rewards_CF)] = (
        np.nan
    )  # a single bit pattern for NaN, so that equal rewards have equal digests
    return rewards_CF


def decode_group(
    group_id: int, payload: Buffer, rewards: Sequence[float], reference: Buffer | None = None
) -> Group:
    """Return a group as a learner rank gets it: arrays and rewards, without texts; with the `reference` payload also
    what that says of the tokens. Raises WireError."""
    arrays = CompletionArrays.of(payload)
    count = len(arrays.lengths)
    prompt_ids, completions = decode_completions(payload, [""] * count, [""] * count)
    rows = split_rows(arrays, completions)
    if reference is not None:
        completions = _with_reference(completions, decode_reference(reference))
    num_samples = count if rows is None else rows.num_samples
    return Group(
        group_id, prompt_ids, completions, rewards_CF=decode_rewards(rewards, num_samples), rows=rows
    )


def _with_reference(completions: tuple[Completion, ...], logprobs: FloatArray) -> tuple[Completion, ...]:
    ends = np.cumsum([len(completion.token_ids) for completion in completions])
    if ends[-1] != len(logprobs):
        raise WireError(f"{len(logprobs)} reference_logprobs, but the group has {ends[-1]} tokens")
    parts = np.split(logprobs, ends[:-1])
    return tuple(replace(c, reference_logprobs=part) for c, part in zip(completions, parts, strict=True))


def load_arrays(payload: Buffer) -> dict[str, np.ndarray]:
    """Return the arrays of a safetensors blob as read-only views into `payload`: nothing is copied.

    Layout (huggingface.co/docs/safetensors): header size as 8 bytes little endian, JSON header, then the arrays without
    gaps, in any order of names.
    """
    header_bytes = int.from_bytes(payload[:8], "little")
    if len(payload) < 8 or header_bytes > min(len(payload) - 8, MAX_TENSOR_HEADER_BYTES):
        raise _no_safetensors(payload, "its header does not fit into it")
    data = memoryview(payload)[8 + header_bytes :]
    arrays, end = {}, 0
    try:
        header = json.loads(str(payload[8 : 8 + header_bytes], "utf-8"))
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            arrays[name] = _view(data, end, entry)
            end = entry["data_offsets"][1]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise _no_safetensors(payload, repr(error)) from None
    if end != len(data):
        raise _no_safetensors(payload, f"its arrays end at {end} of {len(data)} bytes")
    return arrays


def _view(data: memoryview, start: int, entry: dict[str, Any]) -> np.ndarray:
    """Return the array that `entry` of the header describes; it has to begin at `start`."""
    dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    for number in (*shape, begin, end):
        if type(number) is not int or number < 0:
            raise ValueError("a size that is no natural number")
    if begin != start or end > len(data) or math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(f"{shape} of {entry['dtype']} cannot lie at {begin} to {end}")
    return np.ndarray(shape, dtype, data, begin)


def _no_safetensors(payload: Buffer, why: str) -> WireError:
    return WireError(f"the payload frame of {len(payload)} bytes is no safetensors blob: {why}")


def _spans_by_completion(spans: np.ndarray, count: int) -> list[list[VersionSpan]]:
    rows = spans.tolist()
    if spans.shape[1] != 5 or any(min(row) < 0 or max(row) > MAX_VERSION or row[0] >= count for row in rows):
        raise WireError(
            f"spans of shape {spans.shape} have to be rows (completion, session, step, start, end), from 0 to "
            f"{MAX_VERSION}, of the {count} completions"
        )
    by_completion: list[list[VersionSpan]] = [[] for _ in range(count)]
    for index, *span in rows:
        by_completion[index].append(VersionSpan(*span))
    return by_completion


def _check_spans(index: int, spans: list[VersionSpan], length: int) -> None:
    position = 0
    for span in spans:
        if span.start != position or span.end <= span.start:
            raise WireError(f"completion {index}: span {tuple(span)} does not follow token {position}")
        position = span.end
    if position != length:
        raise WireError(f"completion {index}: version spans end at {position}, the tokens at {length}")


def _check_spans_of_row(index: int, spans: list[VersionSpan], sampled_T: BoolArray) -> None:
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


def named_array(arrays: dict[str, np.ndarray], name: str, kind: str, ndim: int) -> np.ndarray:
    array = arrays.get(name)
    if array is None:
        raise WireError(f"the payload has no array {name!r}; it has {sorted(arrays)}")
    if array.dtype.str[1:] != kind or array.ndim != ndim:
        raise WireError(
            f"array {name!r} is {array.dtype} of {array.ndim} dimensions, has to be {kind} of {ndim}"
        )
    return array


def _concatenated(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(a, dtype) for a in arrays]) if arrays else np.empty(0, dtype)
