"""Holds requests that have arrived, and stores their uploads: groups, turns of episodes, and the reference's
log-probabilities that come with scores.

`requests/table.py:validate_upload` and `store` run on threads. The first decodes, checks and hashes an upload; the
second stores the valid uploads with one sync, before the transaction that may refer to them. If the transaction then
refuses a group (a duplicate), the group's bytes stay until their segment is removed.

Several kinds of uploads share the checks here. The checks refuse numbers that would harm the learner and are wrong in
every state of the ledger. Faults name the field, its value and the bound. Turns of episodes get digests, by which the
transaction compares a group with its turn log without reading either."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import xxhash

from paceline.array_frames import Buffer
from paceline.errors import WireError
from paceline.groups import FloatArray, Group, IntArray, Version, VersionSpan, joined_spans
from paceline.services.coordinator.ledger.segments import Location, PayloadStore, Record
from paceline.spec import RunSpec
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import CompletionArrays


@dataclass
class Arrived:
    """A request with its payload frames and, if it has arrays to store, the results of `validate_upload` and
    `store`."""

    request: pb.ExchangeRequest
    frames: Sequence[Buffer] = field(default_factory=list)
    limits: Limits | None = None
    """Limits of the run; None without a run."""
    uploaded: UploadedGroup | None = None
    """The group or prefix, if its bytes are valid."""
    turn: UploadedTurn | None = None
    reference: FloatArray | None = None
    """[ΣT] log-probabilities of the reference that came with a score, if their bytes are valid."""
    record: Record | None = None
    location: Location | None = None
    fault: str = ""
    """Reason why the request is invalid in every state of the ledger; empty if it is not."""
    is_decided: bool = False
    """True if the request was sent again and the ledger has decided it; then its frames are not kept."""

    @cached_property
    def kind(self) -> str:
        """Name of the request's body; empty if there is none."""
        return self.request.WhichOneof("body") or ""


class UploadedGroup(NamedTuple):
    group: Group
    """The group without its texts; its arrays are views into the frame."""
    max_id: int
    """Largest token id."""
    turns: Sequence[GroupTurn] = ()


class UploadedTurn(NamedTuple):
    row_index: int
    num_context: int
    num_tokens: int
    max_id: int
    versions: frozenset[Version]
    digest: str
    context_digest: str
    left_out: tuple[int, ...]
    """Indices of left-out turns; only in the last turn of a sample."""

    @property
    def oldest_step(self) -> int:
        return min(version.step for version in self.versions)


class GroupTurn(NamedTuple):
    """A turn of a whole group, taken from the group's rows."""

    sample: int
    row_index: int
    digest: str
    context_digest: str


def store(payloads: PayloadStore, results: Sequence[Arrived]) -> None:
    """Store the uploads that were validated; they are durable on return. Raises LedgerFault."""
    good = [(arrived, arrived.record) for arrived in results if arrived.record is not None]
    if good:
        locations = payloads.append([record for _, record in good])
        for (arrived, _), location in zip(good, locations, strict=True):
            arrived.location = location


ENDINGS = ("done", "truncated")
"""Endings of a finished sample. A sample that was given up has no last turn."""

FINISHED, ABORTED = ("stop", "length"), ("abort",)
"""Finish reasons of a completion; an aborted one is continued later."""

MAX_LOGPROB = 1e-3
"""Largest accepted log-probability: 0, with an allowance for rounding."""

MIN_LOGPROB = -1e5
"""Smallest accepted log-probability, far below that of any sampled token: float32 holds no probability below 1e-45."""

MAX_LOGPROB_BITS, MIN_LOGPROB_BITS = np.array([MAX_LOGPROB, MIN_LOGPROB], np.float32).view(np.uint32).tolist()

MAX_ID = 2**31 - 1

MAX_TEXT_BYTES = 1024
"""Largest number of bytes of a token's text; the longest in known vocabularies have a few hundred."""


class Limits(NamedTuple):
    max_new_tokens: int
    max_total_tokens: int
    """Largest number of tokens of a prompt together with its completion."""

    @classmethod
    def of(cls, spec: RunSpec) -> Limits:
        return cls(spec.policy.generation.max_new_tokens, spec.policy.max_total_sequence_length)


def check_arrays(arrays: CompletionArrays, limits: Limits | None) -> int:
    """Check every number of a group except the sizes of rows; return its largest token id. Raises WireError."""
    num_prompt = len(arrays.prompt_ids)
    if num_prompt == 0:
        raise WireError("prompt_ids is empty, but a prompt has at least one token")
    max_id = max(check_ids("prompt_ids", arrays.prompt_ids), check_ids("token_ids", arrays.token_ids))
    if arrays.rows is None:
        _check_lengths(num_prompt, max(arrays.lengths.tolist(), default=0), limits)
    check_logprobs("logprobs", arrays.logprobs)
    return max_id


def check_ids(name: str, ids: IntArray) -> int:
    """Return the largest token id; 0 if there is none. Raises WireError."""
    if not len(ids):
        return 0
    highest = int(np.maximum.reduce(ids.view(np.uint32)))  # negative ids become huge
    if highest > MAX_ID:
        raise WireError(f"{name} contains {ids.min()}, but ids begin at 0")
    return highest


def _check_lengths(num_prompt: int, longest: int, limits: Limits | None) -> None:
    if limits is not None and longest > limits.max_new_tokens:
        raise WireError(
            f"a completion of {longest} tokens is longer than policy.generation.max_new_tokens {limits.max_new_tokens}"
        )
    if limits is not None and num_prompt + longest > limits.max_total_tokens:
        raise WireError(
            f"a prompt of {num_prompt} tokens and a completion of {longest} are together longer than "
            f"policy.max_total_sequence_length {limits.max_total_tokens}"
        )


def check_logprobs(name: str, values: FloatArray) -> None:
    """Check log-probabilities of a sampler or of a reference. Raises WireError."""
    if len(values) and not _are_logprobs(values):
        least, most = np.minimum.reduce(values), np.maximum.reduce(values)
        raise WireError(f"{name} ranges from {least} to {most}, but must be from {MIN_LOGPROB:g} to {MAX_LOGPROB:g}")


def _are_logprobs(values: FloatArray) -> bool:
    """Return whether all values are numbers from MIN_LOGPROB to MAX_LOGPROB; every token is checked, so the values are
    usually read only once. The bits of IEEE 754 floats of one sign are ordered as integers by magnitude, followed by
    infinity and NaN. As signed integers, negative floats are below positive ones, and the greatest negative one has
    the largest magnitude."""
    greatest = int(np.maximum.reduce(values.view(np.int32)))
    if greatest < 0:
        return bool(greatest <= MIN_LOGPROB_BITS - 2**32)
    # Some are 0 or above: as unsigned integers the negative ones are the greatest.
    lowest = int(np.maximum.reduce(values.view(np.uint32)))
    return bool(greatest <= MAX_LOGPROB_BITS and lowest <= MIN_LOGPROB_BITS)


def check_texts(size_bytes: int, num_tokens: int, reasons: Collection[str], allowed: Collection[str]) -> None:
    """Check the texts and finish reasons of a group. Raises WireError."""
    check_text_size(size_bytes, num_tokens, len(reasons))
    for reason in reasons:
        if reason not in allowed:
            raise WireError(f"a finish_reason is {reason[:64]!r}, but must be one of {', '.join(allowed)}")


def check_text_size(size_bytes: int, num_tokens: int, num_texts: int) -> None:
    """Raise WireError if the texts have more bytes than `num_tokens` tokens can have."""
    most = MAX_TEXT_BYTES * (num_tokens + num_texts + 1)
    if size_bytes > most:
        raise WireError(f"texts have {size_bytes} bytes for {num_tokens} tokens, but {most} bytes are allowed")


def check_number(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise WireError(f"{name} is {value}, but must be finite; leave it unset if there is none")


def turn_digest(token_ids: IntArray, logprobs: FloatArray, spans: Iterable[VersionSpan]) -> str:
    """Return XXH3-128 over a turn's sampled tokens, log-probabilities, and the version and sampler of each token. A
    turn without samplers has the digest of 0.1.0."""
    joined = joined_spans(spans)
    has_samplers = any(span.sampler for span in joined)
    lengths = [[*span[:2], span.end - span.start, *([span.sampler] if has_samplers else [])] for span in joined]
    state = xxhash.xxh3_128()
    state.update(len(token_ids).to_bytes(8, "little"))
    state.update(np.ascontiguousarray(token_ids, "<i4").data)
    state.update(np.ascontiguousarray(logprobs, "<f4").data)
    state.update(repr(lengths).encode())
    return state.hexdigest()


def context_digest(context_ids: IntArray) -> str:
    """Return XXH3-128 over the tokens that the model reads before a turn."""
    return xxhash.xxh3_128(np.ascontiguousarray(context_ids, "<i4").tobytes()).hexdigest()
