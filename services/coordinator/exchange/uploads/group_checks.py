"""Checks of a group before it is committed: everything that the learner relies on and that a worker could get wrong.

`check_arrays` checks every number, off the event loop and before anything is stored. The `fault_of_…` functions compare
its results with the ledger, inside the transaction: few numbers for each group. Faults are answered INVALID, with the
field, its value and the bound.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from paceline.errors import SpecError, WireError
from paceline.groups import Completion, FloatArray, Group, IntArray, Version
from paceline.spec import RunSpec
from paceline.wire import MAX_MESSAGE_BYTES, CompletionArrays, decode_completions, parse_message
from protos.paceline.v1 import exchange_pb2 as pb
from services.coordinator.exchange.state import ActiveRun, Exchange
from services.coordinator.ledger.segments import DamagedRecord, UnopenedSegment

MAX_LOGPROB = 1e-3
"""Largest log-probability: 0, but for rounding."""

MIN_LOGPROB = -1e5
"""Smallest log-probability, far below that of any token that a sampler draws: a probability of 1e-45 is the least that
float32 holds."""

MAX_LOGPROB_BITS, MIN_LOGPROB_BITS = np.array([MAX_LOGPROB, MIN_LOGPROB], np.float32).view(np.uint32).tolist()

MAX_ID = 2**31 - 1

MAX_TEXT_BYTES = 1024
"""Largest text of a token; the longest of known vocabularies have some hundred bytes."""

ARRAY_BYTES = 8
"""Size of a token in a payload frame: its id and its log-probability."""


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
    """Check every number of a group; return its largest token id. Raises WireError."""
    num_prompt = len(arrays.prompt_ids)
    if num_prompt == 0:
        raise WireError("prompt_ids is empty, but a prompt has at least one token")
    max_id = 0
    for name, ids in (("prompt_ids", arrays.prompt_ids), ("token_ids", arrays.token_ids)):
        if len(ids):
            max_id = max(
                max_id, highest := int(np.maximum.reduce(ids.view(np.uint32)))
            )  # a negative one is huge
            if highest > MAX_ID:
                raise WireError(f"{name} holds {ids.min()}, but ids begin at 0")
    longest = max(arrays.lengths.tolist(), default=0)
    if limits is not None and longest > limits.max_new_tokens:
        raise WireError(
            f"a completion of {longest} tokens is longer than policy.generation.max_new_tokens {limits.max_new_tokens}"
        )
    if limits is not None and num_prompt + longest > limits.max_total_tokens:
        raise WireError(
            f"a prompt of {num_prompt} tokens and a completion of {longest} are together longer than "
            f"policy.max_total_sequence_length {limits.max_total_tokens}"
        )
    check_logprobs("logprobs", arrays.logprobs)
    return max_id


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
    most = MAX_TEXT_BYTES * (num_tokens + len(reasons) + 1)
    if size_bytes > most:
        raise WireError(f"texts of {size_bytes} bytes for {num_tokens} tokens, but {most} are the most")
    for reason in reasons:
        if reason not in allowed:
            raise WireError(f"a finish_reason is {reason[:64]!r}, but has to be one of {', '.join(allowed)}")


def fault_of_ids(exchange: Exchange, run: ActiveRun, max_id: int) -> str:
    """Return why the learner could not look up the largest token id; empty where it can, or where its vocabulary is not
    known yet.
    """
    vocab_size = exchange.ledger.run(run.run_id)["vocab_size"]
    if vocab_size and max_id >= vocab_size:
        return f"token id {max_id} is not below the vocabulary's size {vocab_size}"
    return ""


def fault_of_group(
    exchange: Exchange, run: ActiveRun, row: sqlite3.Row, attempt: int, member_id: str, group: Group
) -> str:
    """Return why the result of an attempt cannot be true: its versions, or a prefix that it does not go on from. Empty
    where it can.

    The tokens of a worker are of versions that it acknowledged, or that are on their way to it; the prefix of its lease
    is of versions that an earlier holder had.
    """
    versions = {span[:2] for c in group.completions for span in c.spans}
    newest, step = Version(*max(versions, default=(0, 0))), max([step for _, step in versions], default=0)
    held = exchange.newest_of(member_id)
    is_held = held is not None and newest <= held and step <= held.step
    fault = "" if is_held else _fault_of_existence(exchange, run, newest.session, step)
    if fault:
        return fault
    try:
        prefix = _prefix_of(exchange, run, row)
    except (DamagedRecord, UnopenedSegment):
        return ""  # the prefix cannot be compared; the result replaces it
    if held is not None and newest > held:
        lost = attempt > 1 and prefix is None and exchange.ledger.counters(run.run_id).get("failures:damaged")
        if not lost and (prefix is None or newest > prefix.newest):
            return f"version {tuple(newest)} in spans is newer than {tuple(held)}, the newest that {member_id} acknowledged"
    if prefix is None or attempt <= prefix.attempt:  # leased before the prefix was returned
        return ""
    return _fault_of_continuation(prefix, group)


def _fault_of_existence(exchange: Exchange, run: ActiveRun, session: int, step: int) -> str:
    """Return why the newest session and step of a group's tokens are not the run's; empty where they are."""
    row = exchange.ledger.run(run.run_id)
    # Each worker's version is compared only where these are not enough.
    if session > row["session"] or step > row["published_step"]:
        newest_session, newest_step = exchange.newest_session_and_step()
        if session > (bound := max(row["session"], newest_session)):
            return f"session {session} in spans is beyond the newest, {bound}"
        if step > (bound := max(row["published_step"], newest_step)):
            return f"step {step} in spans is beyond the newest version's, {bound}"
    return ""


class Prefix(NamedTuple):
    """The prefix that an earlier worker returned of a group."""

    attempt: int
    """Attempt that returned it."""
    prompt_ids: IntArray
    completions: tuple[Completion, ...]

    @property
    def newest(self) -> Version:
        """Newest version of its tokens. The prefix of earlier attempts is a part of it."""
        return Version(*max((span[:2] for c in self.completions for span in c.spans), default=(0, 0)))


def _prefix_of(exchange: Exchange, run: ActiveRun, row: sqlite3.Row) -> Prefix | None:
    """Return the prefix of a group that is on record; None without one. Raises DamagedRecord, UnopenedSegment."""
    if row["attempt"] < 2:
        return None
    stored = exchange.ledger.payload(run.run_id, row["group_id"], "prefix")
    if stored is None:
        return None
    header, arrays = stored.read()
    returned = parse_message(pb.LeaseReturn, header)
    reasons = returned.finish_reasons
    return Prefix(returned.attempt, *decode_completions(arrays, reasons, [""] * len(reasons)))


def _fault_of_continuation(prefix: Prefix, group: Group) -> str:
    """Return why a group does not go on from its lease's prefix; empty where it does."""
    if not np.array_equal(prefix.prompt_ids, group.prompt_ids):
        return "prompt_ids are not those that the lease came with"
    for index, (before, now) in enumerate(zip(prefix.completions, group.completions, strict=True)):
        size = len(before.token_ids)
        if before.finish_reason != "abort" and len(now.token_ids) != size:
            return f"completion {index} has {len(now.token_ids)} tokens, but was finished with {size}"
        same = (
            np.array_equal(before.token_ids, now.token_ids[:size])
            and np.array_equal(before.logprobs, now.logprobs[:size])
            and np.array_equal(_versions_T(before), _versions_T(now)[:size])
        )
        if not same:
            return f"completion {index} does not begin with the {size} tokens that the lease came with"
    return ""


def _versions_T(completion: Completion) -> np.ndarray:
    """Return [T, 2] session and step of each token."""
    spans = completion.spans
    versions = np.array([(span.session, span.step) for span in spans], np.int64).reshape(-1, 2)
    return np.repeat(versions, [span.end - span.start for span in spans], axis=0)


def refuse_large_groups(spec: RunSpec) -> None:
    """Raises SpecError for a run whose groups no message could carry."""
    if not spec.samples:
        return
    sizes = {
        "grpo.num_generations_per_prompt": spec.grpo.num_generations_per_prompt,
        "grpo.val_samples_per_prompt": spec.grpo.val_samples_per_prompt,
    }
    name = max(sizes, key=lambda name: sizes[name])
    completions, tokens = sizes[name], spec.policy.generation.max_new_tokens
    size_bytes = completions * tokens * ARRAY_BYTES + spec.policy.max_total_sequence_length * ARRAY_BYTES
    if size_bytes > MAX_MESSAGE_BYTES:
        raise SpecError(
            f"{name} {completions} x policy.generation.max_new_tokens {tokens} make groups of up to "
            f"{size_bytes >> 20} MiB, but a message carries {MAX_MESSAGE_BYTES >> 20} MiB; lower one of the two"
        )
