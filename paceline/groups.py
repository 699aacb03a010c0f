"""The data types of a sample: version, completion and group; with an environment also turn and transcript.

Suffixes of array names: P prompt tokens, T completion tokens, C completions (samples) of a group, F reward functions, R
transcripts of a group with an environment.

Without an environment a group has one completion for each sample, all of one prompt. With an environment, a sample is
an episode of several turns, and its tokens are in *transcripts*: the model reads and samples each transcript as one
growing sequence. An episode whose history is not an exact prefix of its continuation has several transcripts. In code
and arrays, a transcript is called row.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

SHA256_DIGITS = 64
MEMBER_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
MAX_HOLDERS = 64
"""Number of a group's newest attempts for which the holder is kept."""


class Version(NamedTuple):
    """A policy version within a run: the learner session that made it and the step for which it was made. Step s starts
    from version s and makes version s + 1. A later session starts publishing at the highest step that an earlier
    session published, so versions are ordered as tuples, and their steps never fall."""

    session: int
    step: int


class VersionSpan(NamedTuple):
    """Tokens [start, end) of a completion were sampled under version (session, step)."""

    session: int
    step: int
    start: int
    end: int
    sampler: str = ""
    """Member id of the rollout worker that sampled the tokens; empty if unknown."""


class Turn(NamedTuple):
    """Tokens [start, end) of a transcript that the model sampled in one turn."""

    row: int
    start: int
    end: int
    reward: float
    """Reward from the environment for this turn; NaN if there is none."""


class Rows(NamedTuple):
    """Assigns the transcripts of a group to its samples (`Group.rows`)."""

    num_samples: int
    """Number of samples (C), including those that were given up and have no transcript."""
    samples: tuple[int, ...]
    """[R] index of each transcript's sample, in ascending order."""
    turns: tuple[Turn, ...]
    """Turns in the order of their transcripts and tokens."""


@dataclass(frozen=True)
class Completion:
    """One sampled continuation of a prompt; with an environment, one transcript."""

    token_ids: IntArray
    """[T] sampled tokens with the stop token; in a transcript also the environment's, for which sampled_T is False."""
    logprobs: FloatArray
    """[T] behaviour log-probability of each token under the distribution that it was sampled from, in nats."""
    spans: tuple[VersionSpan, ...]
    """Version spans, oldest first. They cover [0, T) without gaps, in a transcript only the sampled tokens."""
    finish_reason: str
    """`stop` (a stop token or a stop string), `length` (max_new_tokens or the model's length) or `abort` (returned unfinished)."""
    text: str = ""
    """The text for reward functions; see `paceline.chat.completion_texts`."""
    reference_logprobs: FloatArray | None = None
    """[T] log-probabilities by the run's teacher or initial policy, in nats; None if the reward pool runs neither."""
    prompt_ids: IntArray | None = None
    """[P] prompt tokens of a transcript; None if its prompt is the group's."""
    sampled_T: BoolArray | None = None
    """[T] mask of a transcript: true for sampled tokens, false for tokens only read. None if all were sampled."""

    @property
    def num_sampled(self) -> int:
        """Number of tokens that the model sampled."""
        return len(self.token_ids) if self.sampled_T is None else int(self.sampled_T.sum())

    @property
    def oldest_step(self) -> int:
        """Step of the oldest version among the tokens; -1 without tokens."""
        return min((span.step for span in self.spans), default=-1)

    def version_steps(self) -> IntArray:
        """Return [T] step of the version of each token; -1 for tokens that were not sampled."""
        steps_T = np.full(len(self.token_ids), -1, np.int32)
        for span in self.spans:
            steps_T[span.start : span.end] = span.step
        return steps_T


@dataclass(frozen=True)
class Group:
    """One prompt with all its completions: generated and, once it has rewards, scored."""

    group_id: int
    prompt_ids: IntArray
    """[P] tokens of the prompt after the chat template; with an environment, the prompt of the first transcript."""
    completions: tuple[Completion, ...]
    """One completion for each sample; with an environment, the transcripts."""
    prompt: Any = ""
    """The prompt as in the data set: text or chat messages."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The data set's other columns, for the reward functions."""
    rewards_CF: FloatArray | None = None
    """[C, F] a number per sample and reward function; NaN if a function returned None."""
    rows: Rows | None = None
    """Transcripts of each sample; None without an environment."""

    @property
    def num_samples(self) -> int:
        """C: the number of completions or episodes in the group's lease."""
        return len(self.completions) if self.rows is None else self.rows.num_samples

    @property
    def row_samples(self) -> tuple[int, ...]:
        """Index of the sample of each completion or transcript."""
        return tuple(range(len(self.completions))) if self.rows is None else self.rows.samples

    @cached_property
    def num_tokens(self) -> int:
        """Number of sampled tokens in the group, as in the token accounting."""
        return sum(completion.num_sampled for completion in self.completions)

    @cached_property
    def num_sequence_tokens(self) -> int:
        """Number of tokens that the learner reads: completions, and each prompt as often as it has completions."""
        return sum(
            len(completion.token_ids) + len(self.prompt_ids if completion.prompt_ids is None else completion.prompt_ids)
            for completion in self.completions
        )

    @cached_property
    def oldest_step(self) -> int:
        """Step of the oldest version among all tokens; the group's age at step s is s minus this."""
        return min((c.oldest_step for c in self.completions if len(c.token_ids)), default=-1)

    def digest(self, like: str = "") -> str:
        """The digest that identifies this text in scores and receipts: XXH3-128 over prompt, tokens, log-probabilities
        and spans without their samplers. `like` is a stored digest whose algorithm is used: ledgers before format 5
        hold SHA-256."""
        if len(like) == SHA256_DIGITS:
            return hashlib.sha256(b"".join(self._parts())).hexdigest()
        digest = xxhash.xxh3_128()
        for part in self._parts():
            digest.update(part)
        return digest.hexdigest()

    def scores_digest(self) -> str:
        """XXH3-128 over the scores of the group: rewards, then the reference's log-probabilities."""
        references = [c.reference_logprobs for c in self.completions if c.reference_logprobs is not None]
        rewards_CF = np.empty((0, 0), np.float32) if self.rewards_CF is None else self.rewards_CF
        return scores_digest(rewards_CF, references)

    def _parts(self) -> Iterable[memoryview | bytes]:
        yield np.ascontiguousarray(self.prompt_ids, dtype="<i4").data
        for completion in self.completions:
            yield len(completion.token_ids).to_bytes(8, "little")
            yield np.ascontiguousarray(completion.token_ids, dtype="<i4").data
            yield np.ascontiguousarray(completion.logprobs, dtype="<f4").data
            yield repr([span[:4] for span in completion.spans]).encode()
        if self.rows is not None:
            yield from self._row_parts(self.rows)

    def _row_parts(self, rows: Rows) -> Iterable[memoryview | bytes]:
        yield repr((rows.num_samples, rows.samples, [tuple(turn[:3]) for turn in rows.turns])).encode()
        yield np.array([turn.reward for turn in rows.turns], "<f4").data
        for completion in self.completions:
            prompt_ids = self.prompt_ids if completion.prompt_ids is None else completion.prompt_ids
            yield len(prompt_ids).to_bytes(8, "little")
            yield np.ascontiguousarray(prompt_ids, dtype="<i4").data
            sampled_T = (
                np.ones(len(completion.token_ids), bool) if completion.sampled_T is None else completion.sampled_T
            )
            yield np.packbits(sampled_T).tobytes()


def append_span(spans: list[VersionSpan], span: VersionSpan) -> None:
    """Append a span, or extend the last one if it ends where `span` begins and has the same version and sampler."""
    last = spans[-1] if spans else None
    if last is not None and (*last[:2], last.end, last.sampler) == (*span[:2], span.start, span.sampler):
        spans[-1] = last._replace(end=span.end)
    else:
        spans.append(span)


def joined_spans(spans: Iterable[VersionSpan]) -> list[VersionSpan]:
    """Return the spans, with neighbours of the same version and sampler as one span."""
    joined: list[VersionSpan] = []
    for span in spans:
        append_span(joined, span)
    return joined


def cut_spans(spans: Iterable[VersionSpan], num_tokens: int) -> tuple[VersionSpan, ...]:
    """Return the spans of the first `num_tokens` tokens."""
    return tuple(span._replace(end=min(span.end, num_tokens)) for span in spans if span.start < num_tokens)


def continued_spans(
    begun: Sequence[VersionSpan], spans: Iterable[VersionSpan], sampler: str
) -> tuple[VersionSpan, ...]:
    """Return the spans of a completion whose prefix has the spans `begun`. The parts of `spans` behind the prefix get
    `sampler`."""
    start = begun[-1].end if begun else 0
    new = (span._replace(start=max(span.start, start), sampler=sampler) for span in spans if span.end > start)
    return (*begun, *new)


def scores_digest(rewards_CF: FloatArray, references: Iterable[FloatArray] = ()) -> str:
    """XXH3-128 over rewards [C, F] and the reference's log-probabilities of all tokens, both as little-endian float32."""
    digest = xxhash.xxh3_128(np.ascontiguousarray(rewards_CF, dtype="<f4").data)
    for logprobs in references:
        digest.update(np.ascontiguousarray(logprobs, dtype="<f4").data)
    return digest.hexdigest()


def with_holder(lines: str, attempt: int, member_id: str) -> str:
    """Return `lines` (one line for each attempt, from 1) with the holder of `attempt` added. A line is empty if the
    holder is unknown, or the attempt is older than the newest MAX_HOLDERS."""
    earlier = lines.split("\n")[: attempt - 1] if lines else []
    earlier += [""] * (attempt - 1 - len(earlier))
    dropped = max(0, attempt - MAX_HOLDERS)
    return "\n".join([*[""] * dropped, *earlier[dropped:], member_id])


def held_attempt(lines: str, attempt: int) -> str:
    """Return the holder of `attempt` in the `lines` of `with_holder`; empty if unknown."""
    holders = lines.split("\n")
    return holders[attempt - 1] if 1 <= attempt <= len(holders) else ""
