"""Reads arrays from a safetensors frame as views and checks them by name. Unreadable bytes raise a WireError.
`RowArrays` are the arrays of a group with an environment (`exchange.proto`, GroupResult). Promise: decoded transcripts
belong to samples in order, masks match version spans and turns, and only sampled tokens have a log-probability."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.errors import WireError
from paceline.groups import MEMBER_ID, BoolArray, Completion, FloatArray, IntArray, Rows, Turn, VersionSpan

MAX_TENSOR_HEADER_BYTES = 64 << 10
"""Largest size in bytes of a payload frame's JSON header. Five arrays need a few hundred bytes."""
DTYPES = {
    name: np.dtype(code)
    for name, code in {
        "BOOL": "|b1", "U8": "|u1", "I8": "|i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
        "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
    }.items()
}  # fmt: skip
"""Maps the name of a type in safetensors to numpy's type. Types that numpy lacks are left out."""

KINDS = {dtype.str[1:]: dtype for dtype in DTYPES.values()}
"""Maps the short name of a type, such as `i4`, to numpy's type."""

Buffer = bytes | memoryview


def load_arrays(payload: Buffer) -> dict[str, np.ndarray]:
    """Return a safetensors blob's arrays as read-only views into `payload`, without a copy. Layout: header size in 8
    bytes little endian, JSON header, arrays without gaps in any order (huggingface.co/docs/safetensors)."""
    header_bytes = int.from_bytes(payload[:8], "little")
    if len(payload) < 8 or header_bytes > min(len(payload) - 8, MAX_TENSOR_HEADER_BYTES):
        raise _no_safetensors(payload, f"the header does not fit the frame, or exceeds {MAX_TENSOR_HEADER_BYTES} bytes")
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
        raise _no_safetensors(payload, f"the arrays end at byte {end}, but the data has {len(data)} bytes")
    return arrays


def _view(data: memoryview, start: int, entry: dict[str, Any]) -> np.ndarray:
    """Return the array that `entry` of the header describes. It must begin at `start`."""
    dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    for number in (*shape, begin, end):
        if type(number) is not int or number < 0:
            raise ValueError("a number of a shape or of data_offsets is not a natural number")
    if begin != start or end > len(data) or math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(f"an array of shape {shape} and type {entry['dtype']} does not fit bytes {begin} to {end}")
    return np.ndarray(shape, dtype, data, begin)


def _no_safetensors(payload: Buffer, why: str) -> WireError:
    return WireError(f"the payload frame of {len(payload)} bytes is not a safetensors blob: {why}")


def named_array(arrays: dict[str, np.ndarray], name: str, kind: str, ndim: int) -> np.ndarray:
    array = arrays.get(name)
    if array is None:
        raise WireError(f"the payload has no array {name!r}; it has {sorted(arrays)}")
    if array.dtype != KINDS[kind] or array.ndim != ndim:
        raise WireError(f"array {name!r} is {array.dtype} of {array.ndim} dimensions, not {kind} of {ndim}")
    return array


def concatenated(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(a, dtype) for a in arrays]) if arrays else np.empty(0, dtype)


MAX_SAMPLERS = 1 << 13
"""Largest number of samplers of a group: as many as a coordinator has members."""
MAX_NAMES_BYTES = 65 * MAX_SAMPLERS


def encode_samplers(spans: Iterable[VersionSpan]) -> dict[str, np.ndarray]:
    """Return the arrays with the samplers of the spans; no array if no span has a sampler."""
    samplers = [span.sampler for span in spans]
    indices = {name: index for index, name in enumerate(dict.fromkeys(filter(None, samplers)))}
    if not indices:
        return {}
    return {
        "samplers": np.array([indices.get(name, -1) for name in samplers], np.int32),
        "sampler_names": np.frombuffer("\n".join(indices).encode(), np.uint8),
    }


def decode_samplers(arrays: dict[str, np.ndarray], num_spans: int) -> list[str]:
    """Return the sampler of each span in a payload frame; empty if unknown. Raises WireError."""
    if "samplers" not in arrays and "sampler_names" not in arrays:
        return [""] * num_spans
    indices = named_array(arrays, "samplers", "i4", 1).tolist()
    names = _sampler_names(named_array(arrays, "sampler_names", "u1", 1))
    if len(indices) != num_spans:
        raise WireError(f"samplers has {len(indices)} values for {num_spans} spans; it must have one for each span")
    if (used := set(indices) - {-1}) != set(range(len(names))):
        raise WireError(
            f"samplers has the indices {sorted(used)[:16]}, but sampler_names has {len(names)} names; every name must "
            "be used, and -1 means an unknown sampler"
        )
    unknown_last = (*names, "")
    return [unknown_last[index] for index in indices]


def _sampler_names(encoded: np.ndarray) -> tuple[str, ...]:
    if len(encoded) > MAX_NAMES_BYTES:
        raise WireError(f"sampler_names has {len(encoded)} bytes, but at most {MAX_NAMES_BYTES} are allowed")
    try:
        names = tuple(encoded.tobytes().decode().split("\n"))
    except UnicodeDecodeError as error:
        raise WireError(f"sampler_names is not UTF-8: {error}") from None
    for name in names:
        if not MEMBER_ID.fullmatch(name):
            raise WireError(
                f"sampler_names has {name[:80]!r}, which is not 1 to 64 of the characters A-Z a-z 0-9 . _ -"
            )
    if len(names) > MAX_SAMPLERS or len(set(names)) != len(names):
        raise WireError(
            f"sampler_names has {len(names)} names, {len(set(names))} of them different; at most {MAX_SAMPLERS} are "
            "allowed, each once"
        )
    return names


MAX_SAMPLES = 1 << 16


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
    """Arrays of the transcripts of a group with an environment, as views into the group's payload frame."""

    prompt_lengths: IntArray
    row_samples: IntArray
    num_samples: int
    sampled: BoolArray
    turns: np.ndarray
    turn_rewards: FloatArray

    @classmethod
    def of(cls, arrays: dict[str, np.ndarray]) -> RowArrays | None:
        """Return the arrays of a group's payload frame; None for a group without an environment. Raises WireError."""
        if "row_samples" not in arrays:
            return None
        num_samples = named_array(arrays, "num_samples", "i4", 1)
        if len(num_samples) != 1 or not 0 < num_samples[0] <= MAX_SAMPLES:
            raise WireError(f"num_samples is {num_samples[:4].tolist()}, not one number from 1 to {MAX_SAMPLES}")
        return cls(
            named_array(arrays, "prompt_lengths", "i4", 1),
            named_array(arrays, "row_samples", "i4", 1),
            int(num_samples[0]),
            named_array(arrays, "sampled", "b1", 1),
            named_array(arrays, "turns", "i4", 2),
            named_array(arrays, "turn_rewards", "f4", 1),
        )

    def check(self, num_prompt: int, lengths: Sequence[int]) -> None:
        """Raise WireError unless the arrays fit the lengths of the transcripts and the number of prompt tokens."""
        count, prompts = len(lengths), self.prompt_lengths.tolist()
        if not count or len(prompts) != count or len(self.row_samples) != count:
            raise WireError(
                f"there are {count} transcripts, but {len(prompts)} prompt_lengths and {len(self.row_samples)} "
                "row_samples; a group must have at least one transcript"
            )
        if min(prompts) < 1 or sum(prompts) != num_prompt:
            raise WireError(
                f"prompt_lengths have sum {sum(prompts)} and minimum {min(prompts)}; they must be positive, and their "
                f"sum must be {num_prompt}, the number of prompt_ids"
            )
        samples = self.row_samples.tolist()
        if samples != sorted(samples) or samples[0] < 0 or samples[-1] >= self.num_samples:
            raise WireError(f"row_samples do not rise from 0 to below {self.num_samples}: {samples[:16]}")
        if len(self.sampled) != sum(lengths):
            raise WireError(f"sampled has {len(self.sampled)} values for {sum(lengths)} tokens")
        if self.turns.shape[1] != 3 or len(self.turns) != len(self.turn_rewards):
            raise WireError(
                f"turns has shape {self.turns.shape} with {len(self.turn_rewards)} turn_rewards; "
                "turns must have a row of 3 numbers for each turn reward"
            )
        if np.isinf(self.turn_rewards).any():
            raise WireError("turn_rewards has an infinite number; a turn without a reward has NaN")

    def rows(self, sampled: Sequence[BoolArray]) -> Rows:
        """Return transcripts with turns, from each transcript's mask. Raises WireError unless turns and masks match."""
        turns = [
            Turn(turn[0], turn[1], turn[2], reward)
            for turn, reward in zip(self.turns.tolist(), self.turn_rewards.tolist(), strict=True)
        ]
        covered = [np.zeros(len(mask), bool) for mask in sampled]
        before = (-1, 0)
        for turn in turns:
            fits = 0 <= turn.row < len(sampled) and 0 <= turn.start < turn.end <= len(sampled[turn.row])
            if not fits or (turn.row, turn.start) < before:
                raise WireError(f"turn {tuple(turn[:3])} is not after the previous turn, or not within its transcript")
            covered[turn.row][turn.start : turn.end] = True
            before = (turn.row, turn.end)
        for row, (mask, turns_mask) in enumerate(zip(sampled, covered, strict=True)):
            if not np.array_equal(mask, turns_mask):
                raise WireError(f"transcript {row}: its turns do not cover the tokens marked in `sampled`")
        return Rows(self.num_samples, tuple(self.row_samples.tolist()), tuple(turns))


def check_spans_of_row(index: int, spans: list[VersionSpan], sampled_T: BoolArray) -> None:
    """Raise WireError unless the spans of a transcript cover the sampled tokens and no others."""
    covered = np.zeros(len(sampled_T), bool)
    position = 0
    for span in spans:
        if span.start < position or span.end <= span.start or span.end > len(sampled_T):
            raise WireError(
                f"transcript {index}: span {span[:4]} begins before token {position}, or leaves the transcript"
            )
        covered[span.start : span.end] = True
        position = span.end
    if not np.array_equal(covered, sampled_T):
        raise WireError(f"transcript {index}: its version spans do not cover the tokens marked in `sampled`")
