"""Checks of the numbers of an upload, off the event loop and before anything is stored: everything that the learner relies on
and that a worker could get wrong. Faults are answered INVALID, with the field, its value and the bound.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from paceline.errors import WireError
from paceline.groups import FloatArray, IntArray
from paceline.spec import RunSpec
from paceline.wire import CompletionArrays

FINISHED, ABORTED = ("stop", "length"), ("abort",)
"""Finish reasons of a completion; an aborted one is to be continued."""

MAX_LOGPROB = 1e-3
"""Largest log-probability: 0, but for rounding."""

MIN_LOGPROB = -1e5
"""Smallest log-probability, far below that of any token that a sampler draws: a probability of 1e-45 is the least that
float32 holds."""

MAX_LOGPROB_BITS, MIN_LOGPROB_BITS = np.array([MAX_LOGPROB, MIN_LOGPROB], np.float32).view(np.uint32).tolist()

MAX_ID = 2**31 - 1

MAX_TEXT_BYTES = 1024
"""Largest text of a token; the longest of known vocabularies have some hundred bytes."""


class Limits(NamedTuple):
    """Limits of a group by the spec."""

    max_new_tokens: int
    max_total_tokens: int
    """Tokens of prompt and completion together."""

    @classmethod
    def of(cls, spec: RunSpec) -> Limits:
        """Return the limits of a run."""
        return cls(spec.policy.generation.max_new_tokens, spec.policy.max_total_sequence_length)


def check_arrays(arrays: CompletionArrays, limits: Limits | None) -> int:
    """Check every number of a group; return its largest token id. Raises WireError. Of rows the sizes are checked by
    `turn_checks.py`.
    """
    num_prompt = len(arrays.prompt_ids)
    if num_prompt == 0:
        raise WireError("prompt_ids is empty, but a prompt has at least one token")
    max_id = max(check_ids("prompt_ids", arrays.prompt_ids), check_ids("token_ids", arrays.token_ids))
    if arrays.rows is None:
        _check_lengths(num_prompt, max(arrays.lengths.tolist(), default=0), limits)
    check_logprobs("logprobs", arrays.logprobs)
    return max_id


def check_ids(name: str, ids: IntArray) -> int:
    """Return the largest token id; 0 without any. Raises WireError."""
    if not len(ids):
        return 0
    highest = int(np.maximum.reduce(ids.view(np.uint32)))  # a negative one is huge
    if highest > MAX_ID:
        raise WireError(f"{name} holds {ids.min()}, but ids begin at 0")
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
        raise WireError(
            f"{name} goes from {least} to {most}, but has to be from {MIN_LOGPROB:g} to {MAX_LOGPROB:g}"
        )


def _are_logprobs(values: FloatArray) -> bool:
    """Return whether all are numbers from MIN_LOGPROB to MAX_LOGPROB. Mostly in one pass, as this is done with every
    token.

    IEEE 754 orders the bits of floats of one sign as integers by their size, beyond them infinity and NaN. Taken as
    signed integers, negative floats are below positive ones, and the greatest of the negative is that of the largest
    size.
    """
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
            raise WireError(f"a finish_reason is {reason[:64]!r}, but has to be one of {', '.join(allowed)}")


def check_text_size(size_bytes: int, num_tokens: int, num_texts: int) -> None:
    """Raises WireError for texts that are longer than any of so many tokens."""
    most = MAX_TEXT_BYTES * (num_tokens + num_texts + 1)
    if size_bytes > most:
        raise WireError(f"texts of {size_bytes} bytes for {num_tokens} tokens, but {most} are the most")
