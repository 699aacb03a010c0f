"""Validates and stores uploads, off the event loop and before the transaction: groups, turns of episodes, and the
reference's log-probabilities that come with scores.

`validate_upload` and `store` run on threads: the first decodes, checks and hashes an upload, the second stores the
valid ones with one sync, before the transaction that may refer to them. A group that the transaction then refuses (a
duplicate) leaves bytes behind that are removed with their segment.

The checks cover every number that the learner relies on, that a worker could get wrong, and that is wrong in every
state of the ledger. Faults are answered INVALID, with the field, its value and the bound. Turns of episodes get
digests, by which the transaction compares a group with its turn log without reading either (`turn_digest`,
`context_digest`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash

from paceline.array_frames import Buffer, RowArrays
from paceline.errors import WireError
from paceline.groups import FloatArray, Group, IntArray, Version, VersionSpan
from paceline.rate_limited_log import unforeseen
from paceline.services.coordinator.ledger.segments import Location, PayloadStore, Record
from paceline.spec import RunSpec
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import (
    MAX_NOTE_BYTES,
    CompletionArrays,
    TurnArrays,
    decode_reference,
    parse_message,
    split_completions,
    split_rows,
)


@dataclass
class Arrived:
    """A request with its payload frames and, if it has arrays to store, the results of `validate_upload` and `store`."""

    request: pb.ExchangeRequest
    frames: Sequence[Buffer] = field(default_factory=list)
    limits: Limits | None = None
    """Limits of the run; None without a run."""
    kind: str = field(init=False)
    """Name of the request's body; empty if there is none."""
    group: Group | None = None
    """The group or prefix without its texts, if its bytes are valid; its arrays are views into the frame."""
    turns: list[GroupTurn] = field(default_factory=list)
    turn: UploadedTurn | None = None
    max_id: int = 0
    """Largest token id of the group or turn."""
    reference: FloatArray | None = None
    """[ΣT] log-probabilities of the reference that came with a score, if their bytes are valid."""
    record: Record | None = None
    location: Location | None = None
    fault: str = ""
    """Reason why the request is invalid in every state of the ledger; empty if it is not."""
    is_decided: bool = False
    """True if the request was sent again and the ledger has decided it; then its frames are not kept."""

    def __post_init__(self) -> None:
        self.kind = self.request.WhichOneof("body") or ""

    @property
    def has_bulk(self) -> bool:
        """Return whether the request has arrays to be stored before its transaction."""
        if self.is_decided:
            return False
        return self.kind in ("group", "turn") or (self.kind in ("score", "lease_return") and bool(self.frames))


def validate_upload(arrived: Arrived) -> None:
    """Decode and check a result with arrays; set `fault` if it is invalid in every state of the ledger."""
    try:
        if arrived.kind == "group":
            arrived.group = _decode(arrived)
            arrays, texts = arrived.frames
            arrived.record = Record.of(texts, arrays)
        elif arrived.kind == "lease_return":
            arrived.group = _decode_begun(arrived)
            returned = arrived.request.lease_return
            header = pb.LeaseReturn(
                group_id=returned.group_id, attempt=returned.attempt, finish_reasons=returned.finish_reasons
            )
            arrived.record = Record.of(header.SerializeToString(), arrived.frames[0])
        elif arrived.kind == "turn":
            arrived.turn = check_turn(arrived.request.turn, arrived.frames, arrived.limits)
            arrived.max_id = arrived.turn.max_id
            arrived.record = Record.of(arrived.frames[1], arrived.frames[0])
        elif len(arrived.frames) != 1:
            raise WireError(f"a score has one payload frame at most, not {len(arrived.frames)}")
        else:
            reference = decode_reference(arrived.frames[0])
            check_logprobs("reference_logprobs", reference)
            arrived.reference = reference
            arrived.record = Record.of(b"", arrived.frames[0])
    except WireError as error:
        arrived.fault = str(error)
    except Exception as error:  # whatever arrives, the other groups are stored
        logged = unforeseen.note(f"the check of a {arrived.kind}", error)
        arrived.fault = f"the coordinator failed on this request: {logged}"


def store(payloads: PayloadStore, results: Sequence[Arrived]) -> None:
    """Store the uploads that were validated; they are durable on return. Raises LedgerFault."""
    good = [(arrived, arrived.record) for arrived in results if arrived.record is not None]
    if good:
        locations = payloads.append([record for _, record in good])
        for (arrived, _), location in zip(good, locations, strict=True):
            arrived.location = location


def _decode(arrived: Arrived) -> Group:
    """Return the group of a result. Raises WireError if it is invalid in every state of the ledger."""
    result, frames = arrived.request.group, arrived.frames
    if len(frames) != 2:
        raise WireError(f"a group result has two payload frames, not {len(frames)}")
    texts, arrays = parse_message(pb.Texts, frames[1]), CompletionArrays.of(frames[0])
    arrived.max_id = check_arrays(arrays, arrived.limits)
    if arrays.rows is None:
        check_texts(len(frames[1]), len(arrays.token_ids), texts.finish_reasons, FINISHED)
    else:
        check_rows(arrays.rows, arrays.lengths.tolist(), len(arrays.prompt_ids), arrived.limits)
        num_tokens = len(arrays.prompt_ids) + len(arrays.token_ids)
        check_texts(0, num_tokens, texts.finish_reasons, FINISHED)
        check_samples(texts, arrays.rows.num_samples, num_tokens, len(frames[1]))
    unread = [""] * len(texts.texts)  # no check here needs the texts
    prompt_ids, completions = split_completions(arrays, texts.finish_reasons, unread)
    group = Group(result.group_id, prompt_ids, completions, rows=split_rows(arrays, completions))
    if group.rows is not None:
        arrived.turns = turns_of(group)
    if group.digest(like=result.digest) != result.digest:
        raise WireError(f"the digest of group {result.group_id} does not match its arrays")
    if group.num_tokens == 0:
        raise WireError(f"group {result.group_id} has no tokens")
    return group


def _decode_begun(arrived: Arrived) -> Group:
    returned, frames = arrived.request.lease_return, arrived.frames
    if len(frames) != 1:
        raise WireError(f"a lease is returned with one payload frame at most, not {len(frames)}")
    arrays, reasons = CompletionArrays.of(frames[0]), returned.finish_reasons
    arrived.max_id = check_arrays(arrays, arrived.limits)
    size_bytes = sum(map(len, returned.texts))
    check_texts(size_bytes, len(arrays.token_ids), reasons, FINISHED + ABORTED)
    return Group(returned.group_id, *split_completions(arrays, reasons, [""] * len(reasons)))


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


ENDINGS = ("done", "truncated")
"""Endings of a finished sample. A sample that was given up has no last turn."""

MAX_SAMPLE_BYTES = 1 << 20
"""Largest number of bytes of a sample's texts besides those of its tokens: tool schemas and texts of programs."""


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


def check_turn(turn: pb.EpisodeTurn, frames: Sequence[Buffer], limits: Limits | None) -> UploadedTurn:
    """Return the parts of a turn that the ledger keeps. Raises WireError."""
    if len(frames) != 2:
        raise WireError(f"a turn has two payload frames, not {len(frames)}")
    if len(frames[1]) > MAX_NOTE_BYTES:
        raise WireError(
            f"the note of a turn has {len(frames[1])} bytes, but {MAX_NOTE_BYTES} are allowed; a large part may "
            "be the state that the environment's `save` returns"
        )
    arrays, note = TurnArrays.decode(frames[0]), parse_message(pb.TurnNote, frames[1])
    max_id = max(check_ids("context_ids", arrays.context_ids), check_ids("token_ids", arrays.token_ids))
    check_logprobs("logprobs", arrays.logprobs)
    if limits is not None and len(arrays.token_ids) > limits.max_new_tokens:
        raise WireError(
            f"a turn of {len(arrays.token_ids)} tokens is longer than policy.generation.max_new_tokens "
            f"{limits.max_new_tokens}"
        )
    if note.finish_reason not in FINISHED:
        raise WireError(f"finish_reason is {note.finish_reason[:64]!r}, but must be one of {', '.join(FINISHED)}")
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
    """Check the fields that only the last turn may set. Raises WireError."""
    if note.HasField("sample") != turn.last:
        raise WireError("only the last turn of a sample, and always that one, sets `sample`")
    if not turn.last:
        if note.left_out:
            raise WireError("only the last turn of a sample names turns in `left_out`")
        return
    if note.sample.ending not in ENDINGS:
        raise WireError(f"ending is {note.sample.ending[:64]!r}, but must be one of {', '.join(ENDINGS)}")
    _check_number("sample.reward", note.sample.reward)
    _check_number("sample.turn_rewards", note.sample.turn_rewards)
    if len(set(note.left_out)) != len(note.left_out) or max(note.left_out, default=0) > turn.index:
        raise WireError(
            f"left_out is {list(note.left_out[:16])}, but must name turns from 0 to {turn.index}, each once"
        )
    if len(note.left_out) > turn.index:
        raise WireError(f"left_out names all {turn.index + 1} turns, but at least one must be trained")


def _check_number(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise WireError(f"{name} is {value}, but must be finite; leave it unset if there is none")


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
    if longest > limits.max_total_tokens:
        raise WireError(
            f"a row of {longest} tokens is longer than policy.max_total_sequence_length {limits.max_total_tokens}"
        )


def check_samples(texts: pb.Texts, num_samples: int, num_tokens: int, size_bytes: int) -> None:
    """Check the texts of a group's samples. Raises WireError."""
    if len(texts.samples) != num_samples:
        raise WireError(f"the header has texts of {len(texts.samples)} samples, but the arrays have {num_samples}")
    check_text_size(size_bytes - num_samples * MAX_SAMPLE_BYTES, num_tokens, len(texts.finish_reasons))
    for sample in texts.samples:
        if sample.ending not in (*ENDINGS, "failed"):
            raise WireError(f"ending is {sample.ending[:64]!r}, but must be one of {', '.join((*ENDINGS, 'failed'))}")
        _check_number("sample.reward", sample.reward)
        _check_number("sample.turn_rewards", sample.turn_rewards)


def turns_of(group: Group) -> list[GroupTurn]:
    """Return a group's turns in the order of samples, rows and tokens. Raises WireError for a token of no turn."""
    assert group.rows is not None
    samples, turns = group.rows.samples, []
    first_rows = {sample: row for row, sample in reversed(list(enumerate(samples)))}
    ends = [0] * len(samples)
    """For each row, the index of the token at which the row's last turn so far ends."""
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
                f"row {row} ends at token {len(completion.token_ids)}, but its last turn ends at {ends[row]}"
            )
    return turns


def turn_digest(token_ids: IntArray, logprobs: FloatArray, spans: Iterable[VersionSpan]) -> str:
    """Return XXH3-128 over a turn's sampled tokens, log-probabilities and the version of each token."""
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
    """Return XXH3-128 over the tokens that the model reads before a turn."""
    return xxhash.xxh3_128(np.ascontiguousarray(context_ids, "<i4").tobytes()).hexdigest()
